"""Packs of one batch, collected from device pool, host pool, reads in flight or the store.

Owned by the engine thread for the length of one batch. Reads run in the prefetcher's threads;
everything that touches the pools or the tiers happens here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from jax import Array

from ckv_jax.prefix.landing import Landing, Room
from ckv_jax.prefix.memory import Memory, job_packs
from ckv_jax.prefix.open_prefix import Source
from ckv_jax.prefix.prefetcher import Prefetcher, ReadJob, State
from ckv_jax.prefix.tiers import PoolExhausted, counted
from ckv_jax.trace import Trace

WAITING = -1
"""In place of a read's number: demanded, with no room yet."""
Which = np.ndarray | int


class Packs:
    """Packs of some prefixes for one batch. A context manager: leaving it gives everything back.

    A prefix is named by its place in `sources`. Where many packs are asked for, `which` and `group`
    are arrays int [n] beside their chunks, or one number each that holds for all.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        memory: Memory,
        landing: Landing,
        prefetcher: Prefetcher,
        trace: Trace,
        kind: str = "pack",
    ) -> None:
        """`kind`: names reads in traces, which count demands and lost chunks of "pack" alone."""
        self._sources = sources
        self._kind = kind
        self._memory = memory
        self._tiers = memory.tiers
        self._landing = landing
        self._prefetcher = prefetcher
        self._trace = trace
        self._layout = sources[0].prefix.layout
        self._most = job_packs(self._layout)
        self._table = PackTable(sources)
        self._begun: dict[int, ReadJob] = {}  # in progress, by their numbers
        self._last = 0  # number of a read
        self._waiting: list[np.ndarray] = []  # demanded, with no room yet
        self._done: list[tuple[slice, Array]] = []
        self._demanded_any = False
        self._recomputed: set[tuple[int, int]] = set()
        self.resident = False
        """Whether all packs of the latest demand are in device slots, so that none is to be
        collected."""
        self.book: Callable[[], None] | None = None
        """Records the uses of packs so far; called before the caches are given any of them, as what
        they keep depends on it."""
        memory.users.append(self)

    def __enter__(self) -> Packs:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def demand(self, which: Which, group: Which, chunks: np.ndarray) -> int:
        """Starts reading those of `chunks` that are neither cached nor in flight.

        What there is no room for yet is read when it is collected. Returns how many packs are
        not cached.
        """
        self._demanded_any = True
        codes = self._table.codes(which, group, chunks)
        already = covered = 0
        for number in self._table.reads(codes) if self._begun else ():
            if not (job := self._begun[number]).demanded:
                useful = int((self._table.read[codes] == number).sum())
                already += useful
                covered += 0 if job.early else useful
                self._prefetcher.promote(job)
        missing = self._locate(codes)
        count = already + len(missing)
        if count and self._kind == "pack":
            self._trace.count("demanded", count)
            if covered:
                self._trace.count("covered", covered)
        if len(missing):
            self._demand(missing)
        return count

    def ahead(
        self,
        which: Which,
        group: Which,
        chunks: np.ndarray,
        *,
        early: bool = False,
        apart: bool = False,
    ) -> None:
        """The same at low priority, while there is room for two demands of as much; `early`: it
        will be demanded in any case; `apart`: each pack alone, as none will be with another."""
        self._demanded_any = True
        missing = self._absent(self._table.codes(which, group, chunks))
        if not len(missing):
            return
        parts = list(missing[:, None]) if apart else self._parts(missing)
        spare = 2 * (1 if apart else len(missing))
        self._make_room(len(missing) + spare, wait=False)
        reads = []
        for part in parts:
            room = self._landing.take(len(part), demand=False, spare=spare)
            if room is None:
                break
            reads.append(self._read(room, part, demanded=False, early=early))
        self._start(reads)

    def computed(self, which: int, group: int, chunks: np.ndarray) -> None:
        """Takes those of `chunks` that are neither cached nor in flight from what has been computed
        of the prefix, in place of the store. Raises as `collect`."""
        self._demanded_any = True
        missing = self._absent(self._table.codes(which, group, chunks))
        if len(missing):
            self._put_computed(which, group, self._table.parts(missing)[2])

    def drop_ahead(self, which: Which, group: Which, chunks: np.ndarray) -> None:
        """Ends all that is read ahead but these packs and what is being read now. What has come is
        offered to the caches."""
        kept = set(self._table.reads(self._table.codes(which, group, chunks)))
        for number, job in list(self._begun.items()):
            if number in kept or job.demanded or job.state is State.RUNNING:
                continue
            self._count_unused(number)
            slots = None
            if job.state is State.ENDED and job.ok.all() and job.settled is None:
                with suppress(PoolExhausted):
                    slots = self._landing.place(job.room, np.arange(len(job.codes)))
            if slots is None:
                self._withdraw(number)
            else:
                self._end(number)
                self._memory.admit(self._table.pages(job.codes), slots)

    def collect(
        self, which: Which, group: Which, chunks: np.ndarray, *, stage: str = "critical_io_wait"
    ) -> np.ndarray:
        """Device slots int32 [n] of `chunks`, all demanded before; waits for those still read.

        The wait is recorded as a span named `stage`. Raises `PoolExhausted` if they do not fit
        beside what running requests hold, `RecoveryNeeded` for what the store could not give.
        """
        table, codes = self._table, self._table.codes(which, group, chunks)
        slots = table.device(codes)
        if (slots >= 0).all():
            return slots
        absent = codes[slots < 0]
        staged = table.host(absent) >= 0
        if staged.any():
            self._stage_host(absent[staged])
        needed, failed = absent[~staged], [codes[:0]]
        while len(needed):
            first = table.first_read(needed)
            if self._waiting or first is None:
                self._start_waiting(needed, force=first is None)
            if first is not None:
                needed, bad = self._take(first, needed, stage)
                if len(bad):
                    failed.append(bad)
        if len(failed) > 1:
            self._replace(np.concatenate(failed))
        return table.device(codes)

    def slots(self, which: np.ndarray, groups: range, selected: np.ndarray) -> np.ndarray:
        """Device slots int32 [P, B, N] of collected packs: of what rows of prefixes `which` [B]
        selected, int [J, B, N], -1: none, as its slot is. P groups take selection 0 to J - 1 in
        turn."""
        each = np.array(groups)
        ids = selected[each % len(selected)]
        codes = self._table.codes(which[:, None], each[:, None, None], ids)
        return np.where(ids >= 0, self._table.device(np.where(ids >= 0, codes, 0)), -1)

    def done(self, which: int, group: int, after: Array) -> None:
        """Says that all calls reading this group are dispatched; `after` is the last one's."""
        self._done.append((self._table.of_group(which, group), after))

    def give_up(self, which: int, group: int, after: Array) -> None:
        """Gives a group's slots back now, once the call that made `after` has ended."""
        after.block_until_ready()
        self._admit(self._table.of_group(which, group))

    def start_over(self, which: int, group: int) -> None:
        """Ends a group's reads and gives its slots back; no call may be reading them. What was
        demanded of other groups with them is read when it is collected."""
        some = self._table.of_group(which, group)
        for number in self._table.reads(some):
            self._withdraw(number, again=True)
        left = [part[(part < some.start) | (part >= some.stop)] for part in self._waiting]
        self._waiting = [part for part in left if len(part)]
        self._table.read[some] = 0
        self._admit(some)

    def keep(self) -> None:
        """Makes everything read so far cached packs, which sequences then pin.

        What was demanded has to be demanded again; reads in progress go on.
        """
        if self.book is not None:
            self.book()
        table = self._table
        held = table.held(table.every)
        self._give_fresh(held, self._tiers.own)
        self._tiers.unpin(*counted(table.pages(held[table.pinned[held]])))
        table.clear(held)

    def report_to(self, trace: Trace) -> None:
        """Counts to `trace` from now on."""
        self._trace = trace

    def give_way(self, n: int) -> None:
        """Another user waits for packs: gives back what no call reads, and ends reads that no
        caller waits for now, until `n` slots are free."""
        self._make_room(n, wait=True)
        self._withdraw_for(n, but=None)

    def rest(self) -> None:
        """Ends all reads; nothing more is collected."""
        for number in list(self._begun):
            self._count_unused(number)
            self._withdraw(number)

    def finish(self) -> None:
        """Ends all reads, admits what was read to the cache, and unpins. Idempotent."""
        if self in self._memory.users:
            self._memory.users.remove(self)
        self.rest()
        self._admit(self._table.every)
        self._done.clear()
        if self._demanded_any:
            self._memory.trim()
            self._memory.flush()

    def _absent(self, codes: np.ndarray) -> np.ndarray:
        """Those of some packs that are neither cached nor held nor being read."""
        device, host = self._tiers.lookup(self._table.pages(codes))
        absent = (device < 0) & (host < 0) & (self._table.read[codes] == 0)
        missing: np.ndarray = codes[absent & ~self._table.known(codes)]
        return missing

    def _parts(self, codes: np.ndarray) -> list[np.ndarray]:
        """Splits packs into those of one read each."""
        return self._table.by_read(codes, single=False, most=self._most)

    def _demand(self, missing: np.ndarray) -> None:
        """Starts to read these, as far as there is room."""
        reads: list[ReadJob] = []
        full = False
        for part in self._parts(missing):
            room = None if full else self._room(part)
            if room is None:
                full = True  # others come after it
                self._wait_for_room(part)
            else:
                reads.append(self._read(room, part, demanded=True))
        self._start(reads)

    def _locate(self, codes: np.ndarray) -> np.ndarray:
        """Fills in what is cached (pinned from now on); returns what has to be read."""
        table = self._table
        unknown = codes[~table.known(codes)]
        pages = table.pages(unknown)
        device, host = self._tiers.lookup(pages)
        cached = (device >= 0) | (host >= 0)
        self.resident = len(unknown) == len(codes) and bool((device >= 0).all())
        if cached.any():
            mine, held = unknown[cached], pages[cached]
            self._tiers.pin(*(counted(held) if len(self._sources) > 1 else (held,)))
            table.pinned[mine] = True
            table.put(mine, device[cached], host[cached])
            self._trace.count_bytes("device", int((device >= 0).sum()) * self._layout.pack_bytes)
        absent: np.ndarray = unknown[~cached & (table.read[unknown] == 0)]
        return absent

    def _room(self, codes: np.ndarray) -> Room | None:
        """Room for a read that is demanded; None if there is none."""
        self._make_room(len(codes), wait=False)
        return self._landing.take(len(codes), demand=True)

    def _read(
        self, room: Room, codes: np.ndarray, *, demanded: bool, early: bool = False
    ) -> ReadJob:
        """A read into this room, to be started."""
        which, groups, chunks = self._table.parts(codes)
        source = self._sources[which[0]]
        group = int(groups[0]) if (groups == groups[0]).all() else groups
        sizes = source.sizes
        return ReadJob(
            reader=source.reader, group=group, first_group=int(groups.min()), chunks=chunks,
            room=room, demanded=demanded, early=early, trace=self._trace,
            prefix=source.prefix.id, span=f"{self._kind}_read", codes=codes,
            num_bytes=len(chunks) * room.array[0].nbytes
            if sizes is None
            else int(sizes[groups, chunks].sum()),
        )  # fmt: skip

    def _start(self, reads: list[ReadJob]) -> None:
        for job in reads:
            self._last += 1
            self._begun[self._last] = job
            self._table.read[job.codes] = self._last
        self._prefetcher.submit(*reads)

    def _wait_for_room(self, codes: np.ndarray) -> None:
        self._waiting.append(codes)
        self._table.read[codes] = WAITING

    def _start_waiting(self, needed: np.ndarray, *, force: bool) -> None:
        """Starts what of these had no room when it was demanded; with `force`, one part of it at
        the cost of later reads."""
        waiting = [part for part in self._waiting if self._table.among(part, needed).any()]
        if force and not waiting:
            raise ValueError(f"got {len(needed)} packs to collect that were not demanded")
        for part in waiting:
            room = self._room(part)
            if room is None:
                if not force:
                    return
                self._make_room(len(part), wait=True)
                self._take_back(len(part), needed)
                room = self._room(part) or self._landing.force(len(part))
            force = False
            self._waiting = [other for other in self._waiting if other is not part]
            self._start([self._read(room, part, demanded=True)])

    def _stage_host(self, codes: np.ndarray) -> None:
        slots = self._slots(len(codes))
        start = time.perf_counter_ns()
        moved = self._memory.pool.load(self._memory.host, self._table.host(codes), slots)
        self._trace.add("stage", "stage", start, time.perf_counter_ns(), bytes=moved)
        self._trace.count_bytes("host", moved)
        self._own(codes, slots)

    def _take(self, number: int, needed: np.ndarray, stage: str) -> tuple[np.ndarray, np.ndarray]:
        """Waits for a read and puts its packs into slots; returns what is needed after that, and
        what could not be read."""
        job = self._begun[number]
        codes, start = job.codes, time.perf_counter_ns()
        self._prefetcher.wait(job)
        self._trace.add(stage, "host", start, time.perf_counter_ns(), chunks=len(codes))
        wanted = self._table.among(codes, needed)
        good = np.flatnonzero(wanted & job.ok)
        failed, left = codes[wanted & ~job.ok], needed[self._table.read[needed] != number]
        if not len(good):
            self._withdraw(number)
            return left, failed
        try:
            slots = self._landing.place(job.room, good)
        except PoolExhausted:
            self._make_room(len(good), wait=True)
            self._take_back(len(good), codes)
            slots = self._landing.place(job.room, good)
        self._own(codes[good], slots)
        self._count_unused(number)
        self._end(number)  # not before: where there are no slots, it has its room still
        return left, failed

    def _own(self, codes: np.ndarray, slots: np.ndarray) -> None:
        """Packs that are collected have come, into device slots that the batch took."""
        self._table.put(codes, slots)
        self._table.fresh[codes] = True

    def _replace(self, codes: np.ndarray) -> None:
        """Recomputed packs in place of those that the store could not give."""
        for mine in self._table.by_read(codes, single=True, most=len(codes)):
            places, groups, chunks = self._table.parts(mine)
            which, source = int(places[0]), self._sources[places[0]]
            self._put_computed(which, int(groups[0]), chunks)
            self._trace.count(f"recomputed_{self._kind}s", len(chunks))
            if self._kind == "pack":
                fresh = {(which, chunk) for chunk in chunks.tolist()} - self._recomputed
                self._recomputed |= fresh
                prefix = source.prefix
                self._trace.count("recomputed_chunks", len(fresh), prefix=prefix.id)

    def _put_computed(self, which: int, group: int, chunks: np.ndarray) -> None:
        packs = self._sources[which].recovered.packs(group, chunks)
        slots = self._slots(len(chunks))
        self._memory.write(packs, slots)
        self._own(self._table.codes(which, group, chunks), slots)

    def _slots(self, n: int) -> np.ndarray:
        """`n` device slots that a caller waits for."""
        self._make_room(n, wait=True)
        try:
            return self._memory.take(n)
        except PoolExhausted:
            self._take_back(n, None)
            return self._memory.take(n)

    def _make_room(self, n: int, *, wait: bool) -> None:
        """Gives back groups that have been attended to, until `n` slots are free or none is left.

        Calls still running may read a slot that a thread fills; with `wait` they are waited for,
        else their groups stay.
        """
        if self._memory.abandoned:
            self._memory.reclaim()
        while self._done and self._tiers.device.free < n:
            some, after = self._done[0]
            if not after.is_ready():  # type: ignore[attr-defined]
                if not wait:
                    return
                after.block_until_ready()
            del self._done[0]
            self._admit(some)

    def _take_back(self, n: int, but: np.ndarray | None) -> None:
        """Ends reads that are not waited for, those of other users of the pool at the end."""
        self._withdraw_for(n, but)
        for other in list(self._memory.users):
            if other is not self and self._tiers.device.free < n:
                other.give_way(n)

    def _withdraw_for(self, n: int, but: np.ndarray | None) -> None:
        """Ends reads, the last group's first, of none of `but`: demands wait again."""
        spared = set(self._table.reads(but)) if but is not None else set()
        reads = [number for number in self._begun if number not in spared]
        for number in sorted(reads, key=lambda one: self._begun[one].first_group, reverse=True):
            if self._tiers.device.free >= n:
                return
            self._withdraw(number, again=True)

    def _admit(self, some: slice) -> None:
        """Lets the cache decide about the slots that this batch took for some packs, and unpins."""
        if self.book is not None:
            self.book()
        table = self._table
        held = table.held(some)
        pinned = held[table.pinned[held]]
        if len(pinned):
            self._tiers.unpin(*counted(table.pages(pinned)))
        self._give_fresh(held, self._memory.admit)
        table.clear(held)

    def _give_fresh(
        self, held: np.ndarray, take: Callable[[np.ndarray, np.ndarray], object]
    ) -> None:
        """Has the caches take those of held packs that are in slots of the batch's own."""
        fresh = held[self._table.fresh[held]]
        pages, slots = self._table.pages(fresh), self._table.device(fresh)
        while len(pages):  # more than once where prefixes have read the same page
            each, at = np.unique(pages, return_index=True)
            take(each, slots[at])
            pages, slots = np.delete(pages, at), np.delete(slots, at)

    def _count_unused(self, number: int) -> None:
        """Bytes that a read brought, if it had begun, of packs that were not collected."""
        job = self._begun[number]
        unused = int((~self._table.fresh[job.codes]).sum())
        if job.t0_ns and (size := job.num_bytes * unused // len(job.codes)):
            self._trace.count_bytes("unused", size)

    def _withdraw(self, number: int, *, again: bool = False) -> None:
        """Ends a read, if it has not ended, and gives its room back; `again`: demands wait on."""
        job = self._begun[number]
        self._prefetcher.drop(job)
        self._end(number)
        self._landing.give_back(job.room, job.settled)
        if again and job.demanded:
            self._wait_for_room(job.codes)

    def _end(self, number: int) -> None:
        self._table.read[self._begun.pop(number).codes] = 0


class PackTable:
    """Table of a batch's packs: the slot of each, and the read that brings it.

    A pack is named by its code, a number that says of which of the batch's prefixes, layer group
    and chunk it is. So all that a period asks of many of them is one array. `Packs` alone changes
    its columns.

    Nothing is stored of packs that no step asks for: memory that was never touched takes no room.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._chunks = max([len(source.first_page) for source in sources])
        self._of_prefix = sources[0].groups * self._chunks
        self._first, self._stride = np.zeros((2, len(sources) * self._chunks), np.int64)
        for which, source in enumerate(sources):
            mine = slice(which * self._chunks, which * self._chunks + len(source.first_page))
            self._first[mine] = source.first_page
            self._stride[mine] = source.page_stride
        size = len(sources) * self._of_prefix
        self._device, self._host, self.read = np.zeros((3, size), np.int32)
        # of the first two: slots and 1 more; of the third: the number of the read that is to bring
        # a pack, from 1; `WAITING`; or 0
        self.pinned, self.fresh, self._marked = np.zeros((3, size), bool)
        # cached packs that the batch pins; packs in device slots that it took; all False between
        # two calls
        self.every = slice(0, size)
        """All codes."""

    def codes(self, which: Which, group: Which, chunk: np.ndarray) -> np.ndarray:
        """Codes int64 [n] of packs; what is one number holds for all."""
        found: np.ndarray = (
            which * self._of_prefix + group * self._chunks + np.asarray(chunk, np.int64)
        )
        return found

    def parts(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(which prefix, layer group, chunk) int64 [n] each of packs."""
        which, rest = np.divmod(codes, self._of_prefix)
        return which, *np.divmod(rest, self._chunks)

    def pages(self, codes: np.ndarray) -> np.ndarray:
        """Page numbers int64 [n] of packs."""
        which, group, chunk = self.parts(codes)
        chunk += which * self._chunks
        found: np.ndarray = self._first[chunk] + group * self._stride[chunk]
        return found

    def of_group(self, which: int, group: int) -> slice:
        """The codes of one layer group of a prefix."""
        first = which * self._of_prefix + group * self._chunks
        return slice(first, first + self._chunks)

    def by_read(self, codes: np.ndarray, *, single: bool, most: int) -> list[np.ndarray]:
        """Equal parts of packs that one read could bring: of one prefix each, with `single` of one
        layer group, of at most so many."""
        if not len(codes):
            return []
        keys = codes // (self._chunks if single else self._of_prefix)
        if (keys == keys[0]).all():
            whole = [codes]
        else:
            order = np.argsort(keys, kind="stable")
            whole = np.split(codes[order], np.flatnonzero(np.diff(keys[order])) + 1)
        parts: list[np.ndarray] = []
        for some in whole:
            parts += np.array_split(some, -(-len(some) // most)) if len(some) > most else [some]
        return parts

    def reads(self, codes: slice | np.ndarray) -> list[int]:
        """The reads that are to bring some of these, in the order in which they began."""
        numbers = self.read[codes]
        return sorted(set(numbers[numbers > 0].tolist()))  # few: faster than `np.unique`

    def first_read(self, codes: np.ndarray) -> int | None:
        """The read of these that began first; None: there is none."""
        numbers = self.read[codes]
        numbers = numbers[numbers > 0]
        return int(numbers.min()) if len(numbers) else None

    def among(self, codes: np.ndarray, some: np.ndarray) -> np.ndarray:
        """bool [n]: which of `codes` are among others. There are many short ones to look for, where
        `np.isin` takes ten times as long."""
        self._marked[some] = True
        found: np.ndarray = self._marked[codes]
        self._marked[some] = False
        return found

    def known(self, codes: np.ndarray) -> np.ndarray:
        """bool [n]: whether the batch holds packs, on the device or the host."""
        held: np.ndarray = (self._device[codes] | self._host[codes]) > 0
        return held

    def held(self, some: slice) -> np.ndarray:
        """Codes int64 [n] of the packs of a range that the batch holds."""
        held: np.ndarray = some.start + np.flatnonzero(self._device[some] | self._host[some])
        return held

    def device(self, codes: np.ndarray) -> np.ndarray:
        """Device slots int32 [n]; -1: not there."""
        slots: np.ndarray = self._device[codes] - 1
        return slots

    def host(self, codes: np.ndarray) -> np.ndarray:
        """Host slots int32 [n]; -1: not there."""
        slots: np.ndarray = self._host[codes] - 1
        return slots

    def put(self, codes: np.ndarray, device: np.ndarray, host: np.ndarray | None = None) -> None:
        """Packs are in these device slots and host slots, -1: not there; None: where they were."""
        self._device[codes] = device + 1
        if host is not None:
            self._host[codes] = host + 1

    def clear(self, codes: np.ndarray) -> None:
        """The batch holds these packs no longer."""
        for column in (self._device, self._host, self.pinned, self.fresh):
            column[codes] = 0
