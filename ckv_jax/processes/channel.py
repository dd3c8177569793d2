"""Messages between two processes: JSON lines over TCP, and a sign of life every two seconds.

Whoever waits for the other is woken when the connection ends or `SILENT_S` pass without a word.
Before both ends `watch` nobody gives a sign of life: what is waited for then has its own deadline.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BEAT_S = 2.0
SILENT_S = 30.0
"""Without a sign of life, after which a process counts as gone: stopped, or its machine is."""

Message = dict[str, Any]


class Channel:
    """One connection. `send` in any thread; what comes goes to `on_message` in a thread of ours."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()
        self._closed = False

    def wait_until(self, until: float) -> None:
        """How long (monotonic) the other end may be silent, before `watch`."""
        self._socket.settimeout(max(0.01, until - time.monotonic()))

    def send(self, message: Message) -> None:
        """Raises `OSError` where nobody takes it."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def receive(self) -> Message:
        """The next message that is no sign of life.

        Raises `OSError` where the other end is gone or silent, `ValueError` for what is no JSON.
        """
        while True:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("it has closed the connection")
            message: Message = json.loads(line)
            if message:
                return message

    def watch(
        self, on_message: Callable[[Message], None], on_lost: Callable[[OSError], None]
    ) -> None:
        """Starts the two threads; `on_lost` is called once, unless the channel was closed here."""
        self._socket.settimeout(SILENT_S)
        for work in (lambda: self._read(on_message, on_lost), self._beat):
            threading.Thread(target=work, name="ckv-process", daemon=True).start()

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._closed = True
        with suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()  # nobody reads any more: what is shut down ends at once
        self._socket.close()

    def _read(
        self, on_message: Callable[[Message], None], on_lost: Callable[[OSError], None]
    ) -> None:
        try:
            while True:
                on_message(self.receive())
        except Exception as error:  # nobody else reads: whatever it is, the other end is lost
            if not self._closed:
                on_lost(error if isinstance(error, OSError) else _wrong(error))

    def _beat(self) -> None:
        while not self._closed:
            time.sleep(BEAT_S)
            try:
                self.send({})
            except OSError:
                return  # whoever reads finds out


def _wrong(error: Exception) -> ConnectionError:
    return ConnectionError(f"it sent what nobody understands: {type(error).__name__}: {error}")


def address_of(address: str) -> tuple[str, int]:
    """(host, port) of "host:port"; `ValueError` for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 - 1:
        raise ValueError(f"got address {address!r}, expected HOST:PORT such as 10.0.0.1:7700")
    return host, int(port)


def listen(address: str) -> socket.socket:
    """Takes connections at the port after the address's own, which is JAX's."""
    host, port = address_of(address)
    return socket.create_server((host, port + 1))


def accept(listening: socket.socket, until: float) -> Channel:
    """The next connection. Raises `TimeoutError` at `until` (monotonic)."""
    listening.settimeout(max(0.01, until - time.monotonic()))
    connection, _ = listening.accept()
    channel = Channel(connection)
    channel.wait_until(until)
    return channel


def connect(address: str, until: float) -> Channel:
    """A connection to who listens there, or will before `until`. Raises `TimeoutError`."""
    host, port = address_of(address)
    while True:
        try:
            channel = Channel(socket.create_connection((host, port + 1), timeout=5.0))
            channel.wait_until(until)
            return channel
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"nobody leads at {address}: {error}") from error
            time.sleep(0.1)
