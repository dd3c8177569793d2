"""What rows of one prefix ask before a period, and which prefixes are asked in one call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.pipeline.choice_calls import Chosen, OfPrefix
from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.pipeline.outcome import Outcome, chunks_of
from ckv_jax.pipeline.prefix_rows import PrefixRows
from ckv_jax.pipeline.window import Window
from ckv_jax.selection.coarse import Stages

_MOST = 16
"""Prefixes in one call."""


class Call:
    """A call that chooses for one or several prefixes."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen

    @cached_property
    def outcome(self) -> Outcome:
        """Of all its rows; waits for it."""
        return Outcome.of(self.chosen)


Moving = tuple[Chooser, int, np.ndarray, np.ndarray, np.ndarray]
"""A choice of a row: which it is, its ids, the window's slots of them, and those of them that it
lacks."""


@dataclass(slots=True)
class Asking:
    """Rows of one prefix that are to choose for a period, and what they chose."""

    which: int
    """The prefix, by its place among the batch's."""
    on: PrefixRows
    lengths: np.ndarray
    """int32 [b]: tokens in each row's buffers."""
    limits: np.ndarray
    """int32 [b], how much each row is to choose; 0: it need not."""
    parts: int
    """J: choices of a row, one after the other in what comes of them."""
    probes: Sequence[Probe] = ()
    """One for each of n layers."""
    rough: Sequence[Probe] = ()
    stages: Stages | None = None
    queries: np.ndarray | None = None
    """float32 [b, n, H, D], where it matters how far they have turned (`Select.drift`)."""
    call: Call | None = None
    """What it was asked with."""
    first: int = 0
    """Its first row in that."""
    moving: list[Moving] = field(default_factory=list)
    _outcome: Outcome | None = None

    @property
    def of(self) -> OfPrefix:
        """What a call asks of."""
        return OfPrefix(self.on.resident, self.probes, self.rough)

    def choosing(self) -> Iterator[tuple[Chooser, int, int]]:
        """Each row that is to choose, with each of its J choices: (whose, row of the outcome,
        which of them)."""
        for row in np.flatnonzero(self.limits).tolist():
            for part in range(self.parts):
                yield self.on.choosers[row], row * self.parts + part, part

    def missing(self, choice: int) -> np.ndarray:
        """Chunks that its rows' windows lack for a choice, each once, int64 [n]."""
        return chunks_of([misses for _, of, _, _, misses in self.moving if of == choice])

    @property
    def window(self) -> Window:
        """Of one of its rows."""
        return self.on.choosers[0].window

    @property
    def outcome(self) -> Outcome:
        """What its rows chose; waits for it."""
        if self._outcome is None:
            assert self.call is not None
            count = len(self.limits) * self.parts
            self._outcome = self.call.outcome.rows(slice(self.first, self.first + count))
        return self._outcome

    def guess(self) -> list[np.ndarray]:
        """What its rows chose or nearly chose, int64 [n] of each of J choices; waits for it."""
        found = [self.outcome.part(part, self.parts) for part in range(self.parts)]
        return [chunks_of([one.ids, one.near]) for one in found]


def in_calls(asking: Sequence[Asking]) -> list[list[Asking]]:
    """Who asks in one call: prefixes of equal shapes that have one row each. One with several rows
    has a call of its own."""
    calls: dict[Hashable, list[list[Asking]]] = {}
    for one in asking:
        key: Hashable = one.which if len(one.limits) > 1 else (one.stages, one.of.shapes)
        groups = calls.setdefault(key, [[]])
        if len(groups[-1]) == _MOST:
            groups.append([])
        groups[-1].append(one)
    return [group for groups in calls.values() for group in groups]
