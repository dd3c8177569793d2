"""The scheduler: a queue, one thread, and who may be computed together.

First come, first served: every batch begins with the request that has waited longest, and takes
along later ones over the same prefix while a byte budget allows. Between two batches every running
generation gets one token, so neither starves the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ckv_jax.cache.tiers import PoolExhausted
from ckv_jax.errors import CkvError, EngineClosed
from ckv_jax.serving.handle import Handle
from ckv_jax.storage.errors import StoreError

SWEEP_S = 0.02
"""How often the whole queue is searched for requests that were cancelled or are late."""


class Running(Protocol):
    """A batch that goes on after its first tokens."""

    def step(self) -> bool:
        """A little progress; False once all is over."""
        ...

    def close(self) -> None:
        """Gives up what the batch holds. Idempotent."""
        ...


class Runner(Protocol):
    """What computes batches."""

    def together(self, handle: Handle) -> object:
        """Requests with equal keys may share a batch."""
        ...

    def bytes_needed(self, batch: Sequence[Handle]) -> int:
        """Device bytes that a batch holds at once."""
        ...

    def start(self, batch: Sequence[Handle]) -> Running | None:
        """Gives every handle its outcome, or returns what will. A raise leaves all undone."""
        ...

    def shorten(self, handle: Handle) -> bool:
        """Looks up again what a request stands on; False if that changes nothing."""
        ...


class Scheduler:
    """Owns the engine thread, from the first `submit` to `close`. Thread-safe.

    Args:
        runner: is called in the engine thread alone, under `lock`.
        lock: held for one batch or token at a time.
        max_batch: requests in one batch at most.
        max_bytes: of `Runner.bytes_needed`, over all that runs at once. A request that needs more
            than this by itself runs when nothing else does.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        lock: AbstractContextManager[bool, None],
        max_batch: int,
        max_bytes: int,
    ) -> None:
        self._runner = runner
        self._lock = lock
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._running: dict[Running, list[Handle]] = {}
        self._full = False  # nothing new fits until something running ends
        self._next_sweep = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, handles: Sequence[Handle]) -> None:
        """Queues placed handles, all at once and in order. Raises `EngineClosed`."""
        for handle in handles:
            handle.on_cancel(self._notify)
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed")
            self._waiting.extend(handles)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckv-engine", daemon=True)
                self._thread.start()
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Generating batches."""
        return len(self._running)

    def close(self) -> None:
        """Ends the batch or token being computed; all others fail as `EngineClosed`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._loop()
        finally:  # nobody may wait for ever, whatever happened
            self._end()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
                if self._closed:
                    return
                lapsed = self._drop_lapsed()
                batch = self._admit()
            for handle in lapsed:
                _fail_lapsed(handle)
            batch = [handle for handle in batch if not _fail_lapsed(handle)]
            if batch:
                self._start(batch)
            for work in list(self._running):
                self._step(work)

    def _drop_lapsed(self) -> list[Handle]:
        """Takes out of the queue whom nobody waits for, soon but not between any two tokens."""
        now = time.monotonic()
        if now < self._next_sweep:
            return []
        self._next_sweep = now + SWEEP_S
        lapsed = [handle for handle in self._waiting if handle.lapsed() is not None]
        if lapsed:
            gone = {id(handle) for handle in lapsed}
            self._waiting = deque(h for h in self._waiting if id(h) not in gone)
        return lapsed

    def _admit(self) -> list[Handle]:
        """The request that has waited longest and others that go with it; empty if none fits."""
        if not self._waiting or self._full:
            return []
        held = sum(self._runner.bytes_needed(handles) for handles in self._running.values())
        room = self._max_bytes - held
        first = self._waiting[0]
        if self._running and self._runner.bytes_needed([first]) > room:
            return []
        batch = [first]
        key = self._runner.together(first)
        for handle in list(self._waiting)[1:]:
            if len(batch) == self._max_batch:
                break
            if self._runner.together(handle) != key:
                continue
            if self._runner.bytes_needed([*batch, handle]) > room:
                break  # later ones must not overtake it
            batch.append(handle)
        taken = {id(handle) for handle in batch}
        self._waiting = deque(h for h in self._waiting if id(h) not in taken)
        return batch

    def _start(self, batch: list[Handle]) -> None:
        """One failing request must not fail its batch: what fails together is tried one by one."""
        try:
            with self._lock:
                work = self._runner.start(batch)
        except PoolExhausted as error:
            if self._running:
                self._full = True
                self._requeue(batch)
            else:
                self._start_apart(batch, error)
        except StoreError as error:
            kept = [handle for handle in batch if self._attempt(handle)]
            for handle in batch:
                if handle not in kept:
                    handle.fail(error)
            self._requeue(kept)
        except (CkvError, ValueError) as error:
            self._start_apart(batch, error)
        except Exception as error:  # the thread has no caller: who waits gets it raised
            _crash(batch, error)
        else:
            if work is not None:
                self._running[work] = batch
            else:
                _settle(batch)

    def _start_apart(self, batch: list[Handle], error: CkvError | ValueError) -> None:
        if len(batch) == 1:
            batch[0].fail(error)
            return
        for handle in batch:
            if handle.done():
                handle.settle()
            else:
                self._start([handle])

    def _attempt(self, handle: Handle) -> bool:
        try:
            return self._runner.shorten(handle)
        except (CkvError, ValueError) as error:
            handle.fail(error)
            return False

    def _step(self, work: Running) -> None:
        try:
            with self._lock:
                more = work.step()
        except (CkvError, ValueError) as error:
            for handle in self._retire(work):
                handle.fail(error)
        except Exception as error:  # as above
            _crash(self._retire(work), error)
        else:
            if not more:
                self._retire(work)

    def _retire(self, work: Running) -> list[Handle]:
        """Closes a batch; returns the handles that are left without an outcome."""
        batch = self._running.pop(work)
        self._full = False
        try:
            with self._lock:
                work.close()
        except Exception as error:  # as above
            _crash(batch, error)
        _settle([handle for handle in batch if handle.done()])
        return [handle for handle in batch if not handle.done()]

    def _requeue(self, batch: Sequence[Handle]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(batch))

    def _end(self) -> None:
        error = EngineClosed("the engine was closed before this request's turn")
        left = [handle for work in list(self._running) for handle in self._retire(work)]
        with self._changed:
            self._closed = True
            left += self._waiting
            self._waiting.clear()
        for handle in left:
            handle.fail(error)


def _fail_lapsed(handle: Handle) -> bool:
    error = handle.lapsed()
    if error is not None:
        handle.fail(error)
    return error is not None


def _settle(batch: Sequence[Handle]) -> None:
    for handle in batch:
        handle.settle()


def _crash(batch: Sequence[Handle], error: Exception) -> None:
    for handle in batch:
        handle.crash(error)
