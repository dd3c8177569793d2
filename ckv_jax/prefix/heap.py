"""A min-heap over the pages of one tier: lazy, and only as deep as evictions need."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_EVERYTHING = 1 << 64

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

    Entries are (bit pattern of the score, -page); a float64 >= 0 orders as its bits do.
    Only the lowest pages have any: every member below a bound has an entry that is at most its
    present one, and members past the bound need none. A score that rises leaves its entry alone;
    the entry is corrected, or let go past the bound, once its turn comes. Entries of pages that
    have left are skipped then. When entries run out, the lowest share of all members is sorted
    anew into a run beside the heap, so that long tables cost little and entries cannot pile up.

    Args:
        share, least: how many of the members to sort into a run at a time.
    """

    def __init__(self, *, share: float = 0.125, least: int = 256) -> None:
        self._share, self._least = share, least
        self._run: list[tuple[int, int]] = []  # sorted, the lowest last
        self._heap: list[tuple[int, int]] = []  # what came or changed since the run was made
        self._bound = 0  # bits of a score; 0 means that there are no entries yet
        self._most = 0  # in the heap; past it all entries are given up until next needed

    @property
    def entries(self) -> int:
        """Entries held, live and dead."""
        return len(self._run) + len(self._heap)

    def add(self, pages: Pages, scores: npt.NDArray[np.float64]) -> None:
        """Pages that have entered the tier, or whose score fell; `scores` is the whole column."""
        if not self._bound:
            return
        for entry in _entries(scores[pages], pages):
            if entry[0] < self._bound:
                heapq.heappush(self._heap, entry)
        if len(self._heap) > self._most:
            self._run, self._heap, self._bound = [], [], 0

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
        run, heap = self._run, self._heap
        taken: dict[int, None] = {}
        aside: list[tuple[int, int]] = []
        for rival in rivals.view(np.uint64).tolist():
            lowest = -1
            while lowest < 0:
                if run and (not heap or run[-1] < heap[0]):
                    entry = run.pop()
                elif heap:
                    entry = heapq.heappop(heap)
                else:
                    aside = self._fill(members, taken)
                    run, heap = self._run, self._heap
                    if not run:
                        break
                    continue
                score, low = entry
                page = -low
                present = bits[page]
                if slot_of[page] < 0 or page in taken:
                    continue
                if present != score:
                    if present < self._bound:
                        heapq.heappush(heap, (present, low))
                elif pins[page]:
                    aside.append(entry)
                else:
                    lowest = page
            if lowest < 0:
                break
            if rival <= score:
                heapq.heappush(heap, entry)
                break
            taken[lowest] = None
        for entry in aside:
            heapq.heappush(heap, entry)
        return np.fromiter(taken, np.int64, len(taken))

    def _fill(self, members: Members, taken: dict[int, None]) -> list[tuple[int, int]]:
        """Sort the lowest unpinned members; returns the entries of pinned ones below the bound."""
        pages = members.slots.pages()
        if taken:
            pages = pages[~np.isin(pages, np.fromiter(taken, np.int64, len(taken)))]
        scores = members.scores[pages]
        pinned = members.pins[pages] > 0
        free = scores[~pinned]
        count = max(self._least, int(len(pages) * self._share))
        low = np.full(len(pages), len(free) > 0)
        self._bound = _EVERYTHING if len(free) else 0
        if len(free) > count:
            limit = np.partition(free, count)[count]
            low = scores <= limit
            self._bound = int(limit.view(np.uint64)) + 1
        found, values = pages[low & ~pinned], scores[low & ~pinned]
        order = np.lexsort((found, -values))
        self._run, self._heap = _entries(values[order], found[order]), []
        self._most = len(found) + int(pinned.sum()) + 64
        return _entries(scores[low & pinned], pages[low & pinned])


def _entries(scores: npt.NDArray[np.float64], pages: Pages) -> list[tuple[int, int]]:
    return list(zip(scores.view(np.uint64).tolist(), (-pages).tolist(), strict=True))


FREE = -1
LENT = -2

SlotArray = npt.NDArray[np.int32]


class Slots:
    """`count` slots, each free, lent to a running request, or owned by a cached page.

    Plain bookkeeping: the memory behind a slot belongs to someone else.
    """

    def __init__(self, count: int) -> None:
        self._owner: npt.NDArray[np.int64] = np.full(count, FREE, np.int64)
        self._stack: SlotArray = np.arange(count, dtype=np.int32)[::-1].copy()
        self.free = count
        """Slots that are neither lent nor owned."""
        self.owned = 0
        """Slots that belong to cached pages."""
        self._mark = np.zeros(count, np.int32)

    def __len__(self) -> int:
        return len(self._owner)

    def require_lent(self, slots: SlotArray) -> None:
        """Refuse slots that are outside the pool, not lent, or given twice."""
        n = len(slots)
        if not n:
            return
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= len(self._owner):
            raise ValueError(f"got slots {low} to {high}, expected 0 to {len(self._owner) - 1}")
        ranks = np.arange(n, dtype=np.int32)
        self._mark[slots] = ranks
        if (self._owner[slots] != LENT).any() or (self._mark[slots] != ranks).any():
            raise ValueError("got device slots that are not lent, or one twice in one call")

    def pages(self) -> npt.NDArray[np.int64]:
        """Pages that own a slot, in slot order."""
        return self._owner[self._owner >= 0]

    def take(self, n: int) -> SlotArray:
        """`n` free slots, now lent. The caller has checked `free`."""
        taken = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self._owner[taken] = LENT
        return taken

    def assign(self, slots: SlotArray, pages: npt.NDArray[np.int64]) -> None:
        """Make pages the owners of slots that are lent."""
        self._owner[slots] = pages
        self.owned += len(slots)

    def put_back(self, slots: SlotArray) -> None:
        """Free distinct slots that are lent or owned."""
        n = len(slots)
        self.owned -= int((self._owner[slots] >= 0).sum())
        self._owner[slots] = FREE
        self._stack[self.free : self.free + n] = slots
        self.free += n
