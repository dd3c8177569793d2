"""Keeping a store within its bytes: reservations, times of use, pins and eviction."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreError, StoreFull
from ckv_jax.storage.index.eviction import evict
from ckv_jax.storage.index.index import Counters, Index
from ckv_jax.storage.place.files import Files

_TOUCH_S = 5.0  # times of use reach the catalog at most this often


class Bounds:
    """Makes room in a store; thread-safe."""

    def __init__(self, files: Files, index: Index, config: StoreConfig, counts: Counters) -> None:
        self._files = files
        self._index = index
        self._config = config
        self._counts = counts
        self._lock = threading.Lock()
        self._used_lock = threading.Lock()
        self._used: dict[str, float] = {}
        self._touched = time.monotonic()

    def reserve(self, name: str, num_bytes: int) -> None:
        """Count bytes as used until `release`, evicting others; StoreFull when that is too little.

        Args:
          name: of the workspace that will use them.
          num_bytes: how many.
        """
        bound = self._config.max_bytes
        with self._lock:
            excess = 0 if bound is None else self._index.catalog.usage() + num_bytes - bound
            if excess > 0 and self._evict(excess) < excess:
                raise StoreFull(
                    f"{num_bytes} bytes do not fit in max_bytes={bound}: what is stored is pinned, "
                    "continued by others, or being read"
                )
            self._index.catalog.reserve(name, num_bytes)

    def release(self, name: str) -> None:
        """Give a reservation back."""
        self._index.catalog.release(name)

    def evict_to(self, max_bytes: int) -> int:
        """Evict whole segments until at most `max_bytes` are used; returns the bytes freed."""
        with self._lock:
            return self._evict(self._index.catalog.usage() - max_bytes)

    def _evict(self, excess: int) -> int:
        self.flush()
        return evict(
            self._index.catalog.entries(),
            excess=excess,
            policy=self._config.eviction,
            keep=self.pinned(),
            remove=self.remove,
        )

    def remove(self, segment_id: str) -> bool:
        """Remove one segment; False when somebody is reading it."""
        if not self._files.remove(segment_id):
            return False
        self._counts.add("evicted")
        self._index.drop(segment_id)
        return True

    def pinned(self) -> set[str]:
        """Segments that a pinned prefix needs."""
        kept: set[str] = set()
        for id_ in self._files.pins():
            try:
                kept.update(span.segment_id for span in self._index.prefix(id_).spans)
            except StoreError:
                continue  # what was pinned is gone
        return kept

    def touch(self, ids: Iterable[str]) -> None:
        """Note that segments are being read."""
        now = time.time()
        with self._used_lock:
            self._used.update((id_, now) for id_ in ids)
        if time.monotonic() - self._touched > _TOUCH_S:
            self.flush()

    def flush(self) -> None:
        """Bring the times of use to the catalog."""
        with self._used_lock:
            used, self._used = self._used, {}
            self._touched = time.monotonic()
        if used:
            self._index.catalog.touch(used)
