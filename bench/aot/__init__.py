"""Every program of a request through the real compilers of accelerators that are not here."""
