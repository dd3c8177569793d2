"""Whether reading ahead pays: how long choosing and reading take on this machine."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckv_jax.trace import Span

_KEPT = 15  # of the latest measurements: enough for a median that compilations do not move


class Pace:
    """Running medians of one engine. Engine thread only.

    A guess at the next period, the call that makes it and what it reads in vain cost about as much
    as a selection does; at best it hides the time that the period's packs take to read. On two CPU
    cores a selection took 2.5 ms: for 2 ms of reads a period, guessing made a request 7% slower,
    for 8 ms 13% faster.
    """

    def __init__(self) -> None:
        self._select_s: deque[float] = deque(maxlen=_KEPT)
        self._byte_s: deque[float] = deque(maxlen=_KEPT)
        self._always = False

    @contextmanager
    def always(self) -> Iterator[None]:
        """Reading ahead pays, for the `with` block: to compile what it takes."""
        self._always = True
        try:
            yield
        finally:
            self._always = False

    def selected(self, seconds: float) -> None:
        """A selection took so long once its hidden state was there."""
        self._select_s.append(seconds)

    def read(self, spans: Iterable[Span]) -> None:
        """Takes the speed of a request's pack reads from its trace."""
        reads = sorted((s.start_ns, s.end_ns, s.args["bytes"]) for s in spans if s.name == READ)
        busy = last = 0
        for start, end, _ in reads:
            busy += max(0, end - max(start, last))
            last = max(last, end)
        if busy:
            self._byte_s.append(busy * 1e-9 / max(1, sum(size for _, _, size in reads)))

    def ahead_pays(self, num_bytes: int) -> bool:
        """Whether to guess, where a period had to read so many bytes; yes until this is known."""
        if self._always or not self._select_s or not self._byte_s:
            return True
        reading = num_bytes * statistics.median(self._byte_s)
        return reading > statistics.median(self._select_s)


READ = "pack_read"
"""The name of the spans that `Pace.read` looks at."""
