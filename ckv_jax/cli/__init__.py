"""The command line interface, `ckv`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def main() -> None:
    """Runs `ckv`. Imports `ckv_jax.cli.app.main` late, because its imports take a second."""
    with exit_on_interrupt():
        from ckv_jax.cli.app import main as run
    run()


@contextmanager
def exit_on_interrupt(before: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Makes Ctrl-C in this block end the process with one line and exit code 130, after `before()`.

    Use it around imports and loading, where no work is lost. There, a `KeyboardInterrupt` raised
    inside a compiled module would end the process with a stack dump. The block runs unchanged
    outside the main thread, and where the signal is ignored or has another handler.
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
