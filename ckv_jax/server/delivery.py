"""An answer on its way to one client: it ends when the client is gone, or reads too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckv_jax.server.errors import as_api_error
from ckv_jax.server.json_answer import encode


class Undelivered(Exception):
    """The client is gone, or has not read for too long; the message says which."""


class Client:
    """The receiving end of one answer."""

    def __init__(self, send: Send, send_s: float) -> None:
        self._send = send
        self._send_s = send_s
        self.begun = False
        """Whether a status has been sent: an error can be told in the body only."""

    async def whole(self, value: Mapping[str, Any], *, status: int = 200) -> None:
        """One JSON object, and nothing else."""
        body = encode(value)
        await self._begin(status, "application/json", [(b"content-length", b"%d" % len(body))])
        await self._body(body, more=False)

    async def event(self, value: Mapping[str, Any]) -> None:
        """One server-sent event."""
        if not self.begun:
            await self._begin(200, "text/event-stream", [(b"cache-control", b"no-cache")])
        await self._body(b"data: " + encode(value) + b"\n\n", more=True)

    async def end_of_events(self) -> None:
        """The last one, as OpenAI's clients expect it."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def error(self, error: BaseException) -> None:
        """What went wrong, by status, or as an event where something has been sent already."""
        told = as_api_error(error)
        if self.begun:
            await self._body(b"data: " + encode(told.body()) + b"\n\n", more=False)
            return
        answer = told.answer()
        await self._begin(told.status, None, answer.raw_headers)
        await self._body(bytes(answer.body), more=False)

    async def _begin(
        self, status: int, kind: str | None, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self.begun = True
        if kind is not None:
            headers = [(b"content-type", f"{kind}; charset=utf-8".encode()), *headers]
        start = {"type": "http.response.start", "status": status}
        await self._out(start | {"headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._send_s):
                await self._send(message)
        except TimeoutError:
            raise Undelivered(f"the client has read nothing for {self._send_s:g} s") from None
        except OSError as error:
            raise Undelivered("the client is gone") from error


class Delivery(Response):
    """The response of a route: runs `deliver(client)` until it is done or the client is gone.

    Args:
        deliver: sends the answer, and cleans up when it is cancelled. Raises what went wrong.
        undelivered: is told why the answer did not reach the client.
        send_s: seconds that the client may read nothing.
    """

    def __init__(
        self,
        deliver: Callable[[Client], Awaitable[None]],
        *,
        undelivered: Callable[[str], None],
        send_s: float,
    ) -> None:
        self.background = None
        self._deliver = deliver
        self._undelivered = undelivered
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send, self._send_s)
        work = asyncio.ensure_future(self._deliver(client))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Undelivered("the client is gone")
            await work
        except Undelivered as error:
            self._undelivered(str(error))
        except Exception as error:
            try:
                await client.error(error)
            except Undelivered as undelivered:
                self._undelivered(str(undelivered))
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Returns once the client has closed the connection; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
