"""The leader's side: says what is computed next, collects what the others found out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ckv_jax.errors import CkvError, ProcessFailed, ProcessLost
from ckv_jax.processes.channel import Channel, Message
from ckv_jax.processes.several import Several


class Leading(Several):
    """The processes that follow this one. `tell`, `local`, `least`: engine thread only."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.size = 1 + len(channels)
        self._channels = channels
        self._reports: list[SimpleQueue[Message | None]] = [SimpleQueue() for _ in channels]
        self._lock = threading.Lock()
        self._lost: ProcessLost | None = None
        self._on_lost: Callable[[CkvError], None] = lambda error: None
        self._left = [threading.Event() for _ in channels]
        for index, channel in enumerate(channels):
            channel.watch(self._reports[index].put, partial(self._gone, index))

    def on_lost(self, call: Callable[[CkvError], None]) -> None:
        """See `Peers`."""
        with self._lock:
            self._on_lost, lost = call, self._lost
        if lost is not None:
            call(lost)

    def tell(self, command: str, **facts: Any) -> None:
        """See `Peers`. Raises `ProcessLost`."""
        self._send({"do": command, "with": facts})

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Peers`: lets all others go, who would wait for ever."""
        try:
            yield
        except (ProcessFailed, ProcessLost):
            raise  # they know
        except Exception as error:
            why = f"process 0 of {self.size} failed: {type(error).__name__}: {error}"
            lost = self._lose(ProcessLost(why))
            for channel in self._channels:
                channel.close()
            raise lost from error

    def leave(self) -> None:
        """See `Peers`: lets the others go, and waits a little for each."""
        with self._lock:
            over, self._lost = self._lost is not None, self._lost or _over()
        for index, channel in enumerate(self._channels):
            if not over:
                try:
                    channel.send({"do": "close", "with": {}})
                    self._left[index].wait(10.0)
                except OSError:
                    pass  # gone by itself
            channel.close()

    def _round(self, value: int, failure: Exception | None) -> int:
        """The least value of all, once each has sent its own."""
        why = None if failure is None else f"process 0: {type(failure).__name__}: {failure}"
        for index, reports in enumerate(self._reports):
            report = self._next(reports)
            value = min(value, report["value"])
            if why is None and report["failed"] is not None:
                why = f"process {index + 1}: {report['failed']}"
        self._send({"agreed": value, "failed": why})
        if why is not None:
            raise ProcessFailed(why) from failure
        return value

    def _next(self, reports: SimpleQueue[Message | None]) -> Message:
        while True:
            if self._lost is not None:
                raise self._lost
            try:
                report = reports.get(timeout=1.0)
            except Empty:
                continue
            if report is not None:
                return report

    def _send(self, message: Message) -> None:
        if self._lost is not None:
            raise self._lost
        for index, channel in enumerate(self._channels):
            try:
                channel.send(message)
            except OSError as error:
                self._gone(index, error)
                raise self._lost or _over() from error

    def _gone(self, index: int, why: OSError) -> None:
        self._left[index].set()
        self._lose(ProcessLost(f"process {index + 1} of {self.size} is gone: {why}"))

    def _lose(self, error: ProcessLost) -> ProcessLost:
        """Everybody gets `error`, or what came before it."""
        with self._lock:
            if self._lost is not None:
                return self._lost
            self._lost, tell = error, self._on_lost
        for reports in self._reports:
            reports.put(None)
        tell(error)
        return error


def _over() -> ProcessLost:
    return ProcessLost("the engine is closed")
