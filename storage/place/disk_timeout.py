"""An end to every wait: work on the disk runs on a thread that may be left behind."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ckv_jax.storage.errors import StoreUnavailable

T = TypeVar("T")

_MOST_STUCK = 32  # threads left behind at a disk that does not answer; no more are given to it
_here = threading.local()


def progress() -> None:
    """Say, from within the work, that the disk has answered: the wait begins again."""
    job = getattr(_here, "job", None)
    if job is not None:
        job.steps += 1


def may_be_left_behind() -> None:
    """Say that this thread's waits are ended by another: its work needs no other thread.

    A hand-over to another thread and back costs milliseconds where Python threads compete.
    """
    _here.job = _Job(lambda: None, None)


def here() -> bool:
    """Whether another thread ends this one's waits, so that its work needs no further thread."""
    return getattr(_here, "job", None) is not None


class Refused(StoreUnavailable):
    """The work was not even started: too much before it is stuck, or there is no thread for it."""


class DiskTimeout:
    """Runs work with a limit on the time without progress. Thread-safe.

    A system call on a disk that hangs cannot be broken off. So the work has a thread of its own;
    when it gets no further, its caller is told so and goes on, and the thread stays behind until
    the disk answers.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._stuck = 0
        self._process = os.getpid()

    def run(
        self,
        what: str,
        work: Callable[[], T],
        *,
        seconds: float | None = None,
        late: Callable[[T], object] | None = None,
    ) -> T:
        """The result of `work`, or what it raised; at once where it is part of other such work.

        Args:
          what: what is done, for the error.
          work: any function; calls `progress` where it may take long.
          seconds: without progress; default: those of the constructor.
          late: takes a result that came after the caller had gone.

        Raises:
          StoreUnavailable: no progress in time.
        """
        if here():
            return work()
        limit = self._seconds if seconds is None else seconds
        job = _Job(work, late)
        self._worker().jobs.put(job)
        steps = -1
        try:
            while not job.done.wait(limit):
                if steps == job.steps:
                    break
                steps = job.steps
        finally:
            if job.leave():
                with self._lock:
                    self._stuck += 1
        if not job.done.is_set():
            raise StoreUnavailable(f"{what}: the disk has not answered for {limit:g} s")
        if job.error is not None:
            raise job.error
        found: T = job.result
        return found

    def _worker(self) -> _Worker:
        with self._lock:
            if self._process != os.getpid():  # a fork has none of our threads
                self._process, self._idle, self._stuck = os.getpid(), [], 0
            if self._idle:
                return self._idle.pop()
            if self._stuck >= _MOST_STUCK:
                raise Refused(f"the disk answers none of {self._stuck} requests")
        worker = _Worker(self._back)
        try:
            worker.start()
        except RuntimeError as e:  # the system gives no more threads
            raise Refused(f"no thread to ask the disk on: {e}") from e
        return worker

    def _back(self, worker: _Worker, left: bool) -> None:
        with self._lock:
            self._stuck -= left
            self._idle.append(worker)

    def close(self) -> None:
        """Let idle threads end; new work may still come."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.jobs.put(None)


class _Job:
    """Work that a caller waits for, until it gives up."""

    def __init__(self, work: Callable[[], Any], late: Callable[[Any], object] | None) -> None:
        self._work = work
        self._late = late
        self._lock = threading.Lock()
        self._left = False
        self.done = threading.Event()
        self.steps = 0
        self.result: Any = None
        self.error: BaseException | None = None

    def leave(self) -> bool:
        """Stop waiting; whether the work is still going on."""
        with self._lock:
            self._left = not self.done.is_set()
            return self._left

    def run(self) -> bool:
        """Do the work; whether no caller waited for its end."""
        _here.job = self
        try:
            self.result = self._work()
        except BaseException as e:
            self.error = e
        finally:
            _here.job = None
        with self._lock:
            if not self._left:
                self.done.set()
                return False
        if self.error is None and self._late is not None:
            self._late(self.result)
        return True


class _Worker(threading.Thread):
    """A thread that no exit of the program waits for."""

    def __init__(self, back: Callable[[_Worker, bool], None]) -> None:
        super().__init__(name="ckv-store", daemon=True)
        self._back = back
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            left = job.run()
            del job  # its result is not ours to keep
            self._back(self, left)
