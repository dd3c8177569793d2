"""The segments that readers and writers hold open, shared and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from ckv_jax.storage.errors import StoreError, StoreUnavailable
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.segment import Segment

Opened = Segment | StoreError
"""A segment that is held open, or why it could not be opened: gone, or out of reach just now."""


class OpenSegments:
    """Open segments by id and checksum; each is closed when its last user lets it go.

    Nothing is locked while the disk is asked.

    Args:
      place: where they lie.
      manifest: the manifest of (id, checksum); raises SegmentDamaged when it is gone or another.
      count: counts something by name.
    """

    def __init__(
        self,
        place: Place,
        manifest: Callable[[str, str], Manifest],
        count: Callable[[str], None],
    ) -> None:
        self._place = place
        self._manifest = manifest
        self._count = count
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Segment] = {}

    def acquire_all(self, spans: Iterable[Span]) -> list[Opened]:
        """The segments of spans; for those that are gone, or cannot be opened now, the error."""
        held: list[Opened] = []
        try:
            for span in spans:
                try:
                    held.append(self.acquire(span))
                except StoreError as e:
                    if isinstance(e, StoreUnavailable):
                        self._count("unread")
                    held.append(e.with_traceback(None))  # frames would keep what they hold
        except BaseException:
            self.release(held)
            raise
        return held

    def acquire(self, span: Span) -> Segment:
        """The open segment of a span; raises SegmentDamaged, StoreUnavailable."""
        key = span.segment_id, span.checksum
        with self._lock:
            found = self._use(key)
        if found is not None:
            return found
        fresh = self._make(*key)
        with self._lock:
            found = self._use(key)
            if found is None:
                self._open[key] = fresh
                fresh.users = 1
                return fresh
        fresh.close()  # another thread was faster
        return found

    def _make(self, segment_id: str, checksum: str) -> Segment:
        segment = Segment(self._manifest(segment_id, checksum), checksum, self._place)
        try:
            self._manifest(segment_id, checksum)  # not replaced before it was held
        except BaseException:
            segment.close()
            raise
        return segment

    def _use(self, key: tuple[str, str]) -> Segment | None:
        found = self._open.get(key)
        if found is not None:
            found.users += 1
        return found

    def release(self, segments: Sequence[Opened]) -> None:
        """Give up segments that were acquired."""
        unused = []
        with self._lock:
            for segment in segments:
                if isinstance(segment, StoreError):
                    continue
                segment.users -= 1
                if not segment.users:
                    del self._open[segment.id, segment.checksum]
                    unused.append(segment)
        for segment in unused:
            segment.close()
