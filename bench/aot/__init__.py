"""Ahead-of-time compilation of every program for accelerators that this machine lacks."""
