"""In which order the lines of a file are answered: those over one text one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

from ckv_jax.cli.jobs import Job

__all__ = ["STAY", "turns"]

STAY = 8
"""Batches over one text after which the line that has waited longest says which text is next."""


def turns(
    jobs: Sequence[Job], size: int, *, text_of: Callable[[Job], Hashable]
) -> Iterator[list[Job]]:
    """Batches of `size` jobs, the last one perhaps smaller.

    What a batch has read of a text is in memory for the next one over it. No line waits for more
    than `STAY` batches of each text that began before it.
    """
    waiting: dict[Hashable, deque[Job]] = {}
    for job in jobs:
        waiting.setdefault(text_of(job), deque()).append(job)
    order: list[Job] = []
    while waiting:
        text = min(waiting, key=lambda name: waiting[name][0].line)
        queue = waiting[text]
        order += [queue.popleft() for _ in range(min(len(queue), STAY * size))]
        if not queue:
            del waiting[text]
    yield from (order[first : first + size] for first in range(0, len(order), size))
