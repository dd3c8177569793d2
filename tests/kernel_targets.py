"""Targets that tests compile for, or pretend to."""

from __future__ import annotations

from ckv_jax.kernels_pallas.native.library import required_level
from ckv_jax.kernels_pallas.target import Target

CPU = Target(platform="cpu", kind="cpu")
WIDENING_CPU = Target(platform="cpu", kind="cpu", widens=True)
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132)
V5E = Target(platform="tpu", kind="TPU v5 lite")

OF = {"reference": CPU, "mosaic_gpu": H100, "tpu": V5E}
"""By implementation."""


NATIVE = {"cpu": None, "cpu-avx512": 2, "cpu-avx2": 1, "cpu-portable": 0}
"""A CPU's native kernels at their best and as on other processors: the level that runs."""


def without_native(implementation: str) -> str:
    """Why one of `NATIVE` does not run here; empty where it does."""
    try:
        required_level(NATIVE[implementation])
    except NotImplementedError as error:
        return str(error)
    return ""
