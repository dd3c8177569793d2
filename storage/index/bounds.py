"""Size limits of a store: reservations, times of use, records and eviction."""

from __future__ import annotations

import contextlib
import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import (
    IndexDamaged,
    PrefixNotFound,
    SegmentDamaged,
    SegmentForeign,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ckv_jax.storage.index.catalog import LINK, Entry
from ckv_jax.storage.index.index import Counters, Index
from ckv_jax.storage.place.files import Claim, Files
from ckv_jax.storage.prefix import Prefix, PrefixRecord
from ckv_jax.storage.segment.manifest import opened

if TYPE_CHECKING:
    from ckv_jax.storage.encryption import StoreKey

_NO_RECORD = PrefixRecord()
_TOUCH_S = 5.0  # times of use reach the catalog at most this often
_AHEAD_S = 60.0  # by which clocks of machines that share a store may differ
_TRIES = 5  # to get room that others want, too
_SPARE = 1 << 20  # bytes of the disk that stay free: for the index, and for blocks of files


class Bounds:
    """Makes room in a store; thread-safe. Removes nothing before it is known to help."""

    def __init__(
        self,
        files: Files,
        index: Index,
        config: StoreConfig,
        counts: Counters,
        key: StoreKey | None = None,
    ) -> None:
        self._files = files
        self._key = key
        self._index = index
        self._config = config
        self._counts = counts
        self._lock = threading.Lock()
        self._used_lock = threading.Lock()
        self._room_lock = threading.Lock()  # of writers that wait for room on the disk
        self._room_made = -math.inf
        self._used: dict[str, float] = {}
        self._touched = time.monotonic()
        self.in_use: list[Callable[[], Collection[str]]] = []
        """Segments that stay: those that an engine of this store may read; without locks also those
        that are open."""

    # -- room --------------------------------------------------------------------------------------

    def reserve(self, name: str, num_bytes: int, tenant: str) -> None:
        """Count bytes as used until `Catalog.release`, evicting others where that makes room.

        `name`: of the workspace that will use them; `tenant`: the mark of whose they are.

        Raises:
          StoreFull: no room can be made; nothing was evicted.
          StoreUnavailable: what may be evicted is unknown; nothing was.
        """
        config = self._config
        bounds = {None: config.max_bytes, tenant: config.bound_of(tenant)}
        limits = {whose: bound for whose, bound in bounds.items() if bound is not None}
        for whose, limit in limits.items():
            if num_bytes > limit:
                raise StoreFull(f"{num_bytes} bytes do not fit in {_bound(whose, limit)} at all")
        with self._emptying() as remove:
            emptied = 0  # bytes that are deleted once no lock is held
            for attempt in range(_TRIES):
                lacking = self._lacking(num_bytes) - emptied
                over = self._index.catalog.reserve(name, num_bytes, tenant, limits, lacking)
                if not over:
                    return
                if attempt == 0:
                    self._settle(all_segments=True)
                    continue
                plan = self._plan()
                freed = 0
                rooms = {whose: _bound(whose, limits.get(whose)) for whose in over}
                if lacking > 0:
                    rooms[None] = "the room on the disk"
                for whose in sorted(over, key=lambda w: w is None):  # the tenant's own first
                    part = (lambda e: True) if whose is None else (lambda e: e.tenant == tenant)
                    freed += plan.take(over[whose] - (freed if whose is None else 0), part)
                    if freed < over[whose]:
                        plan.drop()
                        raise StoreFull(
                            f"{num_bytes} bytes do not fit in {rooms[whose]}: all stored segments "
                            "are pinned, continued by others, in use, or unreadable"
                        )
                emptied += freed
                text = " and ".join(rooms.values())
                remove(plan, "room", f"made room for {num_bytes} bytes in {text}: ")
        raise StoreFull(f"no room for {num_bytes} bytes: other writers took all that was freed")

    def make_room(self, num_bytes: int, began: float) -> bool:
        """Evict for a write of `num_bytes` that the disk has refused.

        Of writes that fail at once the first makes room. The others, which `began` (by the
        monotonic clock) before it did, wait until what it evicts is deleted, `write_s` at most, and
        are to be tried again. Returns False where the disk has room by its own account, so that
        something else is lacking, or nothing that helps may go.
        """
        if not self._room_lock.acquire(timeout=self._config.write_s):
            return True  # room is still being made
        try:
            if self._room_made < began:
                if not self._lacking(num_bytes) or not self._evict_for(num_bytes):
                    return False
                self._room_made = time.monotonic()
            return True
        finally:
            self._room_lock.release()

    def _evict_for(self, num_bytes: int) -> bool:
        try:
            with self._emptying() as remove:
                self._settle(all_segments=True)
                plan = self._plan()
                if plan.take(num_bytes) < num_bytes:
                    plan.drop()
                    return False
                remove(plan, "room", f"the disk was full at {num_bytes} bytes: ")
                return True
        except StoreError:
            return False

    def _lacking(self, num_bytes: int) -> int:
        """Bytes that the disk lacks for `num_bytes` more, whatever the bound of the store says."""
        free = self._files.free_bytes()
        return 0 if free is None else max(0, num_bytes + _SPARE - free)

    def usage(self) -> int:
        """Bytes of all segments, and of the reservations of writers that live."""
        self._settle(all_segments=False)
        return self._index.catalog.usage()

    def _settle(self, *, all_segments: bool) -> None:
        """Drop the reservations of the dead; find what came and went behind the index."""
        names = self._index.catalog.reserved()
        dead = self._files.dead(names) if names else set()
        if dead or all_segments:  # a workspace that is gone may have become a segment
            self._index.catalog.reconcile()
        for name in dead:
            self._index.catalog.release(name)

    def evict_to(self, max_bytes: int) -> int:
        """Evict whole segments until at most `max_bytes` are used; returns the bytes freed."""
        with self._emptying() as remove:
            self._settle(all_segments=True)
            plan = self._plan()
            freed = plan.take(self._index.catalog.usage() - max_bytes)
            remove(plan, "pruned", f"pruned to {max_bytes} bytes: ")
            return freed

    def evict_expired(self) -> int:
        """Evict what has expired and nothing continues; returns the bytes freed."""
        with self._emptying() as remove:
            self._settle(all_segments=True)
            plan = self._plan()
            freed = plan.take(math.inf, plan.expired)
            remove(plan, "expired", "")
            return freed

    def delete(self, prefix: Prefix) -> int:
        """Remove a prefix, pinned or not: the segments that end with it, and what continues them.
        Returns the bytes freed.

        What is in use, or what another pin or something else needs, stays; so do the segments of a
        shorter prefix that has a record of its own, and other orders of the tokens.

        Raises:
          IndexDamaged: the parents above the last segment go in a circle; nothing was deleted.
        """
        with self._emptying() as remove:
            self._settle(all_segments=True)
            plan = self._plan(unpinned=prefix.id)
            segment_ids = [span.segment_id for span in prefix.spans]
            parents = {entry.id: entry.parent for entry in self._index.catalog.entries()}
            others = set[str]()
            if not prefix.layout.reordered:
                others.update(self._index.catalog.ending_with(bytes.fromhex(prefix.id)))
            following = [*segment_ids[-1:], *(others - plan.records.keys())]
            for id_ in following:
                _refuse_circle(id_, parents)
            children: dict[str | None, set[str]] = {}
            for id_, parent in parents.items():
                children.setdefault(parent, set()).add(id_)
            gone = {*following, *(set(segment_ids) - plan.records.keys())}
            while following:
                more = children.get(following.pop(), set()) - gone
                gone |= more
                following += more
            freed = plan.take(math.inf, lambda entry: entry.id in gone)
            remove(plan, "deleted", "deleted by its owner: ")
            return freed

    def remove(
        self, segment_id: str, reason: str, still: Callable[[], bool] = lambda: True
    ) -> bool:
        """Remove one segment; False while it is read, or if it has just been replaced. `still` is
        asked under the claim: False keeps the segment, too."""
        with self._lock:
            claim = self._files.claim(segment_id)
            if claim is None:
                return False
            try:
                if not still():
                    return False
                links = self._index.catalog.links([segment_id])
                delete = claim.remove()
            finally:
                claim.release()
            if delete is None:
                return False
            self._index.drop(segment_id, reason)
            self._forget(links)
        self._counts.add("evicted")
        delete()
        return True

    def _plan(self, unpinned: str = "") -> EvictionPlan:
        """`unpinned`: a prefix whose own record keeps nothing."""
        self.flush()
        keep, records = self._wanted(self._index.unknown(), unpinned)
        keep |= self._used_by_engines()
        now, entries = time.time(), self._index.catalog.entries()
        latest = now + _AHEAD_S
        if ahead := {entry.id: now for entry in entries if entry.used > latest}:
            self._index.catalog.touch(ahead, _AHEAD_S)  # a clock was ahead: their time begins now

        def pinned() -> set[str]:
            used = self._used_by_engines()
            if not self._files.holding:  # no claim keeps others from pinning
                return used
            return used | self._wanted(self._index.unknown(), unpinned)[0]

        return EvictionPlan(
            entries,
            policy=self._config.eviction,
            keep=keep,
            pinned=pinned,
            records=records,
            claim=self._claim,
            now=now,
        )

    def _used_by_engines(self) -> set[str]:
        return set[str]().union(*[segments() for segments in list(self.in_use)])

    def _claim(self, segment_id: str) -> Claim | None:
        """Take a segment for removal; None while it is read, or its manifest is unread or of
        another key."""
        try:
            opened(self._files.manifest(segment_id), segment_id, self._key)
        except (StoreUnavailable, SegmentForeign):
            return None
        except (SegmentDamaged, ValueError):
            pass  # free to go
        return self._files.claim(segment_id)

    @contextmanager
    def _emptying(self) -> Iterator[Callable[[EvictionPlan, str, str], None]]:
        """Evict with `remove(plan, kind, reason)`; the bytes are deleted when no lock is held."""
        later: list[Callable[[], None]] = []

        def remove(plan: EvictionPlan, kind: str, reason: str) -> None:
            links = self._index.catalog.links(entry.id for entry, _, _ in plan.victims)
            try:
                while plan.victims:
                    entry, claim, why = plan.victims.pop(0)
                    if (delete := claim.remove()) is None:
                        continue
                    later.append(delete)
                    for count in ("evicted", f"evicted_{kind}"):
                        self._counts.add(count)
                    self._index.drop(entry.id, f"{reason}{why}")
            finally:
                plan.drop()  # what an error left
                self._forget(links)

        try:
            with self._lock:
                yield remove
        finally:
            for delete in later:
                delete()

    # -- records ----------------------------------------------------------------------------------

    def records(self, tenant: str | None = None) -> dict[str, PrefixRecord]:
        """Returns the records of prefixes, by id; None: of all tenants."""
        if tenant is None:
            return {id_: self._decoded(id_, data) for id_, data in self._files.pins().items()}
        mine = self._index.catalog.holders(self._files.pinned_ids(), tenant)
        return {id_: self.record_of(id_) for id_ in mine}

    def record_of(self, prefix_id: str) -> PrefixRecord:
        data = self._files.pin(prefix_id)
        return PrefixRecord() if data is None else self._decoded(prefix_id, data)

    def _decoded(self, prefix_id: str, data: bytes) -> PrefixRecord:
        if self._key is not None:
            try:
                data = self._key.open(prefix_id, data)
            except (ValueError, StoreError):
                data = b""  # says nothing
        return PrefixRecord.decode(data)

    def set_record(self, prefix_id: str, record: PrefixRecord) -> None:
        """Note durably what is wanted of a prefix."""
        data = record.encode()
        if data is not None and self._key is not None:
            data = self._key.seal(prefix_id, data)
        self._files.set_pin(prefix_id, data)

    def sweep(self) -> int:
        """Remove what was wanted of prefixes that are gone; returns of how many. Nothing is removed
        while a segment cannot be read: it may hold the prefix."""
        with contextlib.suppress(StoreUnavailable):
            noted = self._files.pin_stamps()  # first: a prefix is there before it is noted
            if not noted:
                return 0
            self._index.catalog.reconcile()
            if self._index.catalog.complete:
                return self._drop_unheld(noted)
        return 0

    def _forget(self, links: Collection[bytes]) -> None:
        """Remove what was wanted of prefixes that ended in segments with these links, which are
        gone, so far as no other segment holds them. What fails here is swept later."""
        with contextlib.suppress(StoreUnavailable):
            stamps = self._files.pin_stamps().items()
            noted = {i: stamp for i, stamp in stamps if bytes.fromhex(i)[:LINK] in links}
            if noted and not self._index.unread:
                self._drop_unheld(noted)

    def _drop_unheld(self, noted: Mapping[str, object]) -> int:
        """Remove the records of prefixes that no segment holds, those with these stamps."""
        gone = noted.keys() - self._index.catalog.holders(noted.keys()).keys()
        self._files.drop_pins({id_: noted[id_] for id_ in gone})
        return len(gone)

    def pinned(self) -> set[str]:
        """Segments that a pinned prefix needs; raises StoreUnavailable where that is unknown."""
        return self._wanted(())[0]

    def _wanted(
        self, unknown: Collection[str], unpinned: str = ""
    ) -> tuple[set[str], dict[str, PrefixRecord]]:
        """Segments that stay, and records about those that end a prefix.

        Where manifests cannot be read, the index has to be believed. Raises StoreUnavailable where
        it does not have all that a pinned prefix may need, because of segments that are `unknown`.
        """
        keep: set[str] = set()
        found: dict[str, PrefixRecord] = {}
        records = self.records()
        records.pop(unpinned, None)
        holders = self._index.catalog.holders(records)
        for id_, record in records.items():
            if not record.pinned:
                found.update(dict.fromkeys(holders.get(id_, ()), record))
                continue
            try:
                needed = [span.segment_id for span in self._index.prefix(id_).spans]
                ends, complete = needed[-1:], True
            except PrefixNotFound:
                needed, ends, complete = [], [], not unknown  # where all is known, it is gone
            except StoreUnavailable:
                needed, ends, complete = self._index.catalog.line(bytes.fromhex(id_))
            if not complete:
                raise StoreUnavailable(
                    f"the segments of the pinned prefix {id_[:8]} are unknown, because manifests "
                    f"cannot be read ({', '.join(sorted(unknown)) or id_}): nothing is evicted"
                )
            keep.update(needed)
            found.update(dict.fromkeys(ends, record))
        return keep, found

    # -- times of use ------------------------------------------------------------------------------

    def touch(self, prefix: Prefix) -> bool:
        """Note that a prefix is in use; whether it is time to `flush`."""
        now = time.time()
        with self._used_lock:
            for span in prefix.spans:
                self._used[span.segment_id] = now
        return time.monotonic() - self._touched > _TOUCH_S

    def flush(self) -> None:
        """Bring the times of use to the catalog."""
        with self._used_lock:
            used, self._used = self._used, {}
            self._touched = time.monotonic()
        if used:
            self._index.catalog.touch(used, _AHEAD_S)


class EvictionPlan:
    """Victims that are chosen and claimed, and not yet touched; used by one thread.

    A segment goes only after all that continue it. Those that have expired go first, then those of
    less priority. With "attention", those that were read compare by mean importance x frequency of
    their packs, and one that was never read yet counts as the average of them; ties, and "lru", go
    by time of use. `keep`: ids that stay; `pinned`: those that pins keep by now; `claim`: None for
    a segment that is read; `now`: seconds since the epoch.
    """

    def __init__(
        self,
        entries: Collection[Entry],
        *,
        policy: str,
        keep: Collection[str],
        pinned: Callable[[], set[str]],
        records: Mapping[str, PrefixRecord],
        claim: Callable[[str], Claim | None],
        now: float,
    ) -> None:
        self._known = {e.id: e for e in entries}
        self._children = Counter(e.parent for e in entries if e.parent in self._known)
        self._policy = policy
        self._keep = set(keep)
        self._pinned = pinned
        self.records = records
        self._claim = claim
        self._now = now
        scores = [e.score for e in entries if e.score is not None]
        self._fresh = sum(scores) / len(scores) if scores else 0.0
        self.victims: list[tuple[Entry, Claim, str]] = []
        """Segments to evict, in order, each with the reason."""

    def take(self, excess: float, fits: Callable[[Entry], bool] = lambda _: True) -> int:
        """Claim segments until `excess` bytes would be free; returns the bytes that would be."""
        heap = [self._rank(e) for e in self._known.values() if self._leaf(e) and fits(e)]
        heapq.heapify(heap)
        freed = 0
        try:
            while heap and freed < excess:
                entry = self._known[heapq.heappop(heap)[-1]]
                claim = self._claim(entry.id)
                if claim is None:
                    continue
                self.victims.append((entry, claim, self._why(entry)))
                del self._known[entry.id]
                freed += entry.bytes
                parent = self._known.get(entry.parent or "")
                if parent is not None:
                    self._children[parent.id] -= 1
                    if self._leaf(parent) and fits(parent):
                        heapq.heappush(heap, self._rank(parent))
            # A prefix is pinned while its segments are held: no pin comes after the claims.
            self._keep |= self._pinned() if self.victims else set()
        except BaseException:
            self.drop()  # what was claimed so far is not removed
            raise
        spared = [victim for victim in self.victims if victim[0].id in self._keep]
        for victim in spared:
            self.victims.remove(victim)
            victim[1].release()
            freed -= victim[0].bytes
        return freed + self.take(excess - freed, fits) if spared else freed

    def drop(self) -> None:
        """Let all victims go again."""
        for _, claim, _ in self.victims:
            claim.release()
        self.victims.clear()

    def expired(self, entry: Entry) -> bool:
        """Whether a segment has outlived what was wanted of it."""
        seconds = self.records.get(entry.id, _NO_RECORD).retain_s
        return seconds is not None and entry.used + seconds <= self._now

    def _leaf(self, entry: Entry) -> bool:
        return not self._children[entry.id] and entry.id not in self._keep

    def _rank(self, entry: Entry) -> tuple[bool, int, float, float, str]:
        score = self._fresh if entry.score is None else entry.score
        return (
            not self.expired(entry),
            self.records.get(entry.id, _NO_RECORD).priority,
            score if self._policy == "attention" else 0.0,
            entry.used,
            entry.id,
        )

    def _why(self, entry: Entry) -> str:
        idle = max(0.0, self._now - entry.used)
        record = self.records.get(entry.id, _NO_RECORD)
        if self.expired(entry):
            return f"expired: unused for {idle:.0f} s, retain_s={record.retain_s:g}"
        score = "never read" if entry.score is None else f"score {entry.score:.3g}"
        return f"{score}, priority {record.priority}, unused for {idle:.0f} s ({self._policy})"


def _refuse_circle(id_: str | None, parents: Mapping[str, str | None]) -> None:
    """Raises IndexDamaged where the parents above a segment go in a circle. Where they do not, what
    continues it has no circle either."""
    above: set[str] = set()
    while id_ is not None:
        if id_ in above:
            raise IndexDamaged(
                f"the index is damaged: it names segment {id_}, or a continuation of it, as its "
                "parent; nothing was deleted; run: ckv verify STORE --repair"
            )
        above.add(id_)
        id_ = parents.get(id_)


def _bound(whose: str | None, limit: int | None) -> str:
    return f"max_bytes={limit}" if whose is None else f"tenant_bytes={limit}"
