"""A real store whose reads take random times and may fail."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckv_jax.storage.prefix import Prefix, ProbePages
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.store import ChunkStore

Pack = tuple[str, int, int]
"""(prefix, layer group, chunk)."""


class UnsteadyReader:
    """A real reader whose reads take random times, so that they end in any order, and may fail."""

    def __init__(self, reader: PrefixReader, seed: int, store: UnsteadyStore) -> None:
        self._reader = reader
        self._random = random.Random(seed)
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __enter__(self) -> UnsteadyReader:
        self._reader.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read_packs(
        self,
        group: int | np.ndarray,
        chunks: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
    ) -> np.ndarray:
        groups = np.broadcast_to(group, len(chunks)).tolist()
        packs = {(self.prefix.id, *pack) for pack in zip(groups, chunks.tolist(), strict=True)}
        with self._store.reading(packs):
            time.sleep(self._random.choice([0.0, 0.0, 0.001, 0.004]))
            ok = self._reader.read_packs(group, chunks, out, rows=rows)
        lost = np.array([self._random.random() < self._store.failing for _ in chunks])
        out[np.flatnonzero(lost) if rows is None else rows[lost]] = 0
        return ok & ~lost

    def read_probe_pages(
        self, layer: int, pages: ProbePages, ids: np.ndarray, out: np.ndarray, *, rows: np.ndarray
    ) -> np.ndarray:
        ok = self._reader.read_probe_pages(layer, pages, ids, out, rows=rows)
        lost = np.array([self._random.random() < self._store.failing for _ in ids])
        out[rows[lost]] = 0
        return ok & ~lost


class UnsteadyStore:
    """A real store with unsteady readers."""

    def __init__(self, store: ChunkStore, failing: float = 0.0) -> None:
        self._store = store
        self.failing = failing
        self._seed = 0
        self.reads: list[Pack] = []
        """Every pack that was asked for."""
        self.twice: set[Pack] = set()
        """Packs that were asked for while they were being read."""
        self._under_way: set[Pack] = set()
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, packs: set[Pack]) -> Iterator[None]:
        """Notes that these are being read."""
        with self._lock:
            self.reads += packs
            self.twice |= packs & self._under_way
            self._under_way |= packs
        yield
        with self._lock:
            self._under_way -= packs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def reader(self, prefix: Prefix, **named: Any) -> UnsteadyReader:
        self._seed += 1
        reader = self._store.reader(prefix, **named)
        return UnsteadyReader(reader, self._seed, self)
