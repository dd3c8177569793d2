"""A follower's side: does what the leader says, with its own devices and its own reads."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from ckv_jax.errors import ProcessFailed, ProcessLost
from ckv_jax.processes.channel import Channel, Message
from ckv_jax.processes.several import Several

STUCK_S = 5.0
"""After the leader is gone, until a process that waits in a device call for ever is ended."""


class Following(Several):
    """The leader of this process. Main thread only."""

    def __init__(self, channel: Channel, size: int) -> None:
        self.size = size
        self._channel = channel
        self._came: SimpleQueue[Message | OSError] = SimpleQueue()
        self._later: deque[Message] = deque()
        self._noticed = threading.Event()
        channel.watch(self._came.put, self._gone)

    def commands(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What to do, one after the other, until the leader says that it is over.

        Raises `ProcessLost` where it is gone without saying so.
        """
        while True:
            message = self._later.popleft() if self._later else self._receive()
            if message["do"] == "close":
                return
            yield message["do"], message["with"]

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Peers`: this process ends, which the leader notices."""
        try:
            yield
        except (ProcessFailed, ProcessLost):
            raise  # the leader knows
        except Exception as error:
            raise ProcessLost(f"this process failed: {type(error).__name__}: {error}") from error

    def leave(self) -> None:
        """See `Peers`."""
        self._noticed.set()
        self._channel.close()

    def _round(self, value: int, failure: Exception | None) -> int:
        why = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            self._channel.send({"value": value, "failed": why})
        except OSError as error:
            raise self._lost(error) from error
        while "agreed" not in (message := self._receive()):
            self._later.append(message)  # what is to be done after this
        if message["failed"] is not None:
            raise ProcessFailed(message["failed"]) from failure
        agreed: int = message["agreed"]
        return agreed

    def _receive(self) -> Message:
        message = self._came.get()
        if isinstance(message, OSError):
            raise self._lost(message)
        return message

    def _lost(self, why: OSError) -> ProcessLost:
        self._noticed.set()
        return ProcessLost(f"the leader is gone: {why}")

    def _gone(self, why: OSError) -> None:
        """The main thread notices, unless it waits for devices that wait for others."""
        self._came.put(why)
        if not self._noticed.wait(STUCK_S):
            print(f"ckv: the leader is gone ({why}); this process ends", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
