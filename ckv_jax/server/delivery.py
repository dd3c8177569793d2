"""Delivery of answers to clients, whole or streamed; ends when a client is gone or too slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckv_jax.request import Generation, TokenEvent
from ckv_jax.server.formats import ResponseFormat
from ckv_jax.server.http import as_api_error, draining, encode, encode_event
from ckv_jax.server.parser import ParsedRequest

_FIRST = asyncio.FIRST_COMPLETED


async def send_whole(
    events: AsyncIterator[TokenEvent],
    request: ParsedRequest,
    form: ResponseFormat,
    client: Client,
) -> list[Generation]:
    """Sends all generations as one object once they have ended, and returns them."""
    ended: dict[int, Generation] = {}
    async for event in events:
        if event.token_id is not None:
            form.token(event.index, event.token_id, event.logprobs)
        if event.generation is not None:
            event.generation.raise_for_error()
            ended[event.index] = event.generation
    generations = [ended[choice] for choice in range(request.num_generations)]
    covered = min(generation.trace.attention_mass for generation in generations)
    headers = [(b"x-ckv-attention-covered", b"%.4f" % covered)]
    await client.whole(form.whole(generations), headers=headers)
    return generations


async def send_stream(
    events: AsyncIterator[TokenEvent],
    request: ParsedRequest,
    form: ResponseFormat,
    client: Client,
) -> list[Generation]:
    """Sends all generations piece by piece as they come, and returns them."""
    ended: dict[int, Generation] = {}
    started: set[int] = set()

    async def send(chunks: Iterable[dict[str, Any] | None]) -> None:
        for chunk in chunks:
            for event in form.events(chunk) if chunk is not None else ():
                await client.event(event, named=form.named_events)

    async for event in events:
        choice = event.index
        if event.generation is not None:
            event.generation.raise_for_error()
        if choice not in started:
            started.add(choice)
            await send([form.opening(choice)])
        if event.token_id is not None:
            form.token(choice, event.token_id, event.logprobs)
        await send([form.piece(choice, event.text, event.generation)])
        if event.generation is not None:
            ended[choice] = event.generation
            await send(form.end(choice, event.generation))
    generations = [ended[choice] for choice in range(request.num_generations)]
    for last in form.closing(generations):
        await client.event(last, named=form.named_events)
    await client.end_of_events(done=not form.named_events)
    return generations


class Undelivered(Exception):
    """The client is gone, or has not read for too long; the message says which."""


class Client:
    """The receiver of one answer, over ASGI's `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.sending_since: float | None = None
        """Seconds on the clock `time.monotonic`; None: no message waits to be read."""
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        """Of the answer, beside those of its form."""
        self._started = False  # a status has been sent: an error can only go into the body
        self._named = False  # so are its events

    async def whole(
        self,
        value: Mapping[str, Any],
        status: int = 200,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Sends one JSON object, and nothing else."""
        body = encode(value)
        kind = (b"content-type", b"application/json; charset=utf-8")
        await self._start(
            status, [kind, (b"content-length", b"%d" % len(body)), *self.headers, *headers]
        )
        await self._body(body, more=False)

    async def event(self, value: Mapping[str, Any], *, named: bool = False) -> None:
        """Sends one server-sent event, `named` by its type."""
        if not self._started:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                *self.headers,
            ]
            await self._start(200, headers)
        self._named = named
        await self._body(encode_event(value, named=named), more=True)

    async def end_of_events(self, *, done: bool = True) -> None:
        """Ends a stream; `done`: with the event that chats and completions end with."""
        await self._body(b"data: [DONE]\n\n" if done else b"", more=False)

    async def error(self, error: BaseException) -> None:
        """Sends an error: as the response, or as an event where a stream has started."""
        reported = as_api_error(error)
        if self._started:
            await self._body(reported.event(named=self._named), more=False)
            return
        response = reported.response()
        await self._start(reported.status, response.raw_headers)
        await self._body(bytes(response.body), more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._out({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        self.sending_since = time.monotonic()
        try:
            await self._send(message)
        except OSError as error:
            raise Undelivered("the client is gone") from error
        self.sending_since = None


class Delivery(Response):
    """The response of a route: runs `deliver(client)` until it ends or the client is gone.

    Args:
        deliver: sends the answer, and cleans up when it is cancelled. Raises errors of the request.
        undelivered: receives the reason if the answer does not reach the client.
        send_s: seconds that the client may leave a message unread.
        ending: set once no answer may go on: it ends with an error.
    """

    def __init__(
        self,
        deliver: Callable[[Client], Awaitable[None]],
        *,
        undelivered: Callable[[str], None],
        send_s: float,
        ending: asyncio.Event,
    ) -> None:
        self.background = None
        self._ending = ending
        self._deliver = deliver
        self._undelivered = undelivered
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send)
        work = asyncio.ensure_future(self._deliver(client))
        gone = asyncio.ensure_future(_disconnected(receive))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await self._until_one(client, work, gone, ending)
            if not work.done():
                if gone.done():
                    raise Undelivered("the client is gone")
                raise draining()
            await work
        except Undelivered as error:
            self._undelivered(str(error))
        except Exception as error:
            last = asyncio.ensure_future(client.error(error))
            try:
                await self._until_one(client, last)
                await last
            except Undelivered as undelivered:
                self._undelivered(str(undelivered))
            finally:
                last.cancel()
        finally:
            for task in (work, gone, ending):
                task.cancel()
            await asyncio.gather(work, gone, ending, return_exceptions=True)

    async def _until_one(self, client: Client, *tasks: asyncio.Future[Any]) -> None:
        """Waits for the first of `tasks`; raises `Undelivered` once the client has left a message
        unread for too long. One timer an answer: one for each message costs as much as its JSON."""
        left = self._send_s
        while not (await asyncio.wait(tasks, timeout=left, return_when=_FIRST))[0]:
            since, now = client.sending_since, time.monotonic()
            left = self._send_s if since is None else since + self._send_s - now
            if left <= 0:
                raise Undelivered(f"the client has read nothing for {self._send_s:g} s")


async def _disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
