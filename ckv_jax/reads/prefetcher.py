"""Reads of packs in worker threads: demanded before speculated, into bounded memory (§4.3.2)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckv_jax.reads.read_buffers import ReadBuffers
from ckv_jax.reads.read_job import PackReader, ReadJob, ReadResult, RequestToken, State
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.trace import Trace

__all__ = ["PrefetchStats", "Prefetcher", "ReadJob", "ReadResult", "RequestToken"]


@dataclass(slots=True, kw_only=True)
class PrefetchStats:
    """What is going on now, and what has happened so far.

    Attributes:
        threads: worker threads alive.
        queued, waiting, running: jobs waiting for a thread, for a buffer, and being read.
        buffer_bytes: of the arena in use.
        overflow_bytes: in use beyond the arena, see `Prefetcher`.
        packs, bad_packs: read, and of those not ok.
        errors: jobs whose reader raised or timed out.
        refused, revoked, promoted, cancelled: jobs, see `Prefetcher`.
    """

    threads: int = 0
    queued: int = 0
    waiting: int = 0
    running: int = 0
    buffer_bytes: int = 0
    overflow_bytes: int = 0
    packs: int = 0
    bad_packs: int = 0
    errors: int = 0
    refused: int = 0
    revoked: int = 0
    promoted: int = 0
    cancelled: int = 0


class Prefetcher:
    """A thread pool over a store's readers. Thread-safe; a context manager.

    Two priorities: a demanded job goes before all speculated ones, and where there are several
    threads one of them never speculates.

    Every job reads into one contiguous block of an arena of `host_bytes`. When the arena is full,
    speculation is refused, and a demand revokes speculation whose rows nobody has taken yet,
    newest first, or else waits until a block is released. A refused or revoked job is done, with
    nothing ok; `promote` makes it a demand that is read (again). Should the caller wait for a
    demand while nothing in flight can make room (it holds all the blocks itself, or the job is
    larger than the arena), the job gets memory of its own: waiting always ends.

    Args:
        threads: worker threads, at least 1.
        host_bytes: size of the arena.
        max_packs_per_job: `submit` cuts longer lists, so that several threads share the work.
            Of 4 to 64, 16 packs of 128 KiB read fastest with 2 threads over NVMe, and the first
            layer group was there soonest.
    """

    def __init__(self, threads: int, host_bytes: int, *, max_packs_per_job: int = 16) -> None:
        if threads < 1 or max_packs_per_job < 1:
            raise ValueError(
                f"got {threads} threads and {max_packs_per_job} packs a job, expected 1 or more"
            )
        self._buffers = ReadBuffers(host_bytes)
        self._max_packs = max_packs_per_job
        self._stats = PrefetchStats()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._news = threading.Condition(self._lock)
        self._demanded: OrderedDict[ReadJob, None] = OrderedDict()
        self._speculated: OrderedDict[ReadJob, None] = OrderedDict()
        self._waiting: OrderedDict[ReadJob, None] = OrderedDict()
        self._running: dict[ReadJob, None] = {}
        self._revocable: dict[ReadJob, None] = {}  # speculation that holds a block, oldest first
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"ckv-read-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def owner(self) -> RequestToken:
        """A token for one request's reads."""
        return RequestToken()

    def submit(
        self,
        reader: PackReader,
        group: int,
        chunk_ids: npt.NDArray[np.integer],
        pack_shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        *,
        demand: bool,
        owner: RequestToken,
        trace: Trace | None = None,
        pool: npt.NDArray[Any] | None = None,
        slots: npt.NDArray[np.int32] | None = None,
    ) -> list[ReadJob]:
        """Asks for packs of one layer group, in equal jobs of up to `max_packs_per_job` chunk ids.

        With `slots` `[n]` they are read into these rows of `pool` and not into the arena: such a
        job never waits for memory and is never revoked. `reader` must stay usable until its jobs
        have ended (see `cancel`). Reads are recorded in `trace` as "pack_read" in lane "ssd".

        Raises:
            ValueError: chunk ids that are not one-dimensional.
            RuntimeError: the prefetcher is closed.
        """
        chunks = np.asarray(chunk_ids, np.int64)
        if chunks.ndim != 1:
            raise ValueError(f"got chunk ids of shape {chunks.shape}, expected one dimension")
        kind = np.dtype(dtype)
        parts = -(-len(chunks) // self._max_packs)
        size = -(-len(chunks) // max(1, parts))
        jobs = [
            ReadJob(
                self,
                reader,
                group,
                chunks[start : start + size],
                tuple(pack_shape),
                kind,
                demanded=demand,
                owner=owner,
                trace=trace,
                pool=pool,
                slots=None if slots is None else slots[start : start + size],
            )
            for start in range(0, len(chunks), max(1, size))
        ]
        with self._lock:
            if self._closed:
                raise RuntimeError("got a read for a prefetcher that is closed")
            for job in jobs:
                owner.jobs[job] = None
                if demand:
                    self._want(job)
                else:
                    self._speculate(job)
        return jobs

    def promote(self, job: ReadJob) -> None:
        """Makes speculation a demand: its turn comes sooner, and nobody revokes it any more."""
        with self._lock:
            if job.demanded or job.state is State.GONE or self._closed:
                return
            job.demanded = True
            self._stats.promoted += 1
            self._revocable.pop(job, None)
            if job.state is State.QUEUED:
                del self._speculated[job]
                self._enqueue(job)
            elif job.state is State.IDLE:
                self._want(job)

    def cancel(self, owner: RequestToken, *, wait: bool = False) -> None:
        """Drops an owner's jobs: queued ones are not read, running ones end and free their block.

        Rows that `ReadJob.result` has handed out stay until `release`. With `wait`, returns once
        none of the owner's jobs is running, so that their reader may be closed.
        """
        with self._lock:
            for job in list(owner.jobs):
                if not job.taken:
                    self._stats.cancelled += job.state is not State.READ
                    self._drop(job)
            while wait and any(job.state is State.RUNNING for job in owner.jobs):
                self._news.wait()

    def release(self, job: ReadJob) -> None:
        """See `ReadJob.release`."""
        with self._lock:
            self._drop(job)

    def wait_for(self, job: ReadJob, timeout: float | None = None) -> ReadResult:
        """See `ReadJob.result`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not job.done():
                if job.state is State.WAITING and not self._room_may_come():
                    self._overflow(job)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"got no packs of group {job.group} in {timeout} s")
                self._news.wait(left)
            read = job.state is State.READ
            if read:
                job.taken = True
                self._revocable.pop(job, None)
            return ReadResult(
                ok=job.ok if read else np.zeros(len(job.chunks), np.bool_),
                rows=job.view(),
                padded=job.padded(),
                bytes=job.read_bytes if read else 0,
                t0_ns=job.t0_ns,
                t1_ns=job.t1_ns,
                error=job.error,
            )

    @property
    def stats(self) -> PrefetchStats:
        """A snapshot."""
        with self._lock:
            return replace(
                self._stats,
                threads=sum(thread.is_alive() for thread in self._threads),
                queued=len(self._demanded) + len(self._speculated),
                waiting=len(self._waiting),
                running=len(self._running),
                buffer_bytes=self._buffers.used,
                overflow_bytes=self._buffers.overflow_bytes,
            )

    def close(self) -> None:
        """Drops what is queued, lets running reads end, joins the threads. Idempotent."""
        with self._lock:
            self._closed = True
            for job in [*self._demanded, *self._speculated, *self._waiting]:
                self._drop(job)
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    # From here on, the lock is held, but for `_run` and `_read`.

    def _speculate(self, job: ReadJob) -> None:
        if job.slots is not None:
            self._enqueue(job)
        elif self._waiting or not self._buffers.place(job):
            self._stats.refused += 1
        else:
            self._revocable[job] = None
            self._enqueue(job)

    def _want(self, job: ReadJob) -> None:
        if job.slots is not None:
            self._enqueue(job)
            return
        job.state = State.WAITING
        self._waiting[job] = None
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Gives room to waiting demands, in order, revoking speculation if need be."""
        while self._waiting:
            job = next(iter(self._waiting))
            while not self._buffers.place(job):
                if not self._revoke_one():
                    return
            del self._waiting[job]
            self._enqueue(job)

    def _revoke_one(self) -> bool:
        """Takes the newest speculation's block: one not yet read if there is any."""
        idle = [job for job in self._revocable if job.state is not State.RUNNING]
        if not idle:
            return False
        queued = [job for job in idle if job.state is State.QUEUED]
        job = (queued or idle)[-1]
        self._stats.revoked += 1
        self._speculated.pop(job, None)
        self._free(job)
        job.state = State.IDLE
        return True

    def _room_may_come(self) -> bool:
        """Whether a running read will leave a block that a waiting demand could have."""
        return any(job.dropped or job in self._revocable for job in self._running)

    def _overflow(self, job: ReadJob) -> None:
        self._buffers.overflow(job)
        del self._waiting[job]
        self._enqueue(job)

    def _enqueue(self, job: ReadJob) -> None:
        job.state = State.QUEUED
        (self._demanded if job.demanded else self._speculated)[job] = None
        self._work.notify()

    def _drop(self, job: ReadJob) -> None:
        """Frees a job now, or as soon as its read ends."""
        if job.state is State.RUNNING:
            job.dropped = True
            return
        for queue in (self._demanded, self._speculated, self._waiting):
            queue.pop(job, None)
        job.state = State.GONE
        job.owner.jobs.pop(job, None)
        self._free(job)
        self._serve_waiting()
        self._news.notify_all()

    def _free(self, job: ReadJob) -> None:
        self._revocable.pop(job, None)
        self._buffers.free(job)

    def _next(self) -> ReadJob | None:
        if self._demanded:
            return self._demanded.popitem(last=False)[0]
        speculating = sum(not job.demanded for job in self._running)
        if self._speculated and speculating < max(1, len(self._threads) - 1):
            return self._speculated.popitem(last=False)[0]
        return None

    def _run(self) -> None:
        while True:
            with self._lock:
                while (job := self._next()) is None:
                    if self._closed:
                        return
                    self._work.wait()
                job.state = State.RUNNING
                job.t0_ns = time.perf_counter_ns()
                self._running[job] = None
            self._read(job)
            with self._lock:
                del self._running[job]
                job.state = State.READ
                self._stats.packs += len(job.chunks)
                self._stats.bad_packs += int((~job.ok).sum())
                self._stats.errors += job.error is not None
                if job.dropped:
                    self._drop(job)
                self._serve_waiting()
                self._news.notify_all()
                self._work.notify()

    def _read(self, job: ReadJob) -> None:
        rows = job.view()
        try:
            if job.slots is None:
                ok = job.reader.read_packs(job.group, job.chunks, rows)
            else:
                assert job.pool is not None
                ok = job.reader.read_packs(job.group, job.chunks, job.pool, rows=job.slots)
            job.ok = np.asarray(ok, np.bool_)
        except Exception as error:  # a thread has no caller: the request sees a miss
            job.ok = np.zeros(len(job.chunks), np.bool_)
            job.error = f"{type(error).__name__}: {error}"
            if isinstance(error, ReadTimeout):
                job.settled = error.settled
            elif job.slots is None:
                rows.view(np.uint8)[...] = 0
        job.t1_ns = time.perf_counter_ns()
        if job.trace is not None:
            size = job.read_bytes if job.error is None else 0
            args = {"group": job.group, "packs": len(job.chunks), "demanded": job.demanded}
            job.trace.add("pack_read", "ssd", job.t0_ns, job.t1_ns, bytes=size, **args)
            job.trace.count_bytes("ssd", size)
