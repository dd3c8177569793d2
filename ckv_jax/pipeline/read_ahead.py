"""Read-ahead: what is read before the selection that needs it is known (§4.3).

It changes when bytes arrive, never what is answered. The first period is guessed from the request
before, every other one from the period before it: by what that one selected, or by its own queries
on the hidden state a period early (lookahead).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np

from ckv_jax.config import SystemConfig
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import Selection
from ckv_jax.trace import Span

RECURRENCE = 0.5
"""Reads the previous request's first selection ahead only if half of it recurred: below that, the
packs read for nothing delay the selection's own by more than is won."""

_KEPT = 15  # of the latest measurements: enough for a median that compilations do not move

READ = "pack_read"
"""The name of the spans that reads of packs leave in a trace."""


class Pace:
    """Running medians of one engine: how long choosing and reading take on this machine.

    A guess at the next period, the call that makes it and the packs it reads for nothing cost about
    as much as a selection does; at best it hides the time that the period's packs take to read. On
    two CPU cores a selection took 2.5 ms: for 2 ms of reads per period, guessing made a request 7%
    slower, for 8 ms 13% faster.
    """

    def __init__(self) -> None:
        self._select_s: deque[float] = deque(maxlen=_KEPT)
        self._byte_s: deque[float] = deque(maxlen=_KEPT)
        self._worth = -1.0  # bytes that take as long to read as a selection takes

    def selected(self, seconds: float) -> None:
        """A selection took so long once its hidden state was there."""
        self._select_s.append(seconds)
        self._compare()

    def read(self, spans: Iterable[Span]) -> None:
        """Takes the speed of a request's pack reads from its trace."""
        reads = sorted([(s.start_ns, s.end_ns, s.args["bytes"]) for s in spans if s.name == READ])
        busy = last = size = 0
        for start, end, moved in reads:
            busy += max(0, end - max(start, last))
            last = max(last, end)
            size += moved
        if busy:
            self._byte_s.append(busy * 1e-9 / max(1, size))
            self._compare()

    def ahead_pays(self, num_bytes: int) -> bool:
        """Whether to guess, where a period had to read so many bytes; yes until this is known."""
        return num_bytes > self._worth

    def _compare(self) -> None:
        if self._select_s and self._byte_s:
            self._worth = statistics.median(self._select_s) / statistics.median(self._byte_s)


class ReadAhead:
    """What one system reads ahead. Engine thread only."""

    def __init__(self, system: SystemConfig) -> None:
        self._system = system
        self.pace = Pace()

    def opening(self, opened: OpenPrefix, limit: int) -> np.ndarray:
        """Chunks int [<= limit] to read before anything is selected, by the request before."""
        if self._system.prefetch == "inter" and opened.recurrence >= RECURRENCE:
            return opened.opening[:limit]
        return opened.opening[:0]

    def pays(self, missing_bytes: int) -> bool:
        """Whether to guess the next period, where this one had to read so many bytes."""
        return self._system.speculate_always or self.pace.ahead_pays(missing_bytes)

    def remember(self, opened: OpenPrefix, selection: Selection) -> None:
        """Notes a first period's selection, most attended first, for `opening`."""
        chosen, attention = np.asarray(selection.ids), np.asarray(selection.attention)
        taken = chosen >= 0
        most = np.zeros(opened.num_chunks, np.float32)
        np.maximum.at(most, chosen[taken], attention[taken])
        union = np.unique(chosen[taken])
        best = union[np.argsort(-most[union], kind="stable")]
        n = min(len(best), len(opened.opening))
        again = len(np.intersect1d(best[:n], opened.opening[:n]))
        opened.recurrence = again / n if n else 0.0
        opened.opening = best


def guessed_chunks(limits: np.ndarray, overfetch: float) -> np.ndarray:
    """How many chunks lookahead guesses for each row, int32 [B], of which it selects `limits`.

    Rows share the excess: guesses are read as one, and what one row nearly chose another chose.
    """
    share = 1 + (overfetch - 1) / len(limits)
    more: np.ndarray = np.ceil(limits * share).astype(np.int32)
    return more
