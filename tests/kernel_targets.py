"""Targets that tests compile for, or pretend to."""

from __future__ import annotations

from ckv_jax.kernels_pallas.target import Target

CPU = Target(platform="cpu", kind="cpu")
WIDENING_CPU = Target(platform="cpu", kind="cpu", widens=True)
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132)
V5E = Target(platform="tpu", kind="TPU v5 lite")

OF = {"reference": CPU, "mosaic_gpu": H100, "tpu": V5E}
"""By implementation."""
