"""HTTP as OpenAI's clients know it: bodies read within limits, JSON, and errors of one form."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckv_jax.errors import (
    Cancelled,
    CheckpointError,
    CkvError,
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
)
from ckv_jax.storage.errors import PrefixNotFound, StoreFull

_log = logging.getLogger("ckv_jax.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_KEY_SIZE = 4096  # characters, or token ids, that a prefix key is made of


# -- JSON and errors -------------------------------------------------------------------------------


def encode(value: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON in one line; surrogates without their partner are written as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(Response):
    """A response of one JSON object."""

    media_type = "application/json"

    def __init__(
        self,
        value: Mapping[str, Any],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(encode(value), status_code=status, headers=headers)


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

    def response(self) -> JsonResponse:
        """The error as a whole HTTP response."""
        headers = {}
        if self.retry_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonResponse(self.body(), status=self.status, headers=headers)


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Error 400: the request cannot be served as it is."""
    return ApiError(400, message, code=code, param=param)


def draining() -> ApiError:
    """Error 503: the server is shutting down."""
    return ApiError(503, "the server is stopping", code="draining", retry_s=5)


@contextmanager
def client_errors() -> Iterator[None]:
    """Turns a `ValueError` of the block, which reads a request, into error 400 for the client."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error)) from error


def as_api_error(error: BaseException) -> ApiError:
    """The error that a client receives for `error`; details of faults go to the log alone.

    Faults of the store and the machine are 503, so that clients try again; bugs are 500.
    """
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return invalid(str(error), param="messages", code="context_length_exceeded")
        case CheckpointError():
            return invalid(str(error))
        case PrefixNotFound():
            return ApiError(404, "no such prefix is stored", code="prefix_not_found")
        case DeadlineExceeded() | Cancelled():
            message = "the time for an answer was over before there was one"
            return ApiError(503, message, code="deadline_exceeded", retry_s=1)
        case EngineClosed():
            return draining()
        case StoreFull():
            return ApiError(503, "the store has no room", code="store_full", retry_s=60)
        case CkvError():
            _log.warning("fault below the server", exc_info=error)
            message = "the store or the engine cannot serve this just now"
            return ApiError(503, message, code="unavailable", retry_s=5)
        case _:
            _log.error("unforeseen", exc_info=error)
            return ApiError(500, "the server failed at this request", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error that leaves `app` the form of `ApiError`."""

    async def api(_: Request, error: Exception) -> JsonResponse:
        return as_api_error(error).response()

    async def http(_: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code, "invalid_request")
        return ApiError(error.status_code, error.detail, code=code).response()

    async def validation(_: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error).response()

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(CkvError, api)
    app.add_exception_handler(Exception, api)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first field that is wrong; its value is not repeated."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")[:200]
    kind = str(first["type"])
    if kind == "json_invalid":
        return invalid(f"the body is no valid JSON: {first['ctx']['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        message = f"this server knows no field {where!r}"
        return invalid(message, param=where, code="unknown_parameter")
    if kind == "missing":
        return invalid(f"{where or 'a JSON body'} is missing", param=where, code="missing")
    if kind == "value_error":
        return invalid(f"{where}: {first['ctx']['error']}", param=where)
    return invalid(f"{where or 'body'}: {first['msg']}", param=where or None)


# -- bodies of requests ----------------------------------------------------------------------------


def limit_body(app: ASGIApp, *, max_bytes: int, seconds: float) -> ASGIApp:
    """ASGI middleware that reads each body before `app` does, as `read_body`."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, max_bytes=max_bytes, seconds=seconds)
        except ApiError as error:
            response = error.response()
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        if body is None:
            return  # the client has disconnected
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await app(scope, replay, send)

    return limited


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, seconds: float
) -> bytes | None:
    """The whole body of a request; None if the client disconnects before its end.

    Raises `ApiError` 413 for more than `max_bytes`, 408 if it is not there after `seconds`.
    """
    large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        late = f"the body was not there within {seconds:g} s"
        raise ApiError(408, late, code="request_timeout") from None


def prefix_key(body: bytes) -> str:
    """A hexadecimal digest of the start of a request's prompt, by which replicas are chosen.

    Of a chat, or of a prefix stored for chats, it covers the first message alone; of other
    prompts, the start of the first one. A body that is not valid has a key, too: a replica reports
    what is wrong with it.
    """
    text = ""
    try:
        values = json.loads(body)
        for name in ("messages", "prompt", "text", "tokens"):
            if name in values:
                text = _first_text(values[name])
                break
    except (ValueError, TypeError, RecursionError):
        pass
    return hashlib.sha256(text[:_KEY_SIZE].encode("utf-8", "surrogatepass")).hexdigest()


def _first_text(value: Any) -> str:
    """The first text in messages, parts of a message, prompts, or token ids."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return ",".join(map(str, value[:_KEY_SIZE]))
    if isinstance(value, list):
        return _first_text(value[0]) if value else ""
    if isinstance(value, dict):
        return _first_text(value.get("content", value.get("text", "")))
    return value if isinstance(value, str) else ""
