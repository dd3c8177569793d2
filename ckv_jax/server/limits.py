"""How large a request's body may be, and how long it may take to come."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckv_jax.server.errors import ApiError


class BodyLimit:
    """Reads each body before the application does: at most `max_bytes`, within `seconds`."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, max_bytes=self._max_bytes, seconds=self._seconds)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        if body is None:
            return  # the client is gone
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, seconds: float
) -> bytes | None:
    """The whole body of a request; None: it will never be whole, the client is gone.

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


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = error.answer()
    answer.headers["connection"] = "close"  # what is left of the body is not read
    await answer(scope, receive, send)
