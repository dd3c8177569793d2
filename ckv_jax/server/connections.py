"""Limits on the number of connections and on the time for a header."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckv_jax.server.http import ApiError

HEADER_S = 10.0
"""In which a connection has to send the whole header of its next request."""
_FEWEST = 16
_LEFT = 1024  # descriptors that many open segments, and whatever else is open, may need
_MOST_DESCRIPTORS = 1 << 20


def raise_descriptor_limit() -> int:
    """Lets this process have as many descriptors as it may; returns how many connections leave
    enough of them for the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = _MOST_DESCRIPTORS
    return max(_FEWEST, soft - _LEFT, soft // 2 if soft < 2 * _LEFT else 0)


class Connections:
    """The connections of one server, of which those that wait for a request are closed first.

    Args:
        most: at once. One more closes another that has never asked anything, or else the one that
            has waited longest, or itself.
        header_s: seconds for the header of a request.
    """

    def __init__(self, most: int, header_s: float = HEADER_S) -> None:
        self.most = most
        self.header_s = header_s
        self.protocol = partial(Connection, self)
        """For `uvicorn.Config(http=…)`."""
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}  # longest first

    def wait(self, connection: Connection) -> None:
        """A connection waits for the header of its next request, from now on."""
        self.begun(connection)
        loop = asyncio.get_running_loop()
        self._waiting[connection] = loop.call_later(self.header_s, self.close, connection)

    def begun(self, connection: Connection) -> None:
        """A connection has sent a header, or is gone."""
        if (timer := self._waiting.pop(connection, None)) is not None:
            timer.cancel()

    def close(self, connection: Connection) -> None:
        """Closes a connection at once."""
        self.begun(connection)
        connection.transport.abort()

    def make_room(self, open_now: int) -> None:
        """Closes one that waits where there are more connections than may be: the newest is last
        to go, and those that have asked before go after those that never have."""
        if open_now > self.most and self._waiting:
            *earlier, newest = self._waiting
            unused = (one for one in earlier if not one.asked)
            self.close(next(unused, earlier[0] if earlier else newest))


class Connection(H11Protocol):
    """One connection of uvicorn's, within the limits of `Connections`."""

    def __init__(self, limits: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self.asked = False
        """Whether it has had an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits.wait(self)
        self._limits.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.begun(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self._limits.begun(self)

    def on_response_complete(self) -> None:
        self.asked = True
        self._limits.wait(self)
        super().on_response_complete()


# -- hosts -----------------------------------------------------------------------------------------


def check_host(app: ASGIApp, *, allowed: tuple[str, ...]) -> ASGIApp:
    """ASGI middleware that refuses requests for hosts by names that are not this machine's.

    A page of a stranger's, whose name is made to lead to this machine, could read answers. Names
    without a dot, addresses, this machine's name, and those in `allowed` (".name": all below it,
    too) are taken.
    """
    own = {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            if not is_allowed(host, own, allowed):
                message = "the host of this request is not served here; --allowed-host names it"
                error = ApiError(403, message, code="host_not_allowed")
                await error.response()(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def is_allowed(host: str, own: set[str], allowed: tuple[str, ...]) -> bool:
    """Whether a `Host` header may be answered without a key."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").removesuffix(".")
    if "." not in name and ":" not in name:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    if name in own or name.endswith(".localhost"):
        return True
    return any(
        name == one.lower().removeprefix(".")
        or (one.startswith(".") and name.endswith(one.lower()))
        for one in allowed
    )
