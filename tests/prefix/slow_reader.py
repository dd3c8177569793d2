"""A reader in memory that can be slow, can be held back, and can fail: for order and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

SHAPE = (1, 2, 4, 1, 8)


class SlowReader:
    """Pack (group, chunk) is filled with the number `content(group, chunk)`.

    `delay` gives the seconds a read takes; while `gate` is not set reads do not end. Chunks in
    `bad` come back as not ok; groups in `broken` raise.
    """

    def __init__(
        self,
        *,
        delay: Callable[[], float] = lambda: 0.0,
        bad: frozenset[int] = frozenset(),
        broken: frozenset[int] = frozenset(),
    ) -> None:
        self.delay = delay
        self.bad = bad
        self.broken = broken
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[int, list[int]]] = []
        self.started = threading.Semaphore(0)

    def read_packs(
        self, group: int, chunks: np.ndarray, out: np.ndarray, *, rows: np.ndarray | None = None
    ) -> np.ndarray:
        self.calls.append((group, chunks.tolist()))
        self.started.release()
        time.sleep(self.delay())
        if not self.gate.wait(30):
            raise TimeoutError("the test never opened the gate")
        if group in self.broken:
            raise OSError(f"group {group} is broken")
        ok = ~np.isin(chunks, list(self.bad))
        places = np.arange(len(chunks)) if rows is None else rows
        for row, chunk, good in zip(places, chunks.tolist(), ok, strict=True):
            out[row] = content(group, chunk) if good else 0
        return ok


def content(group: int, chunk: int) -> float:
    return 1000.0 * group + chunk
