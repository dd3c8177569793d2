"""Device and host tiers: which pages are in memory, and in which slots (ContiguousKV §4.4)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckv_jax.errors import CkvError
from ckv_jax.prefix.policy import Policy

T = TypeVar("T", bound=np.generic)
Pages = npt.NDArray[np.int64]
SlotArray = npt.NDArray[np.int32]

HeapEntry = tuple[int, int]
"""(bit pattern of the score, -page) of one page: a float64 >= 0 orders as its bits do."""

Demotions = npt.NDArray[np.int32]
"""`[d, 2]`, (device slot, host slot): the pack in that device slot now belongs in that host slot.
The bookkeeping is done already; the caller copies them before any of these device slots is written
again, that is before the next `take`."""

FREE = -1
LENT = -2
_EVERYTHING = 1 << 64


class PoolExhausted(CkvError):
    """Running requests hold so many device slots that no more can be lent."""


class Tiers:
    """Bookkeeping of the device tier and the host tier: no memory, no device, only numbers.

    A page is one pack of a stored prefix. Its id indexes flat tables; `register` hands out ranges
    of ids, one range a segment. A page is in the device tier, in the host tier, or in neither,
    never in both. Scores outlive eviction.

    Device slots `[0, device_slots + work_slots)` are all of one kind. Between requests at most
    `device_slots` hold unpinned cached pages (`admit`, `trim`), so that reads find room at once.
    What is cached and not pinned can be taken back at any time (`make_room`): a request that an
    empty cache serves, a full one serves.

    A request's way: `lookup` → `pin` → `take` slots for what is not on the device → compute →
    `record` → `unpin` → `admit`; or, if it fails, `unpin` → `release`. What is needed beyond the
    request is `own`ed and stays pinned until `unpin` → `trim`. The pages of one call are distinct.

    Not thread-safe: the engine thread alone may call it. Any thread may read `pinned_slots`.

    Args:
        device_slots: capacity of the device tier, in packs.
        host_slots: capacity of the host tier, in packs.
        work_slots: device slots set aside for packs of running requests.
        policy: gives a page its score.
    """

    def __init__(self, device_slots: int, host_slots: int, work_slots: int, policy: Policy) -> None:
        self.device_slots = device_slots
        self.host_slots = host_slots
        self.stats = TierStats()
        self.changes = 0
        """Counts the calls after which a page may be in another device slot than before."""
        self._table = PageTable(policy)
        self.device = Tier(device_slots + work_slots, self._table, 0)
        """Read by others, changed here alone."""
        self._host = Tier(host_slots, self._table, 1)
        self.observes = policy.sees_all
        """Whether the policy wants `observe`, see `Policy.sees_all`."""

    @property
    def device_pages(self) -> int:
        """Pages cached on the device."""
        return self.device.owned

    @property
    def host_pages(self) -> int:
        """Pages cached in host memory."""
        return self._host.owned

    @property
    def slots(self) -> int:
        """Device slots of any kind."""
        return len(self.device)

    @property
    def pinned_slots(self) -> int:
        """Device slots of cached pages that are pinned: `make_room` cannot free these."""
        owners = self.device.pages()  # first: another thread may call this while pages are added
        return int((self._table.pins[owners] > 0).sum())

    def register(
        self,
        n_pages: int,
        importance: npt.NDArray[np.floating] | None = None,
        frequency: npt.NDArray[np.integer] | None = None,
    ) -> int:
        """Ids for `n_pages` new pages; returns the first of the consecutive ids.

        `importance` and `frequency`, of `n_pages` elements each, are the scores that an earlier
        process persisted; without them pages start at zero.
        """
        return self._table.extend(
            np.zeros(n_pages) if importance is None else np.ravel(importance),
            np.zeros(n_pages, np.uint32) if frequency is None else np.ravel(frequency),
        )

    def forget(self, base: int, n_pages: int) -> None:
        """Undo `register` of the same range: its pages leave memory, their ids may be reused.

        For segments that the store has deleted: S = I x F does not age, so their pages would stay.
        Raises `ValueError` if a page of the range is pinned.
        """
        if self._table.pins[base : base + n_pages].any():
            raise ValueError(f"got pages {base} to {base + n_pages - 1}, some of them pinned")
        self.let_go(np.arange(base, base + n_pages))
        self._table.give_up(base, n_pages)

    def lookup(self, pages: Pages) -> tuple[SlotArray, SlotArray]:
        """Device slot and host slot of each page, int32 `[n]` each; -1 where it is not there."""
        device, host = self._table.slots
        return device[pages], host[pages]

    def worth(self, pages: Pages) -> npt.NDArray[np.float64]:
        """The policy's score `[n]` of each page, cached or not."""
        return self._table.score[pages]

    def history(self, pages: Pages) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint32]]:
        """Importance and frequency `[n]` each of some pages, cached or not."""
        return self._table.importance[pages], self._table.frequency[pages]

    def let_go(self, pages: Pages) -> int:
        """Takes those of these pages out of both tiers that are not pinned; how many that were.
        They keep their scores."""
        free = pages[self._table.pins[pages] == 0]
        self.changes += 1
        return len(self.device.leave(free)) + len(self._host.leave(free))

    def pin(self, pages: Pages, times: npt.NDArray[np.integer] | int = 1) -> None:
        """Keep pages where they are until they are unpinned as often; pins nest.

        A pinned page is neither evicted nor promoted, so slots from `lookup` stay valid.
        """
        self._table.pins[pages] += times

    def unpin(self, pages: Pages, times: npt.NDArray[np.integer] | int = 1) -> None:
        """Removes `times` pins of each of these pages."""
        pins = self._table.pins[pages] - times
        if (pins < 0).any():
            raise ValueError(f"got page {pages[pins < 0][0]} to unpin, which is not pinned")
        self._table.pins[pages] = pins

    def take(self, n: int) -> SlotArray:
        """Lend `n` device slots for packs that are not on the device, int32 `[n]`.

        Raises:
            PoolExhausted: fewer are free; nothing was lent.
        """
        if n > self.device.free:
            raise PoolExhausted(
                f"got a demand for {n} device slots, {self.device.free} of "
                f"{len(self.device)} are free: raise device_cache_bytes or lower max_batch"
            )
        return self.device.take(n)

    def make_room(self, n: int) -> Demotions:
        """Take back cached pages that are not pinned, the lowest first, until `n` slots are free.

        Frees fewer where there are no more such pages.
        """
        return self._push_out(max(0, n - self.device.free))

    def trim(self) -> Demotions:
        """Take back the lowest unpinned pages until at most `device_slots` are cached."""
        return self._push_out(max(0, self.device.owned - self.device_slots))

    def own(self, pages: Pages, slots: SlotArray) -> None:
        """Make lent slots the cached slots of pages, however full the cache is.

        The caller pins the pages. A page that has a cached slot by now keeps that one, and the
        given slot is freed; a page in the host tier leaves it.
        """
        self.device.require_lent(slots)
        self.changes += 1
        twice = self.device.slot_of[pages] >= 0
        self.device.put_back(slots[twice])
        self._host.leave(pages[~twice])
        self.device.enter(pages[~twice], slots[~twice])

    def release(self, slots: SlotArray) -> None:
        """Give lent slots back unused; for requests that end without `admit`."""
        self.device.require_lent(slots)
        self.device.put_back(slots)

    def record(self, pages: Pages, attention: npt.NDArray[np.floating]) -> None:
        """Count one use of each of these pages: I += A, F += 1, last used = now.

        `attention` `[n]`, finite and >= 0, is Equation 1's A of each page's chunk, or what else the
        policy scores. Call it once a request, before `admit`. Also counts the hit or miss of each
        page.
        """
        self._reorder(self._table.use(pages, np.asarray(attention, np.float64)))
        device, host = self.lookup(pages)
        hits, host_hits = int((device >= 0).sum()), int((host >= 0).sum())
        self.stats.device_hits += hits
        self.stats.host_hits += host_hits
        self.stats.misses += len(pages) - hits - host_hits

    def observe(self, pages: Pages, attention: npt.NDArray[np.floating]) -> None:
        """I += A for distinct pages that were scored but not used; both of one shape."""
        self._reorder(self._table.see(pages, np.asarray(attention, np.float64)))

    def admit(self, pages: Pages, slots: SlotArray) -> Demotions:
        """A request is over: decide who stays where (§4.4), given its pages and their slots.

        `slots` `[n]` are the distinct device slots that hold `pages` `[n]` now:

        - A device hit is passed with its cached slot. It stays, with its recorded score.
        - A host hit is passed with the work slot it was copied into. If it now beats the lowest
          page of the device tier it is promoted: its work slot becomes a cache slot and its host
          slot is free for others. Otherwise it stays in the host tier and the work slot is freed.
        - A page read from SSD (or recomputed) is passed with its work slot. It enters the device
          tier by relabelling if it beats the lowest page there; else the host tier, by a copy, if
          it beats the lowest page there; else it is freed.
        - A page that another request has cached meanwhile, in another slot, is passed with its
          work slot all the same, which is freed.

        Pages pushed off the device contend for the host tier like fresh ones; what the host tier
        pushes out is dropped. A full tier changes only for a strictly higher score. Pages pinned
        by requests still running do not move. Device hits may be left out.

        The caller has unpinned the request's pages, and its reads of their host slots are over:
        a promoted page's host slot may be the target of a demotion.
        """
        table, device = self._table, self.device
        self.changes += 1
        held = device.slot_of[pages]
        device.require_lent(slots[(held < 0) | (held != slots)])

        movable = (held < 0) & ((self._host.slot_of[pages] < 0) | (table.pins[pages] == 0))
        contenders, lent = self._best_first(pages[movable], slots[movable])
        room = max(0, min(self.device_slots - device.owned, len(contenders)))
        pushed = device.pop_below(table.score[contenders[room:]])
        pushed_slots = device.leave(pushed)
        entered = room + len(pushed)
        winners, losers = np.split(contenders, [entered])
        self._host.leave(winners)
        device.enter(winners, lent[:entered])

        new = self._host.slot_of[losers] < 0
        demotions = self._enter_host(
            np.concatenate([pushed, losers[new]]),
            np.concatenate([pushed_slots, lent[entered:][new]]),
        )
        device.put_back(slots[(device.slot_of[pages] != slots) & (held != slots)])
        return demotions

    def _push_out(self, n: int) -> Demotions:
        """The `n` lowest pages that are not pinned leave the device, or all of them where there are
        fewer, and contend for the host."""
        owners = self.device.pages() if n else np.zeros(0, np.int64)
        pushed = owners[self._table.pins[owners] == 0]
        if len(pushed) > n:  # else nothing is to be ranked: with most pinned that takes long
            pushed = self.device.pop_below(np.full(n, np.inf))
        self.changes += len(pushed) > 0
        return self._enter_host(pushed, self.device.leave(pushed))

    def _reorder(self, fell: Pages) -> None:
        """Updates the heaps with pages whose scores fell; those that rose are found when needed."""
        if len(fell):
            self.device.note(fell[self.device.slot_of[fell] >= 0])
            self._host.note(fell[self._host.slot_of[fell] >= 0])

    def _enter_host(self, pages: Pages, sources: SlotArray) -> Demotions:
        """Pages in device slots contend for the host tier; those that entered."""
        host = self._host
        pages, sources = self._best_first(pages, sources)
        room = min(host.free, len(pages))
        left = host.leave(host.pop_below(self._table.score[pages[room:]]))
        entered = room + len(left)
        targets = host.take(entered)
        host.enter(pages[:entered], targets)
        return np.stack([sources[:entered], targets], axis=1)

    def _best_first(self, pages: Pages, slots: SlotArray) -> tuple[Pages, SlotArray]:
        scores = self._table.score[pages]
        order = np.argsort(-scores)
        ranked = scores[order]
        if (ranked[1:] == ranked[:-1]).any():  # rare except with LRU
            order = np.lexsort((pages, -scores))
        return pages[order], slots[order]


def counted(pages: Pages) -> tuple[Pages, npt.NDArray[np.int64]]:
    """Each page once, and how often it is among `pages`."""
    return np.unique(pages, return_counts=True)


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Counters since the start; a hit is counted when a page is recorded."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0


class PageTable:
    """Scores and whereabouts of all pages, in memory or not. Columns grow; ranges are reused.

    Attributes (one element a page):
        importance: float64, sum of recorded attention (I of §4.4), or its moving average.
        frequency: uint32, number of records (F of §4.4).
        last_used: uint64, tick of the latest record, 0 for never.
        score: float64, the policy's score of the three above.
        slots: int32 [2, pages], device slot and host slot, -1 where the page is not in that tier.
        pins: int32, how many running requests rely on the page staying where it is.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._count = 0
        self._clock = 0
        self._spare: dict[int, int] = {}  # ranges to reuse, none beside another: base -> size
        self.importance = np.zeros(0, np.float64)
        self.frequency = np.zeros(0, np.uint32)
        self.last_used = np.zeros(0, np.uint64)
        self.score = np.zeros(0, np.float64)
        self.slots = np.zeros((2, 0), np.int32)
        self.pins = np.zeros(0, np.int32)

    def extend(
        self,
        importance: npt.NDArray[np.floating],
        frequency: npt.NDArray[np.integer],
    ) -> int:
        """Consecutive ids for as many pages as there are elements; returns the first id."""
        n = len(importance)
        base = self._taken(n)
        part = slice(base, base + n)
        self.importance[part] = importance
        self.frequency[part] = frequency
        self.last_used[part] = 0
        self.slots[:, part] = -1
        self.score[part] = self._scores(
            self.importance[part], self.frequency[part], self.last_used[part]
        )
        return base

    def give_up(self, base: int, n_pages: int) -> None:
        """Let a later `extend` have these ids."""
        for before, size in list(self._spare.items()):
            if before + size == base:
                base, n_pages = before, size + n_pages
        if n_pages:
            self._spare[base] = n_pages + self._spare.pop(base + n_pages, 0)

    def use(self, pages: Pages, attention: npt.NDArray[np.float64]) -> Pages:
        """Record one use of each page at the next tick; returns those whose score fell.

        Importance is a sum, or an average that begins with its first value.
        """
        old, newest = self.importance[pages], self._policy.newest
        if newest is None:
            importance = old + attention
        else:
            average = old + newest * (attention - old)
            importance = np.where(self.frequency[pages] > 0, average, attention)
        self._clock += 1
        frequency = self.frequency[pages] + np.uint32(1)
        last_used = np.full(len(pages), self._clock, np.uint64)
        score = self._scores(importance, frequency, last_used)
        fell = pages[score < self.score[pages]]
        self.importance[pages] = importance
        self.frequency[pages] = frequency
        self.last_used[pages] = last_used
        self.score[pages] = score
        return fell

    def see(self, pages: Pages, attention: npt.NDArray[np.float64]) -> Pages:
        """Record attention without a use; returns those pages whose score fell."""
        importance = self.importance[pages] + attention
        score = self._scores(importance, self.frequency[pages], self.last_used[pages])
        fell = pages[score < self.score[pages]]
        self.importance[pages] = importance
        self.score[pages] = score
        return fell

    def _scores(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.float64]:
        """Scores that the heaps can order: finite, >= 0, and no negative zero."""
        scores = self._policy.score(importance, frequency, last_used)
        if not (np.isfinite(scores) & (scores >= 0)).all():
            raise ValueError("got scores below 0 or not finite, expected finite ones of 0 or more")
        return scores + 0.0

    def _taken(self, n: int) -> int:
        """The first id of `n` pages: of the smallest spare range that has as many, or new ones."""
        fits = [(size, base) for base, size in self._spare.items() if size >= n]
        if not fits:
            return self._append(n)
        size, base = min(fits)
        del self._spare[base]
        if size > n:
            self._spare[base + n] = size - n
        return base

    def _append(self, n: int) -> int:
        base = self._count
        self._count += n
        if self._count > len(self.score):
            for name in ("importance", "frequency", "last_used", "score", "slots", "pins"):
                setattr(self, name, _grown(getattr(self, name), self._count))
        return base


def _grown(column: npt.NDArray[T], more: int) -> npt.NDArray[T]:
    """With room for so many more: for as many as there are, so that it seldom has to grow."""
    room = np.zeros((*column.shape[:-1], more), column.dtype)
    return np.concatenate([column, room], axis=-1)


class Tier:
    """Slots, each free, lent to a running request, or owned by a cached page; and the order of
    these pages.

    Plain bookkeeping: the memory behind a slot belongs to someone else. Of two equal scores the
    higher page id is lower: ids grow with the layer, and a later layer leaves more time to read a
    page again.

    Only the lowest pages have entries: every page below a bound has one that is at most its present
    one, and pages past the bound need none. A score that rises leaves its entry alone; the entry is
    corrected, or let go past the bound, once its turn comes. Entries of pages that have left are
    skipped then. When entries run out, the lowest share of all pages is sorted again into a run
    outside of the heap: long tables cost little and entries cannot pile up.

    Args:
        row: the row of `PageTable.slots` for this tier.
        share, least: how many of the pages to sort into a run at a time.
    """

    def __init__(
        self, count: int, table: PageTable, row: int, *, share: float = 0.125, least: int = 256
    ) -> None:
        self._table = table
        self._row = row
        self._share, self._least = share, least
        self._owner: npt.NDArray[np.int64] = np.full(count, FREE, np.int64)
        self._stack: SlotArray = np.arange(count, dtype=np.int32)[::-1].copy()
        self.free = count
        """Slots that are neither lent nor owned."""
        self.owned = 0
        """Slots that belong to cached pages."""
        self._mark = np.zeros(count, np.int32)
        self._run: list[HeapEntry] = []  # sorted, the lowest last
        self._heap: list[HeapEntry] = []  # what came or changed since the run was made
        self._bound = 0  # bits of a score; 0 means that there are no entries yet
        self._most = 0  # in the heap; past it all entries are given up until next needed

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def slot_of(self) -> SlotArray:
        """The slot of every page, -1: it is not in this tier."""
        slots: SlotArray = self._table.slots[self._row]
        return slots

    def pages(self) -> Pages:
        """Pages that own a slot, in slot order."""
        owner = self._owner.copy()  # another thread may be here, see `Tiers.pinned_slots`
        return owner[owner >= 0]

    def require_lent(self, slots: SlotArray) -> None:
        """Refuse slots that are not lent, or given twice."""
        ranks = np.arange(len(slots), dtype=np.int32)
        self._mark[slots] = ranks
        lent = (slots >= 0) & (self._owner[slots] == LENT) & (self._mark[slots] == ranks)
        if not lent.all():
            raise ValueError("got device slots that are not lent, or one twice in one call")

    def take(self, n: int) -> SlotArray:
        """`n` free slots, now lent. The caller has checked `free`."""
        taken = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self._owner[taken] = LENT
        return taken

    def put_back(self, slots: SlotArray) -> None:
        """Free distinct slots that are lent."""
        n = len(slots)
        self._owner[slots] = FREE
        self._stack[self.free : self.free + n] = slots
        self.free += n

    def enter(self, pages: Pages, slots: SlotArray) -> None:
        """Make pages the owners of slots that are lent."""
        self._owner[slots] = pages
        self.owned += len(slots)
        self.slot_of[pages] = slots
        self.note(pages)

    def leave(self, pages: Pages) -> SlotArray:
        """Free the slots of those of these pages that have one; returns the slots."""
        pages = pages[self.slot_of[pages] >= 0]
        slots = self.slot_of[pages]
        self.slot_of[pages] = -1
        self.owned -= len(slots)
        self.put_back(slots)
        return slots

    def note(self, pages: Pages) -> None:
        """Pages of this tier are new, or their score fell."""
        if not self._bound:
            return
        for entry in _entries(self._table.score[pages], pages):
            if entry[0] < self._bound:
                heapq.heappush(self._heap, entry)
        if len(self._heap) > self._most:
            self._run, self._heap, self._bound = [], [], 0

    def pop_below(self, rivals: npt.NDArray[np.float64]) -> Pages:
        """Take out the lowest unpinned page for each rival that beats it; `rivals` descend.

        Stops at the first rival whose score is not strictly higher than the lowest page's, or
        when every remaining page is pinned. Returns the pages taken out of the order; the caller
        has them `leave`.
        """
        bits = self._table.score.view(np.uint64).data
        slot_of, pins = self.slot_of.data, self._table.pins.data
        run, heap = self._run, self._heap
        taken: dict[int, None] = {}
        aside: list[HeapEntry] = []
        for rival in rivals.view(np.uint64).tolist():
            lowest = -1
            while lowest < 0:
                if run and (not heap or run[-1] < heap[0]):
                    entry = run.pop()
                elif heap:
                    entry = heapq.heappop(heap)
                else:
                    aside = self._fill(taken)
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

    def _fill(self, taken: dict[int, None]) -> list[HeapEntry]:
        """Sort the lowest unpinned pages; returns the entries of pinned ones below the bound."""
        pages = self.pages()
        if taken:
            pages = pages[~np.isin(pages, np.fromiter(taken, np.int64, len(taken)))]
        scores = self._table.score[pages]
        pinned = self._table.pins[pages] > 0
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


def _entries(scores: npt.NDArray[np.float64], pages: Pages) -> list[HeapEntry]:
    return list(zip(scores.view(np.uint64).tolist(), (-pages).tolist(), strict=True))
