"""A store's life: how it is opened, asks the disk without waiting for ever, and is closed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreClosed, StoreUnavailable
from ckv_jax.storage.index.bounds import Bounds
from ckv_jax.storage.index.index import Counters, Index
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.place.place import Place, open_place
from ckv_jax.storage.segment.deadline import Gate
from ckv_jax.storage.segment.open_segments import OpenSegments
from ckv_jax.storage.segment.proof import Proof

T = TypeVar("T")


class OpenStore:
    """What `ChunkStore` is made of, until it is closed; thread-safe, a context manager."""

    def __init__(self, place: Place, config: StoreConfig, *, readonly: bool = False) -> None:
        """Use `open`."""
        self.config = config
        self.files = place.files
        self._place = place
        self._closed = False
        self._counts = Counters()
        self._counts.add("swept", self.files.sweep())
        self.gate = Gate()
        self.index = Index(self.files, self._counts, wait_s=config.wait_s, readonly=readonly)
        self._segments = OpenSegments(place, self.index.manifest, self._counts.add)
        self._proof = Proof(self.index.report, place.patience)
        self.bounds = Bounds(self.files, self.index, config, self._counts)
        if not readonly:
            self._counts.add("swept", self.bounds.sweep())

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        config: StoreConfig | None = None,
        readonly: bool = False,
    ) -> Self:
        """Open or create a store; sweeps what killed writers left, and mends the index.

        Args:
          url: a folder, or a file://, s3://, gs:// or memory:// URL.
          config: limits and I/O settings.
          readonly: only look: nothing is created, changed or removed, and nothing can be written.

        Raises:
          StoreError: the place is something else than a store, or cannot be used.
        """
        config = config or StoreConfig()
        patience = Patience(config.wait_s)

        made: list[Self] = []

        def work() -> list[Self]:
            place = open_place(url, config, patience, readonly=readonly)
            try:
                made.append(cls(place, config, readonly=readonly))
            except BaseException:
                place.close()
                raise
            return made

        try:
            patience.run(f"opening {url}", work, late=lambda made: made[0].close())
        except BaseException:
            patience.close()
            raise
        return made[0]

    @property
    def reads_past_cache(self) -> bool:
        """Whether reads go past the page cache, so that they come from the disk."""
        return self._place.direct

    def stats(self) -> dict[str, int]:
        """Counters since `open`: hits, misses, bad_packs, gone, unread, quarantined, evicted, …"""
        found = {name: self._counts[name] for name in _COUNTERS}
        found["rebuilds"] = self.index.catalog.rebuilds
        found["refused_writes"] = self.index.catalog.refused
        return found

    # -- life ------------------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        work: Callable[[], T],
        *,
        seconds: float | None = None,
        late: Callable[[T], object] | None = None,
    ) -> T:
        """Ask the disk, with an end to the wait; raises StoreClosed."""
        self._check_open()

        def there() -> T:
            self.files.require()
            return work()

        return self._place.patience.run(what, there, seconds=seconds, late=late)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def close(self) -> None:
        """Close the store; readers that are still open stay usable. May be called twice."""
        if self._closed:
            return
        self._closed = True

        def work() -> None:
            with contextlib.suppress(StoreUnavailable):
                self.files.require()  # else an index would be made where the store was
                self.bounds.flush()
            self.index.catalog.close()

        with contextlib.suppress(StoreUnavailable):
            self._place.patience.run("closing the store", work)
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_COUNTERS = (
    "hits",
    "misses",
    "bad_packs",
    "gone",
    "unread",
    "lost_digests",
    "mixed_digests",
    "quarantined",
    "bad_manifests",
    "evicted",
    "evicted_room",
    "evicted_expired",
    "evicted_pruned",
    "evicted_deleted",
    "swept",
)
