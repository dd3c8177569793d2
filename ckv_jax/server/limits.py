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
            async with asyncio.timeout(self._seconds):
                body = await self._body(scope, receive)
        except TimeoutError:
            message = f"the body was not there within {self._seconds:g} s"
            await _refuse(ApiError(408, message, code="request_timeout"), scope, receive, send)
            return
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

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None: it will never be whole."""
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes"
        return ApiError(413, message, code="request_too_large")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = error.answer()
    answer.headers["connection"] = "close"  # what is left of the body is not read
    await answer(scope, receive, send)
