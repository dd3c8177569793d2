"""HTTP basics: JSON, errors in the form of OpenAI's API, connection limits, and allowed hosts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckv_jax.errors import (
    Cancelled,
    CheckpointError,
    CkvError,
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
)
from ckv_jax.storage.errors import IndexDamaged, PrefixNotFound, StoreFull

_log = logging.getLogger("ckv_jax.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_WITH_BODY = ("POST", "PUT", "PATCH")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of metrics."""

_FEWEST = 16
_LEFT = 1024  # descriptors that many open segments, and whatever else is open, may need
_MOST_DESCRIPTORS = 1 << 20


# -- JSON and errors -------------------------------------------------------------------------------


def encode(value: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON in one line; surrogates without their partner are written as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def encode_event(value: Mapping[str, Any], *, named: bool) -> bytes:
    """A server-sent event, `named` by its type."""
    name = f"event: {value['type']}\n".encode() if named else b""
    return name + b"data: " + encode(value) + b"\n\n"


class JsonResponse(JSONResponse):
    """A response of one JSON object."""

    def render(self, content: Mapping[str, Any]) -> bytes:
        return encode(content)


class ApiError(Exception):
    """An error that a client receives in place of an answer.

    Args:
        status: of HTTP.
        message: one sentence or two, without anything about other tenants.
        code: the value that programs check.
        param: the field of the request that caused it.
        retry_s: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def event(self, *, named: bool) -> bytes:
        """The error as the last event of a stream, whose events are `named` or not."""
        body = self.body()
        return encode_event({"type": "error", **body} if named else body, named=named)

    def response(self) -> JsonResponse:
        """The error as a whole HTTP response."""
        headers = {}
        if self.retry_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonResponse(self.body(), self.status, headers)


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Error 400: the request cannot be served as it is."""
    return ApiError(400, message, code=code, param=param)


def draining() -> ApiError:
    """Error 503: the server is shutting down."""
    return ApiError(503, "the server is stopping", code="draining", retry_s=5)


def engine_stopped() -> ApiError:
    """Error 503: an error has ended the engine, or it closed before an answer was complete."""
    return ApiError(503, "the engine has stopped: restart the server", code="engine_stopped")


@contextmanager
def client_errors(param: str, expected: str | None = None) -> Iterator[None]:
    """Turns a `ValueError` of the block, which reads field `param`, into error 400 for the client.

    `expected`: the message in place of the error's own, which may repeat a value.
    """
    try:
        yield
    except ValueError as error:
        message = str(error) if expected is None else f"{param}: expected {expected}"
        raise invalid(message, param=param) from error


def as_api_error(error: BaseException) -> ApiError:
    """The error that a client receives for `error`; details of faults go to the log alone.

    Faults of the store and the machine are 503, so that clients try again; bugs are 500.
    """
    match error:
        case ApiError():
            return error
        case HTTPException(status_code=status, detail=detail):
            return ApiError(status, detail, code=_CODES.get(status, "invalid_request"))
        case ContextOverflow():
            return invalid(str(error), param="messages", code="context_length_exceeded")
        case CheckpointError():
            return invalid(str(error))
        case PrefixNotFound():
            return ApiError(404, "no such prefix is stored", code="prefix_not_found")
        case DeadlineExceeded() | Cancelled():
            message = "the time limit passed before there was an answer; try again later"
            return ApiError(503, message, code="deadline_exceeded", retry_s=1)
        case EngineClosed():
            return engine_stopped()
        case StoreFull():
            return ApiError(503, "the store is full", code="store_full", retry_s=60)
        case IndexDamaged():  # its message names segments, perhaps another tenant's
            _log.error("the store's index is damaged", exc_info=error)
            message = "the store's index is damaged; nothing was deleted"
            return ApiError(503, f"{message}; run: ckv verify STORE --repair", code="index_damaged")
        case CkvError():
            _log.warning("the engine or the store failed", exc_info=error)
            message = "the store or the engine cannot serve this now; try again later"
            return ApiError(503, message, code="unavailable", retry_s=5)
        case _:
            _log.error("unexpected error", exc_info=error)
            return ApiError(500, "the server failed at this request", code="internal_error")


def install_error_handlers(app: Starlette) -> None:
    """Gives every error that leaves `app` the form of `ApiError`."""

    async def api(http: Request, error: Exception) -> JsonResponse:
        response = as_api_error(error).response()
        if http.method in _WITH_BODY and not hasattr(http.state, "body_read"):
            response.headers["connection"] = "close"  # the rest of the body is not read
        return response

    for kind in (ApiError, CkvError, HTTPException, Exception):
        app.add_exception_handler(kind, api)


# -- connections -----------------------------------------------------------------------------------


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
    return max(_FEWEST, soft - _LEFT, soft // 2)


class Connections:
    """The connections of one server, of which those that wait for a request are closed first.

    Args:
        most: at once. One more closes another that has never asked anything, or else the one that
            has waited longest, or itself.
        header_s: seconds for the whole header of the next request.
        send_s: seconds in which a client has to read more of an answer that it has not read yet.
    """

    def __init__(self, most: int, header_s: float = 10.0, send_s: float = 60.0) -> None:
        self.most = most
        self.header_s = header_s
        self.send_s = send_s
        self.protocol = partial(Connection, self)
        """For `uvicorn.Config(http=…)`."""
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}  # longest first

    def wait(self, connection: Connection, unread: int = 0) -> None:
        """A connection waits for the header of its next request, from now on, or for its client to
        read more of the `unread` bytes of an answer."""
        self.begun(connection)
        loop, seconds = asyncio.get_running_loop(), self.send_s if unread else self.header_s
        self._waiting[connection] = loop.call_later(seconds, self._late, connection, unread)

    def _late(self, connection: Connection, before: int) -> None:
        unread = connection.transport.get_write_buffer_size()
        if unread < before or (unread and not before):  # the client reads, or may begin to
            self.wait(connection, unread)
        else:
            self.close(connection)

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
        to go, and those that have asked before go after those that never have. Clients that read
        their answers are left alone."""
        if open_now > self.most:
            idle = (one for one in self._waiting if not one.transport.get_write_buffer_size())
            *earlier, newest = idle
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
                message = "this host name is not allowed; start the server with --allowed-host NAME"
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
