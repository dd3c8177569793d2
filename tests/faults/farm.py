"""Processes that start in milliseconds, work through states, and are replaced when they hang."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

Work = Callable[[list[Any], Callable[[int, Any], None]], None]
"""Works through states and reports each: (index, None) when it starts, (index, result) after."""


def context() -> ForkServerContext:
    """Processes forked from one that has everything imported, and no threads."""
    # Threads of the linear algebra library would outlive no fork.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.faults.scene"])
    return found


def work(function: Work, states: list[Any], pipe: Connection) -> None:
    """What a process does."""
    function(states, lambda index, result: pipe.send((index, result)))
    pipe.close()


def run(
    function: Work, batches: Iterable[list[Any]], *, jobs: int, timeout_s: float
) -> Iterator[tuple[Any, Any]]:
    """Work through batches of states in `jobs` processes; yields (state, result) as they come.

    The result is "hang" for a state that took longer than `timeout_s`, and "died: STATUS" for one
    that took its process with it; the rest of its batch goes to another process.
    """
    processes = context()
    waiting = [list(batch) for batch in batches][::-1]
    running: dict[Connection, tuple[BaseProcess, list[Any], list[Any]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            batch = waiting.pop()
            ours, theirs = processes.Pipe(duplex=False)
            process = processes.Process(target=work, args=(function, batch, theirs), daemon=False)
            process.start()
            theirs.close()
            running[ours] = (process, batch, [None, time.monotonic(), set()])
        ready = wait(list(running), timeout=0.5)
        for pipe in list(running):
            process, batch, (current, since, done) = running[pipe]
            ended = ""
            if pipe in ready:
                try:
                    index, result = pipe.recv()
                except EOFError:
                    ended = "died: "
                else:
                    running[pipe][2][:2] = index, time.monotonic()
                    if result is not None:
                        done.add(index)
                        yield batch[index], result
                    continue
            elif time.monotonic() - since > timeout_s:
                process.kill()
                ended = "hang"
            if ended:
                process.join()
                pipe.close()
                del running[pipe]
                left = [i for i in range(len(batch)) if i not in done]
                if left:  # the one that was being worked on is to blame
                    blamed = current if current in left else left[0]
                    yield batch[blamed], ended if ended == "hang" else f"died: {process.exitcode}"
                    rest = [batch[i] for i in left if i != blamed]
                    if rest:
                        waiting.append(rest)


def cut(states: list[Any], size: int) -> list[list[Any]]:
    """The states in batches of `size`."""
    return [states[at : at + size] for at in range(0, len(states), size)]
