"""Cache policies, which score pages, and a heap that finds the pages with the lowest scores.

A higher score stays in memory longer. A policy sees only a page's own history, so that a score
changes only when the page is used or scored; `ScoreHeap` relies on this to be lazy. To add one: a
function, and its line in `POLICIES`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

# [n], what was passed to `Tiers.record`: its sum, or its moving average (`Policy.newest`)
Importance = npt.NDArray[np.float64]
Frequency = npt.NDArray[np.uint32]  # [n], the number of records
LastUsed = npt.NDArray[np.uint64]  # [n], the tick of the latest record, 0 for never
Scores = npt.NDArray[np.float64]  # [n], finite and >= 0

Score = Callable[[Importance, Frequency, LastUsed], Scores]

_RECENCY = 2.0**-32  # below one whole load for any clock a process can reach
_EVERYTHING = 1 << 64

Pages = npt.NDArray[np.int64]


def attention_guided(importance: Importance, frequency: Frequency, _: LastUsed) -> Scores:
    """S = I x F (ContiguousKV §4.4, Equation 2).

    I is the attention a chunk has received (the sum of Equation 1's A over the requests that
    used it) and F how often it was loaded. Neither is aged or normalised.
    """
    return importance * frequency


def frequency_then_attention(importance: Importance, frequency: Frequency, _: LastUsed) -> Scores:
    """S = F + I / (1 + I): loads count first, attention decides among equals.

    Equation 2's product lets one question's strong attention outweigh several loads, which costs
    hits where every question has chunks of its own: with the reference checkpoint's selections it
    stays below LFU. What attention adds to the loads is how near to being selected a chunk has
    been, so that I sums Equation 1's A over all requests, not only those that selected it.
    """
    return frequency + importance / (1.0 + importance)


def lru(importance: Importance, frequency: Frequency, last_used: LastUsed) -> Scores:
    """Least recently used: the tick of the latest use, exact up to 2^53."""
    return last_used.astype(np.float64)


def lfu(importance: Importance, frequency: Frequency, last_used: LastUsed) -> Scores:
    """Least frequently used; among equals, the least recently used goes first."""
    return frequency + last_used * _RECENCY


@dataclass(frozen=True, slots=True)
class Policy:
    """A cache policy: a score function, and the records that it scores."""

    score: Score
    """Maps importance, frequency and last use of pages to scores; higher ones stay longer."""
    sees_all: bool = False
    """Whether a chunk's attention is recorded when the chunk was not selected, too."""
    newest: float | None = None
    """Weight of the latest record in a moving average, which replaces the sum."""

    def __post_init__(self) -> None:
        if self.newest is not None and (self.sees_all or not 0 < self.newest <= 1):
            raise ValueError(
                f"got newest={self.newest} with sees_all={self.sees_all}, expected a weight in "
                "(0, 1] with sees_all=False"
            )


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "attention": Policy(attention_guided),
        "frequency-attention": Policy(frequency_then_attention, sees_all=True),
        "lru": Policy(lru),
        "lfu": Policy(lfu),
    }
)


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
    again into a run outside of the heap: long tables cost little and entries cannot pile up.

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
