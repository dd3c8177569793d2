"""Ctrl-C while nothing is under way that would have to be ended in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["leaving_at_once"]


@contextmanager
def leaving_at_once(before: Callable[[], object] = lambda: None) -> Iterator[None]:
    """In this block Ctrl-C ends the process with one line and code 130, after `before()`.

    For imports and loading, which nothing is lost by breaking off: an exception raised inside a
    compiled module as it is imported ends the process with a dump of its stack. Elsewhere than in
    the main thread, and where somebody else handles the signal or ignores it, the block just runs.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(_signal: int, _frame: FrameType | None) -> None:
        before()
        os.write(2, b"ckv: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
