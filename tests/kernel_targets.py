"""Targets that tests compile for, or pretend to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckv_jax.kernels_pallas.native import library
from ckv_jax.kernels_pallas.target import Target

CPU = Target(platform="cpu", kind="cpu")
WIDENING_CPU = Target(platform="cpu", kind="cpu", widens=True)
H100 = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132)
V5E = Target(platform="tpu", kind="TPU v5 lite")

OF = {"reference": CPU, "mosaic_gpu": H100, "tpu": V5E}
"""By implementation."""


NATIVE = tuple(f"cpu-{level}" for level in range(len(library.LEVELS)))
"""A CPU's native kernels on every processor that they are compiled for, by `library.LEVELS`."""
BEST = library.native()


@contextmanager
def native_at(implementation: str) -> Iterator[None]:
    """As on that processor; skips a test where this one has less."""
    level = NATIVE.index(implementation)
    if BEST.path is None or level > BEST.level:
        pytest.skip(BEST.refused or f"got a processor without {library.LEVELS[level]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "native", lambda: BEST._replace(level=level))
        yield
