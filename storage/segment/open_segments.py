"""The segments that readers and writers hold open, shared and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckv_jax.storage.segment.segment import Segment


class OpenSegments:
    """Open segments by id and checksum; each is closed when its last user lets it go.

    Nothing is locked while the disk is asked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Segment] = {}

    def acquire(self, segment_id: str, checksum: str, make: Callable[[], Segment]) -> Segment:
        """The open segment, made if need be; raises what `make` raises."""
        key = segment_id, checksum
        with self._lock:
            found = self._use(key)
        if found is not None:
            return found
        fresh = make()
        with self._lock:
            found = self._use(key)
            if found is None:
                self._open[key] = fresh
                fresh.users = 1
                return fresh
        fresh.close()  # another thread was faster
        return found

    def _use(self, key: tuple[str, str]) -> Segment | None:
        found = self._open.get(key)
        if found is not None:
            found.users += 1
        return found

    def release(self, segments: list[Segment | None]) -> None:
        """Give up segments that were acquired."""
        unused = []
        with self._lock:
            for segment in segments:
                if segment is None:
                    continue
                segment.users -= 1
                if not segment.users:
                    del self._open[segment.id, segment.checksum]
                    unused.append(segment)
        for segment in unused:
            segment.close()
