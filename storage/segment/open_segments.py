"""The segments that readers and writers hold open, shared and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckv_jax.storage.segment.segment import Segment


class OpenSegments:
    """Open segments by id and checksum; each is closed when its last user lets it go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Segment] = {}

    def acquire(self, segment_id: str, checksum: str, make: Callable[[], Segment]) -> Segment:
        """The open segment, made if need be; raises what `make` raises."""
        with self._lock:
            segment = self._open.get((segment_id, checksum))
            if segment is None:
                segment = self._open[segment_id, checksum] = make()
            segment.users += 1
            return segment

    def release(self, segments: list[Segment | None]) -> None:
        """Give up segments that were acquired."""
        with self._lock:
            for segment in segments:
                if segment is None:
                    continue
                segment.users -= 1
                if not segment.users:
                    del self._open[segment.id, segment.checksum]
                    segment.close()
