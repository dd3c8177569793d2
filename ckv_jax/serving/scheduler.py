"""The scheduler: a request queue, and the engine thread's loop over batches, tokens and jobs.

Each round the engine thread computes the first tokens of one batch, one token for every running
sequence, and one block of one long job, so that none of them makes another wait for longer. First
come, first served: a batch begins with the request that has waited longest and takes along later
ones while there is room; jobs take turns.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Several
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from ckv_jax.errors import CkvError, EngineClosed
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.serving.jobs import Job, sequence_job
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import StoreError

_T = TypeVar("_T")

QUIET_S = 0.25
"""Background jobs advance once the engine has had nothing else to do for so long: not between two
requests of one program."""
SWEEP_S = 0.02
"""Seconds between searches for cancelled and late requests among those that wait."""


class Scheduler:
    """Owns the engine thread, from the first piece of work to `close`. Thread-safe.

    Args:
        max_batch: sequences in one batch at most.
        max_bytes: device bytes of jobs in progress; one that needs more runs when no other does.
    """

    def __init__(self, worker: Worker, *, max_batch: int, max_bytes: int) -> None:
        self._worker = worker
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._parked: list[Sequence] = []
        """Those that wait for a recovery before they are queued again."""
        self._jobs: deque[Job] = deque()
        self._begun: list[Job] = []
        self._next_sweep = self._quiet_at = time.monotonic()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def submit(self, sequences: Several[Sequence]) -> None:
        """Queues placed sequences, all at once and in order, without those that have failed.

        Raises `EngineClosed`.
        """
        sequences = [sequence for sequence in sequences if not sequence.done()]
        with self._changed:
            self._open()
            self._waiting.extend(sequences)
            self._changed.notify()

    def add(self, job: Job) -> Job:
        """Queues a job. Raises `EngineClosed`."""
        with self._changed:
            self._open()
            self._jobs.append(job)
            self._changed.notify()
        return job

    def call(self, call: Callable[[], _T]) -> _T:
        """The result of a short call that has to be made in the engine thread."""

        def steps() -> Generator[None, None, _T]:
            return call()
            yield

        result: _T = self.add(Job(steps())).future.result()
        return result

    def wake(self) -> None:
        """Something that the engine thread may wait for has happened."""
        with self._changed:
            self._changed.notify()

    @property
    def closed(self) -> bool:
        """Whether it takes no more work."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences between two of their tokens."""
        return self._worker.running

    @property
    def jobs(self) -> int:
        """Jobs queued or in progress."""
        return len(self._jobs)

    def close(self) -> bool:
        """Ends what is being computed; all others fail as `EngineClosed`. Idempotent.

        Returns whether the thread has ended, so that nothing uses the engine's memory any more. It
        has not in a process that was forked, and for a caller that it runs itself.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        forked = os.getpid() != self._process
        if not forked and thread is not None and thread is not threading.current_thread():
            thread.join()
        return not forked and (thread is None or not thread.is_alive())

    def _open(self) -> None:
        """Starts the thread; raises `EngineClosed` where it would do no work any more."""
        if os.getpid() != self._process:
            raise EngineClosed("the engine belongs to the process that this one was forked from")
        if self._closed:
            raise EngineClosed("the engine is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckv-engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._round():
                pass
        finally:  # no caller may wait for ever, whatever happened
            self._end()

    def _round(self) -> bool:
        with self._changed:
            while True:
                if self._closed:
                    return False
                lapsed = self._drop_lapsed()
                batch = self._admit()
                busy = bool(batch or self._waiting or self._worker.running)
                job = self._next_job(busy)
                if lapsed is not None or batch or job or self._worker.running:
                    break
                self._changed.wait(self._pause_s())
        for sequence in lapsed or ():
            sequence.fail_if_lapsed()
        batch = [sequence for sequence in batch if not sequence.fail_if_lapsed()]
        if batch:
            self._first_tokens(batch)
        if self._worker.decoding:
            self._add_front(self._worker.step())
        if job is not None:
            busy |= not job.background
            job.advance(partial(self._leave, job))
        if busy:
            self._quiet_at = time.monotonic() + QUIET_S
        return True

    def _pause_s(self) -> float | None:
        """Seconds until those that wait, for a turn or a job, are searched, or until a background
        job may advance; None: there is neither."""
        if self._waiting or not all(job.background for job in self._jobs):
            return SWEEP_S
        return max(0.001, self._quiet_at - time.monotonic()) if self._jobs else None

    def _leave(self, job: Job) -> None:
        with self._changed:
            self._jobs.remove(job)
            self._begun.remove(job)

    def _drop_lapsed(self) -> list[Sequence] | None:
        """Takes given-up requests out of the queue, and finds those that wait for a job, soon but
        not between any two tokens; None: not yet."""
        now = time.monotonic()
        if now < self._next_sweep:
            return None
        self._next_sweep = now + SWEEP_S
        begin = [job.sequence for job in self._jobs if job.sequence and job not in self._begun]
        lapsed = [s for s in (*self._waiting, *self._parked, *begin) if s.lapsed() is not None]
        if lapsed:
            gone = {id(sequence) for sequence in lapsed}
            self._waiting = deque(s for s in self._waiting if id(s) not in gone)
        return lapsed

    def _admit(self) -> list[Sequence]:
        """The sequence that has waited longest and others that go with it; empty if none fits.

        Sequences that are jobs of their own go to the jobs from here.
        """
        for sequence in [s for s in self._waiting if self._worker.together(s) is None]:
            self._waiting.remove(sequence)
            try:
                job = self._worker.job_for(sequence)
            except Exception as error:  # of this sequence alone
                job = sequence_job(sequence, _failed(error), 0)
            if job is not None:
                self._jobs.append(job)
        if not self._waiting:
            return []
        busy = sum(job.num_bytes for job in self._begun)
        first = self._waiting[0]
        if (self._worker.decoding or busy) and not self._worker.fits([first], busy):
            return []
        batch = [first]
        key = self._worker.together(first)
        for sequence in list(self._waiting)[1:]:
            if len(batch) == self._max_batch:
                break
            if self._worker.together(sequence) != key:
                continue
            if not self._worker.fits([*batch, sequence], busy):
                break  # later ones must not overtake it
            batch.append(sequence)
        taken = {id(sequence) for sequence in batch}
        self._waiting = deque(s for s in self._waiting if id(s) not in taken)
        return batch

    def _next_job(self, busy: bool) -> Job | None:
        """The job whose turn it is: the one that has not advanced for longest and could. Those in
        the background only where there is no other work."""
        jobs = [job for job in self._jobs if not job.background]
        if not busy and not jobs and time.monotonic() >= self._quiet_at:
            jobs = list(self._jobs)
        for job in jobs:
            if job not in self._begun:
                held = sum(other.num_bytes for other in self._begun)
                if held and held + job.num_bytes > self._max_bytes:
                    continue
            if job.ready():
                if job not in self._begun:
                    self._begun.append(job)
                self._jobs.remove(job)
                self._jobs.append(job)
                return job
        return None

    def _first_tokens(self, batch: list[Sequence]) -> None:
        """What fails together is tried apart: one failing sequence must not fail its batch. What
        the store has lost is looked up again, or computed again by a job that the batch waits for.
        Raises nothing."""
        try:
            self._worker.first_tokens(batch)
        except RecoveryNeeded as needed:
            self._park(batch, needed)
        except PoolExhausted as error:
            if self._worker.decoding:
                self._requeue(batch)
            else:
                self._run_one_by_one(batch, error)
        except (CkvError, ValueError) as error:
            alone = len(batch) == 1 and isinstance(error, StoreError)
            if alone and self._attempt(batch[0]):
                self._requeue(batch)
            else:
                self._run_one_by_one(batch, error)
        except Exception as error:  # the thread has no caller: who waits gets it raised
            for sequence in batch:
                sequence.crash(error)

    def _run_one_by_one(self, batch: list[Sequence], error: CkvError | ValueError) -> None:
        if len(batch) == 1:
            batch[0].fail(error)
            return
        for sequence in batch:
            if sequence.done() or sequence.token_ids:  # its listener has had its first token
                sequence.fail(error)
            else:
                self._first_tokens([sequence])

    def _attempt(self, sequence: Sequence) -> bool:
        try:
            return self._worker.shorten(sequence)
        except Exception as error:  # as in `_first_tokens`
            sequence.end(error)
            return False

    def _park(self, batch: list[Sequence], needed: RecoveryNeeded) -> None:
        """The batch waits for lost KV and is then tried again, before all others. Where that cannot
        be computed, the sequences over its prefix end; all, if it is none of theirs."""
        job, lost = self._worker.recovery(needed), needed.recovered.prefix.id
        for sequence in batch:
            sequence.recovered.append(needed.recovered)
        self._parked += batch

        def again(_: object) -> None:
            self._parked = [one for one in self._parked if one not in batch]
            error = None if job.future.cancelled() else job.future.exception()
            left = list(batch)
            if error is not None:
                for sequence in [one for one in batch if one.prefix.id == lost] or batch:
                    sequence.end(error)
                    left.remove(sequence)
            self._requeue(left)

        job.future.add_done_callback(again)
        self._add_front([job])

    def _add_front(self, jobs: list[Job]) -> None:
        with self._changed:
            for job in jobs:
                if job not in self._jobs and not job.future.done():
                    self._jobs.appendleft(job)

    def _requeue(self, batch: Several[Sequence]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(batch))

    def _end(self) -> None:
        error = EngineClosed("the engine was closed before this request's turn")
        with self._changed:  # first: callers that get an outcome are refused from then on
            self._closed = True
        with ExitStack() as stack:  # an error on the way keeps no caller waiting
            stack.callback(self._fail_waiting, error)
            for job in reversed(self._jobs):
                stack.callback(job.end, error)
            self._worker.end(error)

    def _fail_waiting(self, error: EngineClosed) -> None:
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            self._jobs.clear()
        for sequence in left:
            sequence.fail(error)


def _failed(error: Exception) -> Generator[None, None, None]:
    """Steps of a job that could not be made."""
    raise error
    yield
