"""Errors as OpenAI's clients know them: a status, a type, a code, a message."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ckv_jax.errors import (
    Cancelled,
    CheckpointError,
    CkvError,
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
)
from ckv_jax.server.json_answer import JsonAnswer
from ckv_jax.storage.errors import PrefixNotFound, StoreFull

_log = logging.getLogger("ckv_jax.server")

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: one sentence or two; it says nothing of other tenants.
        code: what programs look at.
        param: the field of the request that is to blame.
        retry_s: seconds after which it may be worth another try.
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
        """The JSON object that says so."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _KINDS.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def answer(self) -> JsonAnswer:
        """The whole HTTP response."""
        headers = {}
        if self.retry_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonAnswer(self.body(), status=self.status, headers=headers)


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, code=code, param=param)


@contextmanager
def what_clients_sent() -> Iterator[None]:
    """Around what reads a request: a `ValueError` in it is the client's fault, and told to it."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error)) from error


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of a fault below the server; the log has the rest.

    Faults of the store's or the machine's are 503, so that clients try again; what nobody foresaw
    is 500.
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


def draining() -> ApiError:
    """The server has been told to stop."""
    return ApiError(503, "the server is stopping", code="draining", retry_s=5)


def install_error_handlers(app: FastAPI) -> None:
    """Every error that leaves `app` has the one shape."""

    async def api(_: Request, error: Exception) -> JsonAnswer:
        return as_api_error(error).answer()

    async def http(_: Request, error: Exception) -> JsonAnswer:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code, "invalid_request")
        return ApiError(error.status_code, error.detail, code=code).answer()

    async def validation(_: Request, error: Exception) -> JsonAnswer:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error).answer()

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(CkvError, api)
    app.add_exception_handler(Exception, api)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong; the values themselves are not repeated."""
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
