"""Where the packs of one prefix come from: the store, or what is computed again in its place."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ckv_jax.reads.read_job import PackReader
from ckv_jax.reads.residents import Resident


class Replacement(Protocol):
    """KV that the store could not give, computed again."""

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """Packs [n, *pack_shape]. Raises `RecoveryNeeded` while they are still to be computed."""
        ...


class Source(NamedTuple):
    """Where one prefix's packs come from."""

    prefix: Resident
    reader: PackReader
    recovered: Replacement
