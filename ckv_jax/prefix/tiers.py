"""Device and host tiers: which pages are in memory, and in which slots (ContiguousKV §4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckv_jax.errors import CkvError
from ckv_jax.prefix.policy import Members, Pages, Policy, ScoreHeap, SlotArray, Slots

T = TypeVar("T", bound=np.generic)

Demotions = npt.NDArray[np.int32]
"""`[d, 2]`, (device slot, host slot): the pack in that device slot now belongs in that host slot.
The bookkeeping is done already; the caller copies them before any of these device slots is written
again, that is before the next `take`."""


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
    request is `own`ed and stays pinned until `unpin` → `trim`.

    Not thread-safe: the engine thread alone may call it.

    Args:
        device_slots: capacity of the device tier, in packs.
        host_slots: capacity of the host tier, in packs.
        work_slots: device slots set aside for packs of running requests.
        policy: gives a page its score.
    """

    def __init__(self, device_slots: int, host_slots: int, work_slots: int, policy: Policy) -> None:
        if min(device_slots, host_slots, work_slots) < 0:
            raise ValueError(
                f"got {device_slots} device, {host_slots} host and {work_slots} work slots, "
                "expected 0 or more of each"
            )
        self.device_slots = device_slots
        self.host_slots = host_slots
        self.stats = TierStats()
        self.changes = 0
        """Counts the calls after which a page may be in another device slot than before."""
        self.device = Slots(device_slots + work_slots)
        """Read by others, changed here alone."""
        self._host = Slots(host_slots)
        self._device_heap = ScoreHeap()
        self._host_heap = ScoreHeap()
        self._table = PageTable(policy)
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
        owners = self.device.pages()
        return int((self._table.pins[owners] > 0).sum())

    def register(
        self,
        n_pages: int,
        importance: npt.NDArray[np.floating] | None = None,
        frequency: npt.NDArray[np.integer] | None = None,
    ) -> int:
        """Ids for `n_pages` new pages; returns the first of the consecutive ids.

        `importance` and `frequency`, of `n_pages` elements each and any shape, are the scores
        that an earlier process persisted; without them pages start at zero.
        """
        if n_pages < 1:
            raise ValueError(f"got {n_pages} pages, expected 1 or more")
        old_importance = np.zeros(n_pages) if importance is None else np.ravel(importance)
        old_frequency = np.zeros(n_pages, np.uint32) if frequency is None else np.ravel(frequency)
        if len(old_importance) != n_pages or len(old_frequency) != n_pages:
            raise ValueError(
                f"got {len(old_importance)} importances and {len(old_frequency)} frequencies, "
                f"expected {n_pages}"
            )
        return self._table.extend(old_importance, old_frequency)

    def forget(self, base: int, n_pages: int) -> None:
        """Undo `register` of the same range: its pages leave memory, their ids may be reused.

        For segments that the store has deleted: S = I x F does not age, so their pages would stay.

        Raises:
            ValueError: a page of the range is pinned.
        """
        part = slice(base, base + n_pages)
        if self._table.pins[part].any():
            raise ValueError(f"got pages {base} to {base + n_pages - 1}, some of them pinned")
        on_device = base + np.flatnonzero(self._table.device_slot[part] >= 0)
        on_host = base + np.flatnonzero(self._table.host_slot[part] >= 0)
        self.changes += 1
        self.device.put_back(self._table.device_slot[on_device])
        self._host.put_back(self._table.host_slot[on_host])
        self._table.device_slot[part] = -1
        self._table.host_slot[part] = -1
        self._table.give_up(base, n_pages)

    def lookup(self, pages: Pages) -> tuple[SlotArray, SlotArray]:
        """Device slot and host slot of each page, int32 `[n]` each; -1 where it is not there."""
        return self._table.device_slot[pages], self._table.host_slot[pages]

    def worth(self, pages: Pages) -> npt.NDArray[np.float64]:
        """The policy's score `[n]` of each page, cached or not."""
        return self._table.score[pages]

    def history(self, pages: Pages) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint32]]:
        """Importance and frequency `[n]` each of some pages, cached or not."""
        return self._table.importance[pages], self._table.frequency[pages]

    def let_go(self, pages: Pages) -> int:
        """Takes those of these distinct pages out of both tiers that are not pinned; how many that
        were. They keep their scores."""
        table = self._table
        table.check(pages)
        free = pages[table.pins[pages] == 0]
        on_device, on_host = (
            free[column[free] >= 0] for column in (table.device_slot, table.host_slot)
        )
        self.changes += 1
        self.device.put_back(table.device_slot[on_device])
        self._host.put_back(table.host_slot[on_host])
        table.device_slot[on_device] = -1
        table.host_slot[on_host] = -1
        return len(on_device) + len(on_host)

    def pin(self, pages: Pages, times: npt.NDArray[np.integer] | int = 1) -> None:
        """Keep distinct pages where they are until they are unpinned as often; pins nest.

        A pinned page is neither evicted nor promoted, so slots from `lookup` stay valid.
        """
        self._table.check(pages)
        self._table.pins[pages] += times

    def unpin(self, pages: Pages, times: npt.NDArray[np.integer] | int = 1) -> None:
        """Take back so many pins of each of these distinct pages."""
        self._table.check(pages)
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
        """Make lent slots the cached slots of distinct pages, however full the cache is.

        The caller pins the pages. A page that has a cached slot by now keeps that one, and the
        given slot is freed; a page in the host tier leaves it.
        """
        table = self._table
        pages, slots = np.asarray(pages, np.int64), np.asarray(slots, np.int32)
        table.check(pages)
        self.device.require_lent(slots)
        self.changes += 1
        twice = table.device_slot[pages] >= 0
        self.device.put_back(slots[twice])
        pages, slots = pages[~twice], slots[~twice]
        self._leave_host(pages)
        self.device.assign(slots, pages)
        table.device_slot[pages] = slots
        self._device_heap.add(pages, table.score)

    def release(self, slots: SlotArray) -> None:
        """Give lent slots back unused; for requests that end without `admit`."""
        self.device.require_lent(slots)
        self.device.put_back(slots)

    def record(self, pages: Pages, attention: npt.NDArray[np.floating]) -> None:
        """Count one use of each of these distinct pages: I += A, F += 1, last used = now.

        `attention` `[n]`, finite and >= 0, is Equation 1's A of each page's chunk; for
        "importance-ratio", the share of its tokens that were important. Call it once a request,
        before `admit`. Also counts the hit or miss of each page.
        """
        table = self._table
        table.check(pages)
        values = np.asarray(attention, np.float64)
        if values.shape != pages.shape:
            raise ValueError(f"got {values.shape} attention values, expected {pages.shape}")
        self._reorder(pages, table.use(pages, values))
        hits = int((table.device_slot[pages] >= 0).sum())
        host_hits = int((table.host_slot[pages] >= 0).sum())
        self.stats.device_hits += hits
        self.stats.host_hits += host_hits
        self.stats.misses += len(pages) - hits - host_hits

    def observe(self, pages: Pages, attention: npt.NDArray[np.floating]) -> None:
        """I += A for distinct pages that were scored but not used. Shapes as for `record`."""
        self._table.check(pages)
        self._reorder(pages, self._table.see(pages, np.asarray(attention, np.float64)))

    def admit(self, pages: Pages, slots: SlotArray) -> Demotions:
        """A request is over: decide who stays where (§4.4), given its pages and their slots.

        `pages` `[n]` are distinct; `slots` `[n]` the distinct device slots that hold them now:

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
        table = self._table
        pages, slots = np.asarray(pages, np.int64), np.asarray(slots, np.int32)
        if len(pages) != len(slots):
            raise ValueError(f"got {len(pages)} pages and {len(slots)} slots, expected as many")
        table.check(pages)
        self.changes += 1
        held = table.device_slot[pages]
        self.device.require_lent(slots[(held < 0) | (held != slots)])

        movable = (held < 0) & ((table.host_slot[pages] < 0) | (table.pins[pages] == 0))
        contenders, lent = self._best_first(pages[movable], slots[movable])
        room = max(0, min(self.device_slots - self.device.owned, len(contenders)))
        pushed = self._device_heap.pop_below(
            table.score[contenders[room:]],
            Members(self.device, table.device_slot, table.score, table.pins),
        )
        entered = room + len(pushed)
        winners, losers = np.split(contenders, [entered])
        self._leave_host(winners)
        self.device.assign(lent[:entered], winners)
        self._device_heap.add(winners, table.score)
        pushed_slots = table.device_slot[pushed]
        table.device_slot[pushed] = -1
        table.device_slot[winners] = lent[:entered]

        new = table.host_slot[losers] < 0
        demotions = self._enter_host(
            np.concatenate([pushed, losers[new]]),
            np.concatenate([pushed_slots, lent[entered:][new]]),
        )
        kept = table.device_slot[pages] == slots
        self.device.put_back(np.concatenate([slots[~kept & (held != slots)], pushed_slots]))
        return demotions

    def scores(
        self, base: int, n_pages: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint32]]:
        """(importance float32, frequency uint32), `[n_pages]` each, as the store persists them."""
        part = slice(base, base + n_pages)
        return self._table.importance[part].astype(np.float32), self._table.frequency[part].copy()

    def _push_out(self, n: int) -> Demotions:
        """The `n` lowest pages that are not pinned leave the device, or all of them where there are
        fewer, and contend for the host."""
        table = self._table
        owners = self.device.pages() if n else np.zeros(0, np.int64)
        pushed = owners[table.pins[owners] == 0]
        if len(pushed) > n:  # else nothing is to be ranked: with most pinned that takes long
            pushed = self._device_heap.pop_below(
                np.full(n, np.inf),
                Members(self.device, table.device_slot, table.score, table.pins),
            )
        self.changes += len(pushed) > 0
        slots = table.device_slot[pushed]
        table.device_slot[pushed] = -1
        demotions = self._enter_host(pushed, slots)
        self.device.put_back(slots)
        return demotions

    def _reorder(self, pages: Pages, fell: npt.NDArray[np.bool_]) -> None:
        """Updates the heaps with scores that fell; those that rose are found when needed."""
        fallen, table = pages[fell], self._table
        if len(fallen):
            self._device_heap.add(fallen[table.device_slot[fallen] >= 0], table.score)
            self._host_heap.add(fallen[table.host_slot[fallen] >= 0], table.score)

    def _leave_host(self, pages: Pages) -> None:
        """Pages that just entered the device tier give up their host slots, if they had any."""
        promoted = pages[self._table.host_slot[pages] >= 0]
        self._host.put_back(self._table.host_slot[promoted])
        self._table.host_slot[promoted] = -1

    def _enter_host(self, pages: Pages, sources: SlotArray) -> Demotions:
        """Pages in device slots contend for the host tier; those that entered."""
        table = self._table
        pages, sources = self._best_first(pages, sources)
        room = min(self._host.free, len(pages))
        left = self._host_heap.pop_below(
            table.score[pages[room:]],
            Members(self._host, table.host_slot, table.score, table.pins),
        )
        self._host.put_back(table.host_slot[left])
        table.host_slot[left] = -1
        entered = room + len(left)
        targets = self._host.take(entered)
        self._host.assign(targets, pages[:entered])
        self._host_heap.add(pages[:entered], table.score)
        table.host_slot[pages[:entered]] = targets
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
