"""Where one request's packs come from: device pool, host pool, reads in flight, or the store.

Owned by the engine thread for the length of one request. Reads run in the prefetcher's threads;
everything that touches the device pool or the tiers happens here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from ckv_jax.memory.memory import Memory
from ckv_jax.reads.prefetcher import Prefetcher, ReadJob
from ckv_jax.reads.residents import PrefixView
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace

Recompute = Callable[[int, np.ndarray], np.ndarray]
"""(group, chunks) -> packs [n, pl, 2, C, K, D], where the store could not give them."""


@dataclass(slots=True)
class _Group:
    """What is known of one layer group in this request."""

    slots: dict[int, int] = field(default_factory=dict)  # chunk -> device slot
    host: dict[int, int] = field(default_factory=dict)  # chunk -> host slot
    fresh: list[int] = field(default_factory=list)  # chunks whose slots this request took
    jobs: list[ReadJob] = field(default_factory=list)
    flying: set[int] = field(default_factory=set)  # chunks of those jobs
    used: set[int] = field(default_factory=set)  # chunks that were written to a slot


class PackSource:
    """Packs of one prefix for one request. A context manager: leaving it gives everything back.

    With `hold`, packs stay in their slots until then, so that decode can go on reading them.
    """

    def __init__(
        self,
        *,
        view: PrefixView,
        reader: PrefixReader,
        memory: Memory,
        prefetcher: Prefetcher,
        recompute: Recompute,
        trace: Trace,
        hold: bool = False,
    ) -> None:
        self._view = view
        self._reader = reader
        self._memory = memory
        self._tiers = memory.tiers
        self._prefetcher = prefetcher
        self._recompute = recompute
        self._trace = trace
        self._hold = hold
        self._layout = view.prefix.layout
        self._groups: dict[int, _Group] = {}
        self._done: list[tuple[int, Array]] = []
        self._pinned: list[np.ndarray] = []
        self._writes: list[tuple[Array, ReadJob]] = []
        self._owner = prefetcher.owner()

    def __enter__(self) -> PackSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def demand(self, group: int, chunks: np.ndarray) -> int:
        """Starts reading those of `chunks` that are neither cached nor in flight.

        Returns how many are not cached.
        """
        state = self._groups.setdefault(group, _Group())
        wanted = set(chunks.tolist())
        already = 0
        for job in state.jobs:
            useful = len(wanted.intersection(job.chunks.tolist()))
            if useful and not job.demanded:
                already += useful if job.placed() else 0
                self._prefetcher.promote(job)
        missing = self._locate(group, state, chunks)
        self._trace.count("demanded", already + len(missing))
        self._trace.count("covered", already)
        self._submit(group, state, missing, demand=True)
        return already + len(missing)

    def speculate(self, group: int, chunks: np.ndarray) -> None:
        """The same at low priority; what is not demanded later was read in vain."""
        state = self._groups.setdefault(group, _Group())
        self._submit(group, state, self._locate(group, state, chunks), demand=False)

    def collect(
        self, group: int, chunks: np.ndarray, *, stage: str = "critical_io_wait"
    ) -> np.ndarray:
        """Device slots int32 [n] of `chunks`, all demanded before; waits for those still read.

        The wait is recorded as a span named `stage`.
        """
        state = self._groups[group]
        wanted = chunks.tolist()
        self._stage_host(state, [c for c in wanted if c not in state.slots and c in state.host])
        needed = {c for c in wanted if c not in state.slots}
        failed: list[int] = []
        while needed:  # taking one job may make room at the expense of others
            job = next(job for job in state.jobs if not needed.isdisjoint(job.chunks.tolist()))
            failed += self._take_job(state, job, needed, stage)
        if failed:
            self._replace(group, state, failed)
        return np.fromiter((state.slots[c] for c in wanted), np.int32, len(wanted))

    def done(self, group: int, after: Array) -> None:
        """Says that all calls reading this group are dispatched; `after` is the last one's."""
        if not self._hold:
            self._done.append((group, after))

    def keep_only(self, group: int, chunks: np.ndarray) -> None:
        """Gives back the group's packs other than `chunks`; all it demanded was collected."""
        state = self._groups[group]
        for job in list(state.jobs):
            self._count_waste(state, job)
            self._withdraw(state, job)
        kept = set(chunks.tolist())
        leaving = [c for c in (*state.slots, *state.host) if c not in kept]
        pages = self._view.pages(group, np.unique(np.array(leaving, np.int64)))
        mine = [np.isin(pinned, pages) for pinned in self._pinned]
        for pinned, gone in zip(self._pinned, mine, strict=True):
            self._tiers.unpin(pinned[gone])
        self._pinned = [pinned[~gone] for pinned, gone in zip(self._pinned, mine, strict=True)]
        fresh = [c for c in state.fresh if c not in kept]
        self._give_back(group, state, fresh)
        state.fresh = [c for c in state.fresh if c in kept]
        for chunk in leaving:
            state.slots.pop(chunk, None)
            state.host.pop(chunk, None)

    def finish(self) -> None:
        """Cancels what is queued, admits what was read to the cache, and unpins. Idempotent."""
        self._prefetcher.cancel(self._owner, wait=True)
        for state in self._groups.values():
            for job in list(state.jobs):
                self._count_waste(state, job)
                self._withdraw(state, job)
        for pages in self._pinned:
            self._tiers.unpin(pages)
        self._pinned.clear()
        for group in list(self._groups):
            self._admit(group)
        for marker, job in self._writes:
            marker.block_until_ready()
            job.release()
        self._writes.clear()
        self._memory.flush()

    def _locate(self, group: int, state: _Group, chunks: np.ndarray) -> np.ndarray:
        """Fills in what is cached (pinned from now on); returns what is not to be had."""
        known = [c for c in chunks.tolist() if c in state.slots or c in state.host]
        unknown = np.setdiff1d(chunks, known) if known else chunks
        pages = self._view.pages(group, unknown)
        device, host = self._tiers.lookup(pages)
        cached = (device >= 0) | (host >= 0)
        if cached.any():
            self._tiers.pin(pages[cached])
            self._pinned.append(pages[cached])
            on_device, on_host = device >= 0, (host >= 0) & (device < 0)
            self._trace.count_bytes("device", int(on_device.sum()) * self._layout.pack_bytes)
            state.slots.update(
                zip(unknown[on_device].tolist(), device[on_device].tolist(), strict=True)
            )
            state.host.update(zip(unknown[on_host].tolist(), host[on_host].tolist(), strict=True))
        missing = unknown[~cached]
        return np.array([c for c in missing.tolist() if c not in state.flying], missing.dtype)

    def _submit(self, group: int, state: _Group, chunks: np.ndarray, *, demand: bool) -> None:
        if not len(chunks):
            return
        jobs = self._prefetcher.submit(
            self._reader,
            group,
            chunks,
            self._layout.pack_shape,
            self._layout.numpy_dtype,
            demand=demand,
            owner=self._owner,
            trace=self._trace,
            pool=self._memory.packs,
            slots=self._slots_for(len(chunks), demand=demand),
        )
        state.jobs.extend(jobs)
        for job in jobs:
            state.flying.update(job.chunks.tolist())

    def _slots_for(self, n: int, *, demand: bool) -> np.ndarray | None:
        """Slots for `n` packs to be read into, where reads can go there and there is room.

        Speculation leaves room for two demands of its own size. Nothing is waited for: without
        slots the arena serves.
        """
        if self._memory.packs is None:
            return None
        spare = n if demand else 3 * n
        self._make_room(spare, wait=False)
        return self._tiers.take(n) if self._tiers.free_slots >= spare else None

    def _stage_host(self, state: _Group, chunks: list[int]) -> None:
        if not chunks:
            return
        slots = self._room(len(chunks))
        host_slots = np.fromiter((state.host[c] for c in chunks), np.int32, len(chunks))
        start = time.perf_counter_ns()
        moved = self._memory.stage(host_slots, slots)
        self._trace.add("stage", "stage", start, time.perf_counter_ns(), bytes=moved)
        self._trace.count_bytes("host", moved)
        self._own(state, chunks, slots)

    def _take_job(self, state: _Group, job: ReadJob, needed: set[int], stage: str) -> list[int]:
        """Writes a job's needed packs into slots; returns the chunks that could not be read."""
        start = time.perf_counter_ns()
        result = job.result()
        end = time.perf_counter_ns()
        self._trace.add(stage, "host", start, end, chunks=len(job.chunks))
        chunks = job.chunks.tolist()
        good = [i for i, c in enumerate(chunks) if c in needed and result.ok[i]]
        failed = [c for i, c in enumerate(chunks) if c in needed and not result.ok[i]]
        needed.difference_update(chunks)
        if good:
            mine = [chunks[i] for i in good]
            if job.slots is None:
                self._own(state, mine, self._write(job, result.padded, good))
            else:
                self._own(state, mine, job.slots[good])
                job.slots[good] = -1
        return failed

    def _write(self, job: ReadJob, padded: np.ndarray, good: list[int]) -> np.ndarray:
        """Copies rows of a read buffer to slots of their own."""
        slots = self._room(len(good))
        where = np.full(len(padded), -1, np.int32)
        where[good] = slots
        start = time.perf_counter_ns()
        marker = self._memory.write(padded, where)
        self._trace.add("stage", "stage", start, time.perf_counter_ns(), packs=len(good))
        if marker is not None:
            self._writes.append((marker, job))
        return slots

    def _replace(self, group: int, state: _Group, chunks: list[int]) -> None:
        """Recomputed packs in place of those that the store could not give."""
        self._trace.count("recomputed_packs", len(chunks))
        rows = self._recompute(group, np.array(chunks, np.int64))
        slots = self._room(len(chunks))
        for row, slot in zip(rows, slots, strict=True):
            marker = self._memory.write(row[None], slot[None])
            if marker is not None:
                marker.block_until_ready()
        self._own(state, chunks, slots)

    def _own(self, state: _Group, chunks: list[int], slots: np.ndarray) -> None:
        state.slots.update(zip(chunks, slots.tolist(), strict=True))
        state.fresh.extend(chunks)
        state.used.update(chunks)

    def _room(self, n: int) -> np.ndarray:
        """`n` device slots, if need be at the expense of reads that are not needed yet."""
        self._reap()
        self._make_room(n, wait=True)
        for group in sorted(self._groups, reverse=True):
            if self._tiers.free_slots >= n:
                break
            self._read_elsewhere(group, self._groups[group])
        return self._tiers.take(n)

    def _make_room(self, n: int, *, wait: bool) -> None:
        """Gives back groups that have been attended to, until `n` slots are free or none is left.

        Calls still running may read a slot that a thread fills; with `wait` they are waited for,
        else their groups stay. Writes that XLA makes come after them anyway.
        """
        self._memory.reclaim()
        while self._tiers.free_slots < n and self._done:
            group, after = self._done[0]
            if self._memory.packs is not None and not after.is_ready():  # type: ignore[attr-defined]
                if not wait:
                    return
                after.block_until_ready()
            del self._done[0]
            self._admit(group)

    def _read_elsewhere(self, group: int, state: _Group) -> None:
        """Frees the slots of a group's reads: speculation is dropped, demands use the arena."""
        for job in list(state.jobs):
            if job.slots is None or (job.slots < 0).any():
                continue  # in the arena, or collected already
            self._withdraw(state, job)
            if job.demanded:
                again = self._prefetcher.submit(
                    self._reader, group, job.chunks, self._layout.pack_shape,
                    self._layout.numpy_dtype, demand=True, owner=self._owner, trace=self._trace,
                )  # fmt: skip
                state.jobs.extend(again)
                state.flying.update(job.chunks.tolist())

    def _admit(self, group: int) -> None:
        state = self._groups[group]
        self._give_back(group, state, state.fresh)
        state.fresh.clear()
        state.slots.clear()

    def _give_back(self, group: int, state: _Group, fresh: list[int]) -> None:
        """Lets the cache decide about slots that this request took."""
        if fresh:
            chunks = np.array(fresh, np.int64)
            slots = np.fromiter((state.slots[c] for c in fresh), np.int32, len(chunks))
            moves = self._tiers.admit(self._view.pages(group, chunks), slots)
            self._memory.apply(moves)

    def _reap(self) -> None:
        """Gives back read buffers whose write is done."""
        waiting = []
        for marker, job in self._writes:
            if marker.is_ready():  # type: ignore[attr-defined]
                job.release()
            else:
                waiting.append((marker, job))
        self._writes = waiting

    def _count_waste(self, state: _Group, job: ReadJob) -> None:
        unused = [c for c in job.chunks.tolist() if c not in state.used]
        if unused and job.started():
            self._trace.count_bytes("waste", len(unused) * self._layout.pack_bytes)

    def _withdraw(self, state: _Group, job: ReadJob) -> None:
        """Ends a read, if it has not ended, and gives back what memory of it is not in use."""
        state.jobs.remove(job)
        state.flying.difference_update(job.chunks.tolist())
        if any(job is written for _, written in self._writes):
            return  # `_reap` releases it
        job.release()
        if job.slots is None:
            return
        job.result()  # a running read ends first
        left = job.slots[job.slots >= 0]
        if job.settled is not None and not job.settled():
            self._memory.abandon(left, job.settled)
        else:
            self._tiers.release(left)
        job.slots = left[:0]
