"""One request from the gate to its last piece: the engine's events become a client's answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ckv_jax.engine import Engine
from ckv_jax.server.asked import Asked
from ckv_jax.server.delivery import Client
from ckv_jax.server.shapes import Found, Shape
from ckv_jax.serving.async_streams import AsyncTokenStream


class Answering:
    """Answers requests by one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def whole(self, asked: Asked, shape: Shape, client: Client) -> None:
        """All texts, once they are there."""
        found: list[list[Found]] = [[] for _ in range(asked.texts)]
        async with self._running(asked) as stream:
            async for event in stream:
                if event.logprobs is not None and event.token_id is not None:
                    found[event.index].append((event.token_id, event.logprobs))
            generations = await stream.results()
        for generation in generations:
            generation.raise_for_error()
        await client.whole(shape.whole(generations, found))

    async def streamed(self, asked: Asked, shape: Shape, client: Client) -> None:
        """The same piece by piece, as it becomes certain."""
        begun: set[int] = set()
        found: list[list[Found]] = [[] for _ in range(asked.texts)]
        async with self._running(asked) as stream:
            async for event in stream:
                choice = event.index
                if event.generation is not None:
                    event.generation.raise_for_error()
                if choice not in begun:
                    begun.add(choice)
                    if (opening := shape.opening(choice)) is not None:
                        await client.event(opening)
                if event.logprobs is not None and event.token_id is not None:
                    found[choice].append((event.token_id, event.logprobs))
                if event.text:
                    await client.event(shape.piece(choice, event.text, found[choice]))
                    found[choice] = []
                if event.generation is not None:
                    if found[choice]:
                        await client.event(shape.piece(choice, "", found[choice]))
                    await client.event(shape.end(choice, event.generation))
            generations = await stream.results()
        if asked.told_usage:
            await client.event(shape.usage(generations))
        await client.end_of_events()

    @asynccontextmanager
    async def _running(self, asked: Asked) -> AsyncIterator[AsyncTokenStream]:
        """The engine's stream; leaving it early ends the texts."""
        async with self._engine.agenerate(asked.requests(), asked.sampling) as stream:
            yield stream
