"""Kernels of a CPU in C++, which XLA calls: their sources, how they are compiled and loaded."""
