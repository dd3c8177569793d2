"""What reads may take: time for one call's reads together, memory for all that are in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ckv_jax.storage.errors import READ_ERRORS, ReadTimeout, StoreUnavailable
from ckv_jax.storage.place.disk_timeout import DiskTimeout, Refused, here
from ckv_jax.storage.place.kernel_queue import KernelRead

T = TypeVar("T")

MAX_IN_FLIGHT = 40 << 20
"""Bytes in flight in one store: what TensorStore may hold beside the callers' buffers."""


class Gate:
    """Lets reads start while the bytes in flight stay within a bound; thread-safe."""

    def __init__(self, max_bytes: int = MAX_IN_FLIGHT) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self.bytes = 0
        """Bytes in flight now."""

    def enter(self, num_bytes: int, timeout: float) -> bool:
        """Wait until `num_bytes` may be read, at the latest when nothing else is; False if late."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: not self.bytes or self.bytes + num_bytes <= self._max_bytes, timeout
            )
            self.bytes += num_bytes if free else 0
            return free

    def leave(self, num_bytes: int) -> None:
        """These bytes have arrived, or never will."""
        with self._changed:
            self.bytes -= num_bytes
            self._changed.notify_all()


class Deadline:
    """The time that the reads of one call may take together; used by one thread.

    A context manager: what leaves it by an error other than ReadTimeout waits until nothing is in
    flight any more, since the caller then takes the buffer as free. Raises ReadTimeout
    instead when time is up.
    """

    def __init__(self, seconds: float, gate: Gate) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._gate = gate
        self._futures: list[Any] = []
        self._starting: list[threading.Event] = []  # set when what starts reads is over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, ReadTimeout):
            for future in self._futures:
                self.wait(future, "waiting for reads after an error")

    def left(self) -> float:
        """Seconds that are left, and a moment more."""
        return max(0.001, self._end - time.monotonic())

    def admit(self, num_bytes: int, what: str) -> None:
        """Wait for the gate; raises ReadTimeout. What is admitted must be given to `watch`."""
        if not self._gate.enter(num_bytes, max(0.0, self._end - time.monotonic())):
            raise self._late(what)

    def start(self, disk_timeout: DiskTimeout, what: str, work: Callable[[], T]) -> T:
        """Run `work`, which starts reads and follows them, as opening a file may take for ever.

        Raises ReadTimeout when time is up; it may still start reads then.
        """
        if here():
            return work()
        over = threading.Event()

        def run() -> T:
            try:
                return work()
            finally:
                over.set()

        self._starting.append(over)
        try:
            return disk_timeout.run(what, run, seconds=self.left())
        except Refused:
            over.set()
            raise self._late(what) from None
        except StoreUnavailable:
            if over.is_set():
                raise
            raise self._late(what) from None

    def watch(self, futures: list[Any], num_bytes: int) -> None:
        """Take reads that were admitted together into the set; None stands for no read."""
        begun = [f for f in futures if f is not None]
        self._futures += begun
        flight = _Flight(self._gate, num_bytes, len(begun))
        for future in begun:
            future.add_done_callback(flight.landed)

    def follow(self, future: Any) -> None:
        """Take a read into the set that holds no memory but its caller's; None: no read."""
        if future is not None:
            self._futures.append(future)

    def wait(self, future: Any, what: str) -> bool:
        """Wait for one read; False when it failed or is None.

        A read that failed has stopped writing into its buffer: TensorStore reports an error only
        when nothing of the read is left in flight.

        Raises:
          ReadTimeout: when time is up. Nothing is cancelled: a cancelled read would report itself
            done while it can still write into the buffer.
        """
        if future is None:
            return False
        try:
            future.result(timeout=max(0.0, self._end - time.monotonic()))
        except TimeoutError:
            raise self._late(what) from None
        except READ_ERRORS:
            return False
        return True

    def wait_some(self, read: KernelRead, what: str) -> np.ndarray:
        """What landed of a direct read that has not ended, see `KernelRead.landed`.

        Raises ReadTimeout when time is up, as `wait` does.
        """
        try:
            landed = read.landed(timeout=self._end - time.monotonic())
        except TimeoutError:
            raise self._late(what) from None
        return np.zeros(0, np.int64) if landed is None else landed

    def _late(self, what: str) -> ReadTimeout:
        futures, starting = self._futures, self._starting

        def settled() -> bool:
            over = all(s.is_set() for s in starting)
            # Asks each: it tells the read that it is late.
            return all([f.done() for f in tuple(futures)]) and over

        settled()
        return ReadTimeout(what, self._seconds, settled)


class _Flight:
    """Reads that share one admission; the last to land gives it back."""

    def __init__(self, gate: Gate, num_bytes: int, reads: int) -> None:
        self._gate = gate
        self._bytes = num_bytes
        self._left = reads
        self._lock = threading.Lock()
        if not reads:
            gate.leave(num_bytes)

    def landed(self, _: Any) -> None:
        """One read is done; called from TensorStore's threads."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._gate.leave(self._bytes)
