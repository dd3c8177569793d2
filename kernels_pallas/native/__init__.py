"""C++ kernels for CPUs, called by XLA: sources, compilation and loading."""
