"""A min-heap over the pages of one tier: lazy, and only as deep as evictions need."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckv_jax.cache.slots import SlotArray, Slots

_BITS = 32
_MASK = (1 << _BITS) - 1
_EVERYTHING = 1 << (64 + _BITS)

MAX_PAGES = 1 << _BITS

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Members:
    """The pages of a tier, as its heap needs to see them: columns by page, and the slots."""

    slots: Slots
    slot_of: SlotArray
    scores: npt.NDArray[np.float64]
    pins: npt.NDArray[np.int32]


class ScoreHeap:
    """Finds the unpinned pages of a tier with the lowest scores, lowest first.

    Of two equal scores the higher page id is lower: ids grow with the layer, and a later layer
    leaves more time to read a page again.

    Only the lowest pages are heaped: every member below a bound has an entry whose key is at most
    its present key, and members past the bound need none. A score that rises leaves its entry
    alone; the entry is corrected, or let go past the bound, once it reaches the top. Entries of
    pages that have left are skipped there. When the heap runs dry it is filled with the lowest
    share of all members, so that long tables cost little and entries cannot pile up.
    """

    def __init__(self, *, share: float = 0.125, least: int = 256) -> None:
        self._share, self._least = share, least
        self._heap: list[int] = []
        self._bound = 0  # key; 0 means that nothing is heaped yet
        self._most = 0  # entries at which the heap is given up, to be filled when next needed

    @property
    def entries(self) -> int:
        """Entries held, live and dead."""
        return len(self._heap)

    def add(self, pages: Pages, scores: npt.NDArray[np.float64]) -> None:
        """Pages that have entered the tier, or whose score fell; `scores` is the whole column."""
        if not self._bound:
            return
        for key in _keys(scores[pages], pages):
            if key < self._bound:
                heapq.heappush(self._heap, key)
        if len(self._heap) > self._most:
            self._heap, self._bound = [], 0

    def pop_below(self, rivals: npt.NDArray[np.float64], members: Members) -> Pages:
        """Take out the lowest page for each rival that beats it; `rivals` descend.

        Stops at the first rival whose score is not strictly higher than the lowest page's, or
        when every remaining page is pinned. Returns the pages taken out, in order; the caller
        removes them from the tier.
        """
        bits, slot_of, pins = (
            members.scores.view(np.uint64).data,
            members.slot_of.data,
            members.pins.data,
        )
        heap = self._heap
        taken: dict[int, None] = {}
        aside: list[int] = []
        for rival in rivals.view(np.uint64).tolist():
            lowest = -1
            while lowest < 0:
                if not heap:
                    aside = self._fill(members, taken)
                    heap = self._heap
                    if not heap:
                        break
                key = heap[0]
                low = key & _MASK
                page = _MASK - low
                if slot_of[page] < 0 or page in taken:
                    heapq.heappop(heap)
                elif (present := (bits[page] << _BITS) | low) != key:
                    if present < self._bound:
                        heapq.heapreplace(heap, present)
                    else:
                        heapq.heappop(heap)
                elif pins[page]:
                    aside.append(heapq.heappop(heap))
                else:
                    lowest = page
            if lowest < 0 or rival <= heap[0] >> _BITS:
                break
            heapq.heappop(heap)
            taken[lowest] = None
        for key in aside:
            heapq.heappush(heap, key)
        return np.fromiter(taken, np.int64, len(taken))

    def _fill(self, members: Members, taken: dict[int, None]) -> list[int]:
        """Heap the lowest unpinned members; returns the keys of pinned ones below the bound."""
        pages = members.slots.pages()
        if taken:
            pages = pages[~np.isin(pages, np.fromiter(taken, np.int64, len(taken)))]
        scores = members.scores[pages]
        pinned = members.pins[pages] > 0
        free = scores[~pinned]
        count = max(self._least, int(len(pages) * self._share))
        self._bound = _EVERYTHING
        low = np.ones(len(pages), np.bool_)
        if len(free) > count:
            limit = np.partition(free, count)[count : count + 1]
            low = scores <= limit
            self._bound = (int(limit.view(np.uint64)[0]) + 1) << _BITS
        elif not len(free):
            self._bound = 0
            low = np.zeros(len(pages), np.bool_)
        self._heap = _keys(scores[low & ~pinned], pages[low & ~pinned])
        heapq.heapify(self._heap)
        self._most = 2 * int(low.sum()) + 64
        return _keys(scores[low & pinned], pages[low & pinned])


def _keys(scores: npt.NDArray[np.float64], pages: Pages) -> list[int]:
    """One integer a page that orders by score, then by descending page.

    The bit pattern of a float64 >= 0 orders as the number does.
    """
    bits = scores.view(np.uint64).tolist()
    return [(b << _BITS) | (_MASK - p) for b, p in zip(bits, pages.tolist(), strict=True)]
