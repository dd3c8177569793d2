"""What rows of one prefix ask before a period, and which prefixes are asked in one call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.pipeline.choice_calls import Chosen, OfPrefix
from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.pipeline.outcome import Outcome
from ckv_jax.pipeline.prefix_rows import PrefixRows
from ckv_jax.pipeline.window import Window
from ckv_jax.pipeline.windows import Lacking, Moving
from ckv_jax.selection.coarse import Stages

_MOST = 16
"""Prefixes in one call."""


class Call:
    """A call that chooses for one or several prefixes."""

    def __init__(self, chosen: Chosen, asking: Sequence[Asking]) -> None:
        self.chosen = chosen
        self.asking = asking
        self.moved: tuple[Moving, Lacking] | None = None
        """What its rows' windows are to hold, and what they lack, once that is demanded."""
        first = 0
        for one in asking:
            one.call, one.first = self, first
            first += len(one.on.rows) * one.parts

    @cached_property
    def outcome(self) -> Outcome:
        """Of all its rows; waits for it."""
        return Outcome.of(self.chosen)

    def moving(self, choices: range) -> Moving:
        """What those of its rows that choose have chosen; waits for it."""
        found, parts = self.outcome, np.arange(len(choices))
        rows = np.flatnonzero(np.concatenate([one.on.limits for one in self.asking]))
        places = np.concatenate([one.on.rows for one in self.asking])[rows]
        at = (rows[:, None] * len(parts) + parts).reshape(-1)
        return Moving(
            place=np.repeat(places, len(parts)),
            choice=np.tile(choices.start + parts, len(rows)),
            ids=found.ids[at],
            table=found.table[at],
            misses=found.misses[at],
        )


@dataclass(slots=True)
class Asking:
    """Rows of one prefix that choose for a period, and what they chose."""

    which: int
    """The prefix, by its place among the batch's."""
    on: PrefixRows
    lengths: np.ndarray
    """int32 [b]: tokens in each row's buffers."""
    parts: int
    """J: choices of a row, one after the other in what comes of them."""
    probes: Sequence[Probe] = ()
    """One for each of n layers."""
    rough: Sequence[Probe] = ()
    stages: Stages | None = None
    call: Call | None = None
    """What it was asked with."""
    first: int = 0
    """Its first row in that."""
    _outcome: Outcome | None = None

    @property
    def of(self) -> OfPrefix:
        """What a call asks of."""
        return OfPrefix(self.on.resident, self.probes, self.rough)

    def choosing(self) -> Iterator[tuple[Chooser, slice, int]]:
        """Each row that chooses: whose, its J rows of the outcome, tokens in its buffers."""
        for row, chooser in enumerate(self.on.choosers):
            mine = slice(row * self.parts, (row + 1) * self.parts)
            yield chooser, mine, int(self.lengths[row])

    @property
    def window(self) -> Window:
        """Of one of its rows."""
        return self.on.choosers[0].window

    @property
    def outcome(self) -> Outcome:
        """What its rows chose; waits for it."""
        if self._outcome is None:
            assert self.call is not None
            count = len(self.on.rows) * self.parts
            self._outcome = self.call.outcome.rows(slice(self.first, self.first + count))
        return self._outcome


def in_calls(asking: Sequence[Asking]) -> list[list[Asking]]:
    """Who asks in one call: prefixes of equal shapes that have one row each. One with several rows
    has a call of its own."""
    calls: dict[Hashable, list[list[Asking]]] = {}
    for one in asking:
        key: Hashable = one.which if len(one.on.rows) > 1 else (one.stages, one.of.shapes)
        groups = calls.setdefault(key, [[]])
        if len(groups[-1]) == _MOST:
            groups.append([])
        groups[-1].append(one)
    return [group for groups in calls.values() for group in groups]
