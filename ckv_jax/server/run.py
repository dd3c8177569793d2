"""Runs the application: a socket, signals, and an end that waits for answers under way."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ckv_jax.server import log
from ckv_jax.server.service import Service

_LEFT_S = 2  # for what is still open once the drain is over


def bind(host: str, port: int) -> socket.socket:
    """A socket on `host` and `port` (0: any free one) that does not listen yet.

    Raises `ValueError` where it is taken, not allowed, or no address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"{host}:{port} is no address to serve at: {error}") from error
    bound = socket.socket(family, kind, proto)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; --port picks another"
        else:
            message = f"{host}:{port} cannot be served at: {(error.strerror or str(error)).lower()}"
        raise ValueError(message) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where clients find it."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run(app: FastAPI, bound: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; then refuses who comes, and ends when nobody is left.

    A second signal ends it at once. Main thread.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_LEFT_S,
    )
    _Server(config, app.state.service).run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            log.event("serving", url=url_of(bound), model=self._service.config.model)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in the main thread, in which the event loop runs."""
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self._draining = loop.create_task(self._drain(sig))
        else:
            self.should_exit = self.force_exit = True
            loop.call_soon_threadsafe(
                self._service.give_up
            )  # it takes a lock that may be held here

    async def _drain(self, sig: int) -> None:
        log.event("draining", signal=signal.Signals(sig).name, texts=self._service.gate.inside)
        await self._service.drain()
        self.should_exit = True
