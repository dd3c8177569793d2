"""A batch's packs, from wherever they are: device pool, host pool, reads in flight, or the store.

Owned by the engine thread for the length of one batch. Reads run in the prefetcher's threads;
everything that touches the pools or the tiers happens here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from jax import Array

from ckv_jax.cache.tiers import PoolExhausted
from ckv_jax.memory.landing import Landing, Room
from ckv_jax.memory.memory import Memory, job_packs
from ckv_jax.reads.pack_group import PackGroup
from ckv_jax.reads.prefetcher import Prefetcher
from ckv_jax.reads.read_job import ReadJob, State
from ckv_jax.reads.source import Source
from ckv_jax.trace import Trace

Key = tuple[int, int]
"""(which prefix of the batch, layer group)."""


class Packs:
    """Packs of some prefixes for one batch. A context manager: leaving it gives everything back.

    A prefix is named by its place in `sources`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        memory: Memory,
        landing: Landing,
        prefetcher: Prefetcher,
        trace: Trace,
    ) -> None:
        self._sources = sources
        self._memory = memory
        self._tiers = memory.tiers
        self._landing = landing
        self._prefetcher = prefetcher
        self._trace = trace
        self._layout = sources[0].prefix.prefix.layout
        self._job_packs = job_packs(self._layout)
        self._groups: dict[Key, PackGroup] = {}
        self._done: list[tuple[Key, Array]] = []
        self._recomputed: set[tuple[int, int]] = set()
        memory.users.append(self)

    def __enter__(self) -> Packs:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def demand(self, which: int, group: int, chunks: np.ndarray) -> int:
        """Starts reading those of `chunks` that are neither cached nor in flight.

        What there is no room for yet is read when it is collected. Returns how many packs are
        not cached.
        """
        state = self._group(which, group)
        wanted = set(chunks.tolist())
        already = covered = 0
        for begun in state.jobs:
            useful = len(wanted.intersection(begun.chunks.tolist()))
            if useful and not begun.demanded:
                already += useful
                covered += 0 if begun.sure else useful
                self._prefetcher.promote(begun)
        missing = self._locate(state, chunks)
        if state.source.kind == "pack":
            self._trace.count("demanded", already + len(missing))
            self._trace.count("covered", covered)
        jobs = []
        for part in self._parts(missing):
            job = None if state.waiting else self._job(state, part, demand=True)
            if job is None:
                state.waiting.append(part)
            else:
                jobs.append(job)
        self._start(state, jobs)
        state.flying.update(missing.tolist())
        return already + len(missing)

    def ahead(self, which: int, group: int, chunks: np.ndarray, *, sure: bool = False) -> None:
        """The same at low priority, where there is room; may turn out not to be used, unless it is
        `sure` to be demanded."""
        state = self._group(which, group)
        device, host = self._tiers.lookup(state.source.prefix.pages(group, chunks))
        absent = chunks[(device < 0) & (host < 0)].tolist()
        known = state.flying.union(state.slots, state.host)
        missing = np.array([c for c in absent if c not in known], np.int64)
        if not len(missing):
            return
        spare = 2 * len(missing)  # for two demands of this size
        self._make_room(len(missing) + spare, wait=False)
        jobs = []
        for part in self._parts(missing):
            job = self._job(state, part, demand=False, sure=sure, spare=spare)
            if job is None:
                break
            jobs.append(job)
            state.flying.update(part.tolist())
        self._start(state, jobs)

    def collect(
        self, which: int, group: int, chunks: np.ndarray, *, stage: str = "critical_io_wait"
    ) -> np.ndarray:
        """Device slots int32 [n] of `chunks`, all demanded before; waits for those still read.

        The wait is recorded as a span named `stage`. Raises `PoolExhausted` if they do not fit
        beside what running requests hold, `RecoveryNeeded` for what the store could not give.
        """
        state = self._groups[which, group]
        wanted = chunks.tolist()
        self._stage_host(state, [c for c in wanted if c not in state.slots and c in state.host])
        needed = {c for c in wanted if c not in state.slots}
        failed: list[int] = []
        while needed:
            job = state.reading(needed)
            self._start_waiting(state, (which, group), force=job is None)
            if job is not None:
                failed += self._take(state, job, needed, stage)
        if failed:
            self._replace(state, which, failed)
        return np.fromiter((state.slots[c] for c in wanted), np.int32, len(wanted))

    def done(self, which: int, group: int, after: Array) -> None:
        """Says that all calls reading this group are dispatched; `after` is the last one's."""
        self._done.append(((which, group), after))

    def give_up(self, which: int, group: int, after: Array) -> None:
        """Gives a group's slots back now, once the call that made `after` has ended."""
        after.block_until_ready()
        self._admit((which, group))

    def start_over(self, which: int, group: int) -> None:
        """Ends a group's reads and gives its slots back; no call may be reading them."""
        state = self._group(which, group)
        for job in list(state.jobs):
            self._withdraw(state, job)
        state.flying.clear()
        state.waiting.clear()
        self._admit((which, group))

    def keep(self, which: int) -> None:
        """Makes everything read of a prefix so far cached packs, which its sequences then pin.

        What was collected has to be demanded again; reads under way go on.
        """
        for state in (state for (owner, _), state in self._groups.items() if owner == which):
            if state.fresh:
                chunks, slots = state.hand_over()
                self._tiers.own(state.source.prefix.pages(state.group, chunks), slots)
            state.unpin(self._tiers)
            state.slots.clear()
            state.host.clear()
            state.used.clear()

    def only_ahead(self, which: int, group: int, chunks: np.ndarray) -> None:
        """Gives up what was read ahead of a group, except these chunks, and reads under way."""
        state = self._group(which, group)
        for job in list(state.jobs):
            idle = not job.demanded and job.state is not State.RUNNING
            if idle and not np.isin(job.chunks, chunks).any():
                self._count_unused(state, job)
                self._withdraw(state, job)

    def tell(self, trace: Trace) -> None:
        """What is counted from now on goes to `trace`."""
        self._trace = trace

    def give_way(self, n: int) -> None:
        """Somebody else waits for packs: gives back what no call reads, and ends reads that nobody
        waits for now, until `n` slots are free."""
        self._make_room(n, wait=True)
        self._withdraw_for(n, None)

    def finish(self) -> None:
        """Ends all reads, admits what was read to the cache, and unpins. Idempotent."""
        if self in self._memory.users:
            self._memory.users.remove(self)
        for key, state in self._groups.items():
            for job in list(state.jobs):
                self._count_unused(state, job)
                self._withdraw(state, job)
            self._admit(key)
        self._done.clear()
        self._memory.apply(self._tiers.trim())
        self._memory.flush()

    def _parts(self, chunks: np.ndarray) -> list[np.ndarray]:
        """Equal parts of at most `job_packs` chunks."""
        count = -(-len(chunks) // self._job_packs)
        size = -(-len(chunks) // max(1, count))
        return [chunks[i : i + size] for i in range(0, len(chunks), max(1, size))]

    def _group(self, which: int, group: int) -> PackGroup:
        key = which, group
        if key not in self._groups:
            self._groups[key] = PackGroup(self._sources[which], group)
        return self._groups[key]

    def _locate(self, state: PackGroup, chunks: np.ndarray) -> np.ndarray:
        """Fills in what is cached (pinned from now on); returns what has to be read."""
        known = [c for c in chunks.tolist() if c in state.slots or c in state.host]
        unknown = np.setdiff1d(chunks, known) if known else chunks
        pages = state.source.prefix.pages(state.group, unknown)
        device, host = self._tiers.lookup(pages)
        cached = (device >= 0) | (host >= 0)
        if cached.any():
            self._tiers.pin(pages[cached])
            state.pinned.append(pages[cached])
            on_device, on_host = device >= 0, (host >= 0) & (device < 0)
            self._trace.count_bytes("device", int(on_device.sum()) * self._layout.pack_bytes)
            state.slots.update(
                zip(unknown[on_device].tolist(), device[on_device].tolist(), strict=True)
            )
            state.host.update(zip(unknown[on_host].tolist(), host[on_host].tolist(), strict=True))
        missing = unknown[~cached]
        return np.array([c for c in missing.tolist() if c not in state.flying], np.int64)

    def _job(
        self,
        state: PackGroup,
        chunks: np.ndarray,
        *,
        demand: bool,
        sure: bool = False,
        spare: int = 0,
    ) -> ReadJob | None:
        """One read, to be started; None if there is no room for it."""
        if demand:
            self._make_room(len(chunks), wait=False)
        room = self._landing.take(len(chunks), demand=demand, spare=spare)
        if room is None:
            return None
        return self._job_into(room, state, chunks, demand=demand, sure=sure)

    def _job_into(
        self, room: Room, state: PackGroup, chunks: np.ndarray, *, demand: bool, sure: bool = False
    ) -> ReadJob:
        source = state.source
        return ReadJob(
            source.reader, state.group, chunks, room, demanded=demand, sure=sure,
            trace=self._trace, prefix=source.prefix.prefix.id, span=f"{source.kind}_read",
            num_bytes=source.prefix.read_bytes(chunks),
        )  # fmt: skip

    def _start(self, state: PackGroup, jobs: list[ReadJob]) -> None:
        if jobs:
            state.jobs += jobs
            self._prefetcher.submit(*jobs)

    def _start_waiting(self, state: PackGroup, key: Key, *, force: bool) -> None:
        """Starts what of a group had no room when it was demanded; with `force`, one part of it
        at the cost of later reads."""
        if force and not state.waiting:
            raise ValueError(f"got packs of group {state.group} to collect that were not demanded")
        while state.waiting:
            part = state.waiting[0]
            job = self._job(state, part, demand=True)
            if job is None:
                if not force:
                    return
                self._make_room(len(part), wait=True)
                self._take_back(len(part), key)
                job = self._job(state, part, demand=True)
            if job is None:
                room = self._landing.force(len(part))
                job = self._job_into(room, state, part, demand=True)
            force = False
            del state.waiting[0]
            self._start(state, [job])

    def _stage_host(self, state: PackGroup, chunks: list[int]) -> None:
        if not chunks:
            return
        slots = self._slots(len(chunks))
        host_slots = np.fromiter((state.host[c] for c in chunks), np.int32, len(chunks))
        start = time.perf_counter_ns()
        moved = self._memory.stage(host_slots, slots)
        self._trace.add("stage", "stage", start, time.perf_counter_ns(), bytes=moved)
        self._trace.count_bytes("host", moved)
        state.own(chunks, slots)

    def _take(self, state: PackGroup, job: ReadJob, needed: set[int], stage: str) -> list[int]:
        """Waits for a job and puts its packs into slots; returns what could not be read."""
        start = time.perf_counter_ns()
        self._prefetcher.wait(job)
        self._trace.add(stage, "host", start, time.perf_counter_ns(), chunks=len(job.chunks))
        chunks = job.chunks.tolist()
        good = [i for i, c in enumerate(chunks) if c in needed and job.ok[i]]
        failed = [c for i, c in enumerate(chunks) if c in needed and not job.ok[i]]
        needed.difference_update(chunks)
        if not good:
            self._withdraw(state, job)
            return failed
        self._count_unused(state, job, set(chunks[i] for i in good))
        state.end(job)
        try:
            slots = self._landing.place(job.room, np.array(good), job.group)
        except PoolExhausted:
            self._make_room(len(good), wait=True)
            self._take_back(len(good), None)
            slots = self._landing.place(job.room, np.array(good), job.group)
        state.own([chunks[i] for i in good], slots)
        return failed

    def _replace(self, state: PackGroup, which: int, chunks: list[int]) -> None:
        """Recomputed packs in place of those that the store could not give."""
        source = state.source
        packs = source.recovered.packs(state.group, np.array(chunks, np.int64))
        self._trace.count(f"recomputed_{source.kind}s", len(chunks))
        if source.kind == "pack":
            fresh = {(which, chunk) for chunk in chunks} - self._recomputed
            self._recomputed |= fresh
            prefix = source.prefix.prefix.id
            self._trace.count("recomputed_chunks", len(fresh), prefix=prefix)
        slots = self._slots(len(chunks))
        self._memory.write(packs, slots)
        state.own(chunks, slots)

    def _slots(self, n: int) -> np.ndarray:
        """`n` device slots that somebody waits for."""
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
        self._memory.reclaim()
        while self._memory.free_slots < n and self._done:
            key, after = self._done[0]
            if not after.is_ready():  # type: ignore[attr-defined]
                if not wait:
                    return
                after.block_until_ready()
            del self._done[0]
            self._admit(key)

    def _take_back(self, n: int, but: Key | None) -> None:
        """Ends reads that are not waited for, those of other users of the pool at the end."""
        self._withdraw_for(n, but)
        for other in list(self._memory.users):
            if other is not self and self._memory.free_slots < n:
                other.give_way(n)

    def _withdraw_for(self, n: int, but: Key | None) -> None:
        """Ends reads, the last group's first: demands wait again."""
        for key in sorted(self._groups, key=lambda key: key[1], reverse=True):
            state = self._groups[key]
            for job in list(state.jobs) if key != but else []:
                if self._memory.free_slots >= n:
                    return
                self._withdraw(state, job)
                if job.demanded:
                    state.waiting.append(job.chunks)
                    state.flying.update(job.chunks.tolist())

    def _admit(self, key: Key) -> None:
        """Lets the cache decide about the slots that this batch took for a group, and unpins."""
        state = self._groups[key]
        state.unpin(self._tiers)
        if state.fresh:
            chunks, slots = state.hand_over()
            self._memory.admit(state.source.prefix.pages(state.group, chunks), slots)
        state.slots.clear()
        state.host.clear()

    def _count_unused(self, state: PackGroup, job: ReadJob, used: set[int] | None = None) -> None:
        if unused := state.unused_bytes(job, used):
            self._trace.count_bytes("unused", unused)

    def _withdraw(self, state: PackGroup, job: ReadJob) -> None:
        """Ends a read, if it has not ended, and gives its room back."""
        self._prefetcher.drop(job)
        state.end(job)
        self._landing.give_back(job.room, job.settled)
