"""A lock that goes to whoever has waited for it, not back to whoever gave it up last."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """Not reentrant. While one thread waits, its holder cannot take the lock again before it.

    Python's own locks make no such promise: a thread that works in a loop, as the engine's does,
    would keep an ingest waiting for as long as there are requests.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> bool:
        with self._turn:
            return self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
