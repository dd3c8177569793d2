"""What decode reads before it is chosen, while a period's layers compute (KVDrive §6.1).

Two guesses, which change when bytes arrive and nothing else: what a token nearly chose, the next
one may choose; and what enters a period says, by the next period's queries, what that one will
probably choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.window import Window
from ckv_jax.reads.packs import Packs
from ckv_jax.selection.select import Ahead

_NOTHING = np.zeros(0, np.int64)


class Guesses:
    """What one decode batch reads ahead. Engine thread only.

    A prefix is named by its place among the batch's, `which`; `window` is one of its rows'.
    """

    def __init__(self, kind: Ahead, overfetch: float, plan: Plan) -> None:
        """`overfetch`: chunks that are read for each one that is chosen."""
        self.near = kind != "next" and overfetch > 1
        """Whether what is nearly chosen matters."""
        self._next = kind != "near"
        self._plan = plan
        self._missed: list[tuple[int, Window, int, np.ndarray]] = []
        self._asked: list[tuple[int, Window, Callable[[], Sequence[np.ndarray]]]] = []
        self._open: set[tuple[int, int]] = set()  # (period, which) that is read for

    def nearly(self, which: int, window: Window, choice: int, chunks: np.ndarray) -> None:
        """A prefix's rows nearly took these chunks int [n] for a choice, and none took them."""
        self._missed.append((which, window, choice, chunks))

    def asks_after(self, period: int) -> bool:
        """Whether the period after this one is to be guessed."""
        return self._next and period + 1 < self._plan.periods

    def next_period(
        self, which: int, window: Window, wait: Callable[[], Sequence[np.ndarray]]
    ) -> None:
        """A call is under way that guesses the next period's chunks; `wait` has them, int [n] of
        each of its choices."""
        self._asked.append((which, window, wait))

    def start(self, period: int, packs: Callable[[], Packs]) -> None:
        """Some layers of a period are computed now: starts the reads, in `packs()`.

        What had been guessed for it and was not chosen is given up, unless it nearly was.
        """
        asked, missed = self._asked, self._missed
        self._asked, self._missed = [], []
        for which in [which for of, which in self._open if of == period]:
            self._open.remove((period, which))
            for choice in self._plan.choices_of(period) if not self.near else ():
                for group in self._plan.groups(choice):
                    packs().only_ahead(which, group, _NOTHING)
        for which, window, wait in asked:  # these are needed first
            for choice, guess in zip(self._plan.choices_of(period + 1), wait(), strict=True):
                self._read(which, window, choice, guess, packs, only=False)
            self._open.add((period + 1, which))
        for which, window, choice, near in missed:
            self._read(which, window, choice, near, packs, only=True)

    def forget(self) -> None:
        """Drops all guesses: their token has failed, and nothing is read for it any more."""
        self._missed, self._asked = [], []
        self._open.clear()

    def _read(
        self, which: int, window: Window, choice: int, chunks: np.ndarray,
        packs: Callable[[], Packs], *, only: bool,
    ) -> None:  # fmt: skip
        """Into memory for reads on their way, never into a window's slot. With `only`, earlier
        guesses at the choice are given up."""
        if not window.held:
            return  # its packs come through the pool, which has no room to spare
        for group in self._plan.groups(choice):
            device, host = window.lookup(group, chunks)
            absent = chunks[(device < 0) & (host < 0)]
            if only:
                packs().only_ahead(which, group, absent)
            if len(absent):
                packs().ahead(which, group, absent, apart=True)
