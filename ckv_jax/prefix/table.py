"""What is known of every page: flat columns indexed by page id."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckv_jax.prefix.heap import Pages
from ckv_jax.prefix.policy import Policy

T = TypeVar("T", bound=np.generic)


class PageTable:
    """Scores and whereabouts of all pages, in memory or not. Columns grow; ranges are reused.

    Attributes (one element a page):
        importance: float64, sum of recorded attention (I of §4.4), or its moving average.
        frequency: uint32, number of records (F of §4.4).
        last_used: uint64, tick of the latest record, 0 for never.
        score: float64, the policy's score of the three above.
        device_slot, host_slot: int32, -1 where the page is not in that tier.
        pins: int32, how many running requests rely on the page staying where it is.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._count = 0
        self._clock = 0
        self._spare: dict[int, list[int]] = {}  # ranges to reuse: size -> bases
        self.importance = np.zeros(0, np.float64)
        self.frequency = np.zeros(0, np.uint32)
        self.last_used = np.zeros(0, np.uint64)
        self.score = np.zeros(0, np.float64)
        self.device_slot = np.zeros(0, np.int32)
        self.host_slot = np.zeros(0, np.int32)
        self.pins = np.zeros(0, np.int32)
        self._mark = np.zeros(0, np.int32)

    def extend(
        self,
        importance: npt.NDArray[np.floating],
        frequency: npt.NDArray[np.integer],
    ) -> int:
        """Consecutive ids for as many pages as there are elements; returns the first id."""
        n = len(importance)
        spare = self._spare.get(n)
        base = spare.pop() if spare else self._append(n)
        part = slice(base, base + n)
        self.importance[part] = importance
        self.frequency[part] = frequency
        self.last_used[part] = 0
        self.device_slot[part] = self.host_slot[part] = -1
        self.score[part] = _checked(
            self._policy.score(self.importance[part], self.frequency[part], self.last_used[part])
        )
        return base

    def give_up(self, base: int, n_pages: int) -> None:
        """Let a later `extend` of the same size have these ids."""
        self._spare.setdefault(n_pages, []).append(base)

    def use(self, pages: Pages, attention: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Record one use of each page at the next tick; returns whose score fell, bool `[n]`."""
        self._clock += 1
        importance = self._with(pages, attention)
        frequency = self.frequency[pages] + np.uint32(1)
        last_used = np.full(len(pages), self._clock, np.uint64)
        score = _checked(self._policy.score(importance, frequency, last_used))
        fell = score < self.score[pages]
        self.importance[pages] = importance
        self.frequency[pages] = frequency
        self.last_used[pages] = last_used
        self.score[pages] = score
        return fell

    def _with(self, pages: Pages, attention: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Their importance after a use: a sum, or an average that begins with its first value."""
        old, newest = self.importance[pages], self._policy.newest
        if newest is None:
            return old + attention
        return np.where(self.frequency[pages] == 0, attention, old + newest * (attention - old))

    @property
    def observes(self) -> bool:
        """Whether the policy wants attention that came without a use."""
        return self._policy.sees_all

    def see(self, pages: Pages, attention: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Record attention without a use; returns whose score fell, bool `[n]`."""
        importance = self.importance[pages] + attention
        score = self._policy.score(importance, self.frequency[pages], self.last_used[pages])
        score = _checked(score)
        fell = score < self.score[pages]
        self.importance[pages] = importance
        self.score[pages] = score
        return fell

    def check(self, pages: Pages) -> None:
        """Refuse ids that were never given out, and ids that come twice."""
        if not len(pages):
            return
        if pages.min() < 0 or pages.max() >= self._count:
            raise ValueError(
                f"got pages {pages.min()} to {pages.max()}, expected 0 to {self._count - 1}"
            )
        ranks = np.arange(len(pages), dtype=np.int32)
        self._mark[pages] = ranks
        if (self._mark[pages] != ranks).any():
            raise ValueError("got a page twice in one call, expected distinct pages")

    def _append(self, n: int) -> int:
        base = self._count
        self._count += n
        if self._count > len(self.score):
            self.importance = _grown(self.importance, self._count)
            self.frequency = _grown(self.frequency, self._count)
            self.last_used = _grown(self.last_used, self._count)
            self.score = _grown(self.score, self._count)
            self.device_slot = _grown(self.device_slot, self._count)
            self.host_slot = _grown(self.host_slot, self._count)
            self.pins = _grown(self.pins, self._count)
            self._mark = _grown(self._mark, self._count)
        return base


def _grown(column: npt.NDArray[T], more: int) -> npt.NDArray[T]:
    """With room for so many more: for as many as there are, so that it seldom has to grow."""
    return np.concatenate([column, np.zeros(more, column.dtype)])


def _checked(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scores that the heaps can order: finite, >= 0, and no negative zero."""
    if not (np.isfinite(scores) & (scores >= 0)).all():
        raise ValueError("got scores below 0 or not finite, expected finite ones of 0 or more")
    return scores + 0.0
