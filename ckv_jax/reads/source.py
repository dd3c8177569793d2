"""Where the packs of one prefix come from: the store, or what is computed again in its place."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np

from ckv_jax.reads.read_job import PackReader
from ckv_jax.storage.prefix import Prefix


class Paged(Protocol):
    """What of a prefix lies in packs: where the caches know them, and what reading them takes."""

    @property
    def prefix(self) -> Prefix:
        """Whose they are."""
        ...

    @property
    def first_page(self) -> np.ndarray:
        """int64 [M]: page of (group 0, chunk)."""
        ...

    @property
    def page_stride(self) -> np.ndarray:
        """int64 [M]: pages from one group to the next."""
        ...

    def read_bytes(self, chunks: np.ndarray) -> int:
        """Bytes that reading these chunks takes, each of one group."""
        ...


class Replacement(Protocol):
    """KV that the store could not give, computed again."""

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """Packs [n, *pack_shape]. Raises `RecoveryNeeded` while they are still to be computed."""
        ...


class Source(NamedTuple):
    """Where one prefix's packs come from."""

    prefix: Paged
    reader: PackReader
    recovered: Replacement
    kind: Literal["pack", "probe"] = "pack"
    """Keys and values to attend to, or keys to choose by: what traces call the reads."""
