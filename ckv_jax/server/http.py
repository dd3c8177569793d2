"""HTTP as OpenAI's clients know it: JSON, and errors of one form."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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
_WITH_BODY = ("POST", "PUT", "PATCH")


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


def install_error_handlers(app: Starlette) -> None:
    """Gives every error that leaves `app` the form of `ApiError`."""

    async def api(http: Request, error: Exception) -> JsonResponse:
        response = as_api_error(error).response()
        if http.method in _WITH_BODY and not hasattr(http.state, "body_read"):
            response.headers["connection"] = "close"  # the rest of the body is not read
        return response

    async def other(http: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code, "invalid_request")
        return await api(http, ApiError(error.status_code, error.detail, code=code))

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(CkvError, api)
    app.add_exception_handler(Exception, api)
    app.add_exception_handler(HTTPException, other)
