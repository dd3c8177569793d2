"""What ended texts leave in the store, until it is removed: nobody waits for it."""

from __future__ import annotations

import logging
import threading

from ckv_jax.errors import CkvError
from ckv_jax.storage.store import ChunkStore

_SOON_S = 0.02
_LATE_S = 2.0
"""Between two tries: soon at first, and then twice as late each time, up to this."""

_log = logging.getLogger(__name__)


def remove_line(store: ChunkStore, line: list[str]) -> bool:
    """Removes segments of which each continues the next, by id; whether all are gone.

    It ends at one that somebody reads, since what that one continues must stay; segments that are
    gone already are no error. Raises a `CkvError` where the store cannot tell.
    """
    return all(store.remove_segment(segment) for segment in line)


class Leftovers:
    """Removes lines of segments in a thread of its own; thread-safe.

    Where one is being read just now, or the store gives no answer, it is tried again a little
    later, for as long as it takes. `close` tries once more, and leaves the rest to whoever sweeps
    the store next.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._left: list[list[str]] = []
        self._closed = False
        self._thread: threading.Thread | None = None  # started by what is first left

    def add(self, line: list[str]) -> None:
        """Removes segments of which each continues the next, by id. Not after `close`."""
        if not line:
            return
        with self._changed:
            self._left.append(line)
            if self._thread is None:
                name = "ckv-leftovers"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, after a last try. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        delay = _SOON_S
        while True:
            with self._changed:
                lines, last = list(self._left), self._closed
            why = "somebody reads them"
            gone = []
            for line in lines:
                try:
                    if remove_line(self._store, line):
                        gone.append(line)
                except CkvError as error:
                    why = str(error)
            with self._changed:
                self._left = [line for line in self._left if line not in gone]
                if last:
                    if self._left:
                        _log.warning("segments of ended texts stay in the store: %s", why)
                    return
                delay = _SOON_S if gone else min(2 * delay, _LATE_S)
                known = len(self._left)
                self._changed.wait_for(
                    lambda: self._closed or len(self._left) > known,  # noqa: B023
                    timeout=delay if known else None,
                )
