"""Handles: one submitted request each, from the queue to its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from ckv_jax.errors import Cancelled, CkvError, DeadlineExceeded
from ckv_jax.request import Placed, Request, Result
from ckv_jax.serving.generation import Generation, Sampled, TokenEvent
from ckv_jax.trace import Trace

Outcome = Result | Generation


class Handle:
    """A request on its way. `result` waits, `cancel` gives it up; safe in any thread.

    A handle that is `sampled` ends in a `Generation`, one that is not in a `Result`.
    """

    def __init__(
        self,
        request: Request,
        *,
        index: int = 0,
        sampled: Sampled | None = None,
        listener: Callable[[TokenEvent], None] | None = None,
    ) -> None:
        self.request = request
        self.index = index
        """Place in the call that submitted it."""
        self.sampled = sampled
        self.placed: Placed | None = None
        self.started_ns: int | None = None
        self._listener = listener
        self._submitted_ns = time.perf_counter_ns()
        self._future: Future[Outcome] = Future()
        self._future.set_running_or_notify_cancel()  # only `cancel` of ours ends it early
        self._cancelled = False
        self._settled = threading.Event()
        self._wake: Callable[[], None] = lambda: None

    def result(self, timeout: float | None = None) -> Outcome:
        """Waits for the outcome; its `error` says what was wrong with the request.

        Raises `TimeoutError` after `timeout` seconds; anything else that is raised is a fault of
        this library or the machine, not of the request.
        """
        return self._future.result(timeout)

    def settled_result(self) -> Outcome:
        """The same once what the request held (packs, pins, readers) has been given back."""
        outcome = self._future.result()
        self._settled.wait()
        return outcome

    def cancel(self) -> None:
        """Gives the request up: it ends as `Cancelled`, a running generation with what it has.

        Takes effect before the next batch or token; a batch that is being computed is not
        interrupted.
        """
        self._cancelled = True
        self._wake()

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()

    @property
    def future(self) -> Future[Outcome]:
        """For `concurrent.futures.wait`, callbacks and `asyncio.wrap_future`."""
        return self._future

    def on_done(self, call: Callable[[Handle], None]) -> None:
        """Calls `call(self)` once the outcome is there, in the engine thread or at once."""
        self._future.add_done_callback(lambda future: call(self))

    # From here on: for the engine thread and whoever submits.

    @property
    def queued_ms(self) -> float:
        """From submission until its batch began, or until now."""
        until = time.perf_counter_ns() if self.started_ns is None else self.started_ns
        return (until - self._submitted_ns) / 1e6

    def on_cancel(self, wake: Callable[[], None]) -> None:
        """What `cancel` calls, in the caller's thread."""
        self._wake = wake

    def lapsed(self) -> CkvError | None:
        """Why nobody waits for this request any more, if so."""
        if self._cancelled:
            return Cancelled("the request was cancelled")
        deadline = self.request.deadline_s
        if deadline is not None:
            waited = (time.perf_counter_ns() - self._submitted_ns) / 1e9
            if waited > deadline:
                return DeadlineExceeded(f"got no answer within {deadline:g} s")
        return None

    def emit(self, event: TokenEvent) -> None:
        """Hands an event to whoever listens."""
        if self._listener is not None:
            self._listener(event)

    def finish(self, outcome: Outcome) -> None:
        """The outcome is there."""
        self._future.set_result(outcome)

    def fail(self, error: CkvError | ValueError) -> None:
        """The request's own fault: an outcome with an `error`, unless there is one already."""
        if not self.done():
            trace = Trace()
            trace.end()
            kind = Result if self.sampled is None else Generation
            self.finish(
                kind(request=self.request, trace=trace, queued_ms=self.queued_ms, error=error)
            )
        self.settle()

    def crash(self, error: BaseException) -> None:
        """A fault that is not the request's: whoever waits gets it raised."""
        if not self.done():
            self._future.set_exception(error)
        self.settle()

    def settle(self) -> None:
        """The request holds nothing any more."""
        self._settled.set()
