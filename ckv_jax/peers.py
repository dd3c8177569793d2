"""What one process of an engine asks of the others. Alone, there is nobody to ask.

Every process makes the same jitted calls in the same order; that is all that devices of several
processes need to work together. The leader's engine thread decides which calls those are, and
tells the others before it makes them (`tell`). What each process does by itself, reading from the
store above all, may fail or differ: before its outcome decides what is called next, all processes
agree on it (`local`, `least`). A failure that they have not agreed on ends all of them, since the
others wait for calls that this one does not make (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckv_jax.errors import CkvError


@dataclass(slots=True)
class Agreed:
    """What a process found out by itself, and after `local` what holds for all."""

    fits: bool = True


class Peers:
    """The other processes of one engine: here none. Engine thread only."""

    size = 1
    """Processes, this one among them."""

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.size == 1

    def tell(self, command: str, **facts: Any) -> None:
        """The leader says what is computed next; followers have been told."""

    @contextmanager
    def local(self) -> Iterator[Agreed]:
        """Work of each process by itself, without a jitted call over all devices.

        Raises `ProcessFailed` in all of them where it raised in one; `fits` where it does in all.
        """
        yield Agreed()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all processes do, once they have been told.

        Raises `ProcessLost`, and no process goes on, for anything that is raised here alone.
        """
        yield

    def least(self, value: int) -> int:
        """The smallest of what the processes have."""
        return value

    def on_lost(self, call: Callable[[CkvError], None]) -> None:
        """`call` is made, in a thread of its own, once another process is gone for good."""

    def leave(self) -> None:
        """The engine is closed. Idempotent."""


ALONE = Peers()
