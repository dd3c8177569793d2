"""Long work for the engine thread, done a block at a time between tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


class Job:
    """A prefill, an ingest, a recovery, a warm-up: a generator, one block of work a `yield`.

    What the generator returns is the result of `future`, what it raises its exception.

    Args:
        num_bytes: device bytes that it holds while it is under way.
        ready: whether it could go on now; if not, what it waits for wakes the scheduler.
        background: it advances only while the engine has nothing else to do.
    """

    def __init__(
        self,
        steps: Generator[None, None, Any],
        *,
        num_bytes: int = 0,
        ready: Callable[[], bool] = lambda: True,
        background: bool = False,
    ) -> None:
        self.num_bytes = num_bytes
        self.background = background
        self._ready = ready
        self.future: Future[Any] = Future()
        self._steps = steps
        self._cancelled = False

    def cancel(self) -> None:
        """Nobody waits for it any more: it ends before its next block. Any thread."""
        self._cancelled = True

    def ready(self) -> bool:
        """Whether `advance` could do something now."""
        return self._cancelled or self._ready()

    def advance(self, leave: Callable[[], None] = lambda: None) -> bool:
        """One block, in the engine thread; False once nothing is left to do.

        `leave` is called then, before anybody is told: who is told finds the job gone.
        """
        if self._cancelled:
            self._steps.close()  # may raise: whoever ends all that is left finds it there
            leave()
            self.end(None)
            return False
        try:
            next(self._steps)
        except StopIteration as end:
            leave()
            with suppress(InvalidStateError):
                self.future.set_result(end.value)
            return False
        except Exception as error:  # raised in the thread that waits for the job
            leave()
            self.fail(error)
            return False
        return True

    def end(self, error: BaseException | None) -> None:
        """Ends it early: with `error`, or as cancelled."""
        self._steps.close()
        if error is not None:
            self.fail(error)
        elif self.future.cancel():  # unless there is an outcome
            self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Whoever waits for it gets `error`, unless there is an outcome."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)
