"""Prefetcher: reads packs in worker threads, demanded before early before speculative (§4.3.2)."""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckv_jax.prefix.landing import Room
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.storage.place.disk import may_be_left_behind
from ckv_jax.trace import Trace

_BEGAN = attrgetter("t0_ns")


@dataclass(slots=True)
class PrefetchStats:
    """Packs that were read, those of them that were not ok, and jobs that raised or timed out."""

    packs: int = 0
    bad_packs: int = 0
    errors: int = 0


class Prefetcher:
    """A thread pool over a store's readers. Thread-safe.

    Three priorities: a demanded job goes before one that is read early though it is sure to be
    demanded, and that before all speculated ones; where there are several threads one of them
    never speculates. Jobs bring the room they are read into, so that nothing
    here waits for memory; a job's room is its caller's again once the job has ended.

    Args:
        threads: worker threads, at least 1.
        hang_timeout_s: a read that has run for so long hangs in a system call, past every deadline
            of the reader's: it is given up, and its thread left to the disk.
    """

    def __init__(self, threads: int, *, hang_timeout_s: float = 30.0) -> None:
        self._hang_timeout_s = min(hang_timeout_s, threading.TIMEOUT_MAX)
        self.stats = PrefetchStats()
        self._lock = threading.Lock()
        self._work: SimpleQueue[None] = SimpleQueue()
        """An item for each queued job that a thread may take, and now and then one more."""
        self._demanded: OrderedDict[ReadJob, None] = OrderedDict()
        self._early: OrderedDict[ReadJob, None] = OrderedDict()
        self._speculated: OrderedDict[ReadJob, None] = OrderedDict()
        self._running: dict[ReadJob, None] = {}
        self._most_speculating = max(1, threads - 1)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"ckv-read-{index}", daemon=True)
            for index in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system gives no more threads
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def submit(self, *jobs: ReadJob) -> None:
        """Queues reads. Their reader must stay usable until they have ended (see `drop`).

        Reads are recorded in the jobs' traces, by the jobs' names for them, in lane "ssd". Raises
        `RuntimeError` once the prefetcher is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("got a read for a prefetcher that is closed")
            for job in jobs:
                self._queue_of(job)[job] = None
                self._work.put(None)

    def promote(self, job: ReadJob) -> None:
        """Makes speculation a demand: its turn comes sooner."""
        with self._lock:
            if job.demanded:
                return
            job.demanded = True
            for queue in (self._early, self._speculated):
                if job in queue:
                    del queue[job]
                    self._demanded[job] = None
            if job in self._demanded or self._speculated:  # else no thread has anything to take
                self._work.put(None)

    def wait(self, job: ReadJob) -> None:
        """Returns once the job has ended, by its read's deadline or `hang_timeout_s`."""
        while seconds := self._watch(job):
            if job.unended.acquire(timeout=seconds):
                job.unended.release()

    def _watch(self, job: ReadJob) -> float:
        """Seconds to wait for a job until it is looked at again, or given up here; 0.0: it has
        ended."""
        with self._lock:
            if job.state is State.ENDED:
                return 0.0
            # A queued job waits for the threads: when all of them hang, none will read it.
            watched = [job] if job.state is State.RUNNING else list(self._running)
            now = time.perf_counter_ns()
            began = max(map(_BEGAN, watched), default=now)
            left = self._hang_timeout_s - (now - began) * 1e-9
            if left > 0 or (job.state is State.QUEUED and len(watched) < len(self._threads)):
                return max(left, 0.01)
            self._queue_of(job).pop(job, None)
            job.left = job.state is State.RUNNING
            job.settled = job.has_settled if job.left else None
            self.stats.errors += 1
            self._end(job)
            return 0.0

    def drop(self, job: ReadJob) -> None:
        """Ends a job that is not wanted: not read if it is still queued, else once it has been."""
        with self._lock:
            if job.state is State.QUEUED:
                del self._queue_of(job)[job]
                self._end(job)
        self.wait(job)

    @property
    def idle(self) -> bool:
        """Whether no read is queued or in progress."""
        with self._lock:
            return not (self._demanded or self._early or self._speculated or self._running)

    def close(self) -> None:
        """Drops what is queued, lets running reads end, joins the threads. Idempotent."""
        with self._lock:
            self._closed = True
            for queue in (self._demanded, self._early, self._speculated):
                for job in queue:
                    self._end(job)
                queue.clear()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(self._hang_timeout_s)

    # From here on, the lock is held, except in `_run` and `_read`.

    def _queue_of(self, job: ReadJob) -> OrderedDict[ReadJob, None]:
        if job.demanded:
            return self._demanded
        return self._early if job.early else self._speculated

    def _end(self, job: ReadJob) -> None:
        job.state = State.ENDED
        job.unended.release()

    def _next(self) -> ReadJob | None:
        for queue in (self._demanded, self._early):
            if queue:
                return queue.popitem(last=False)[0]
        if self._speculated:
            speculating = [job for job in self._running if not job.demanded and not job.early]
            if len(speculating) < self._most_speculating:
                return self._speculated.popitem(last=False)[0]
        return None

    def _run(self) -> None:
        may_be_left_behind()
        while True:
            job = ok = settled = None  # what was read last is not kept meanwhile
            self._work.get()
            with self._lock:
                if self._closed:
                    return
                job = self._next()
                if job is None:  # dropped, or speculation that has to wait
                    continue
                job.state = State.RUNNING
                job.t0_ns = time.perf_counter_ns()
                self._running[job] = None
            ok, failed, settled = self._read(job)
            with self._lock:
                del self._running[job]
                if self._speculated:  # of which there may be one more in progress now
                    self._work.put(None)
                if job.left:  # its caller has gone on without it
                    job.late, job.left = settled, False
                    continue
                job.ok, job.settled = ok, settled
                self.stats.packs += ok.size
                self.stats.bad_packs += ok.size - int(np.add.reduce(ok))
                self.stats.errors += failed
                self._end(job)

    def _read(self, job: ReadJob) -> tuple[npt.NDArray[np.bool_], bool, Callable[[], bool] | None]:
        """(ok, whether the reader failed as a whole, settled) of a job, see `ReadJob`."""
        ok, failed, settled = job.ok, False, None
        try:
            ok = job.reader.read_packs(job.group, job.chunks, job.room.array, rows=job.room.rows)
        except Exception as error:  # a thread has no caller: the request sees a miss
            failed = True
            if isinstance(error, ReadTimeout):
                settled = error.settled
        end_ns = time.perf_counter_ns()
        size = 0 if failed else job.num_bytes
        args = {"group": job.first_group, "packs": ok.size, "demanded": job.demanded}
        job.trace.add(job.span, "ssd", job.t0_ns, end_ns, bytes=size, **args)
        job.trace.count_bytes("ssd", size, prefix=job.prefix)
        return ok, failed, settled


class PackReader(Protocol):
    """The part of `storage.PrefixReader` that the prefetcher uses."""

    def read_packs(
        self,
        group: int | npt.NDArray[np.int64],
        chunks: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        *,
        rows: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Fills `rows` of `out`, or all of it; bool [n], False for packs that could not be read."""


class State(enum.Enum):
    """State of a job."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()  # read, well or badly, or never to be read


@dataclass(slots=True, kw_only=True, eq=False)
class ReadJob:
    """A read of packs of one prefix. Its fields change under the prefetcher's lock."""

    reader: PackReader
    group: int | npt.NDArray[np.int64]
    """Layer group of all packs, or of each, int64 `[n]`."""
    first_group: int
    """The first of the layer groups."""
    chunks: npt.NDArray[np.int64]
    """int64 `[n]`, chunk ids, in the order of `room.rows`."""
    room: Room
    demanded: bool
    """False while no caller waits for it."""
    early: bool = False
    """It will be demanded in any case: no speculation, only early."""
    trace: Trace
    prefix: str
    """Id of the prefix."""
    span: str
    """What the trace calls it."""
    num_bytes: int
    """Bytes that it asks the store for."""
    codes: npt.NDArray[np.int64]
    """What the caller calls the packs, int64 `[n]`."""
    state: State = State.QUEUED
    ok: npt.NDArray[np.bool_] = field(init=False)
    """bool `[n]`, False where the pack could not be had; meaningful once ended."""
    settled: Callable[[], bool] | None = None
    """Of a read that was given up and may still write: whether it has ended."""
    t0_ns: int = 0
    """Start of the read, `time.perf_counter_ns`; 0 if it never started."""
    left: bool = False
    """Its thread hangs in a system call, and no caller waits for it any more."""
    late: Callable[[], bool] | None = None
    """`settled` of the read that its thread gave up then, if any."""
    unended: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Locked until the job has ended."""

    def __post_init__(self) -> None:
        self.ok = np.zeros(len(self.chunks), np.bool_)
        self.unended.acquire()

    def has_settled(self) -> bool:
        """Whether nothing writes into its room any more, once its caller has gone on."""
        return not self.left and (self.late is None or self.late())
