"""One request from the gate to its last piece: the engine's events become a client's answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ckv_jax.engine import Engine
from ckv_jax.request import Generation, TokenEvent
from ckv_jax.server.asked import Asked
from ckv_jax.server.behind import Behind
from ckv_jax.server.delivery import Client
from ckv_jax.server.shapes import Found, Shape
from ckv_jax.server.watch import Watch


class Answering:
    """Answers requests by one engine."""

    def __init__(self, engine: Engine, behind: Behind) -> None:
        self._engine = engine
        self._behind = behind

    async def whole(self, asked: Asked, shape: Shape, client: Client, watch: Watch) -> None:
        """All texts, once they are there."""
        found: list[list[Found]] = [[] for _ in range(asked.texts)]
        generations: dict[int, Generation] = {}
        async with self._events(asked, watch) as events:
            async for event in events:
                if event.logprobs is not None and event.token_id is not None:
                    found[event.index].append((event.token_id, event.logprobs))
                if event.generation is not None:
                    event.generation.raise_for_error()
                    generations[event.index] = event.generation
        texts = [generations[choice] for choice in range(asked.texts)]
        await client.whole(shape.whole(texts, found))
        self._behind.ended(asked, texts)

    async def streamed(self, asked: Asked, shape: Shape, client: Client, watch: Watch) -> None:
        """The same piece by piece, as it becomes certain."""
        found: list[list[Found]] = [[] for _ in range(asked.texts)]
        generations: dict[int, Generation] = {}
        begun: set[int] = set()
        async with self._events(asked, watch) as events:
            async for event in events:
                choice = event.index
                if event.generation is not None:
                    event.generation.raise_for_error()
                if choice not in begun:
                    begun.add(choice)
                    if (opening := shape.opening(choice)) is not None:
                        await client.event(opening)
                if event.logprobs is not None and event.token_id is not None:
                    found[choice].append((event.token_id, event.logprobs))
                if event.text or found[choice]:
                    await client.event(shape.piece(choice, event.text, found[choice]))
                    found[choice] = []
                if event.generation is not None:
                    generations[choice] = event.generation
                    await client.event(shape.end(choice, event.generation))
        texts = [generations[choice] for choice in range(asked.texts)]
        if asked.told_usage:
            await client.event(shape.usage(texts))
        await client.end_of_events()
        self._behind.ended(asked, texts)

    @asynccontextmanager
    async def _events(self, asked: Asked, watch: Watch) -> AsyncIterator[AsyncIterator[TokenEvent]]:
        """What the engine says, as it says it; leaving early ends the texts."""
        keep = self._behind.wanted(asked)
        stream = self._engine.agenerate(asked.requests(), asked.sampling, keep_kv=keep)
        watch.submitted(asked)
        async with stream:
            yield _watched(stream, watch)


async def _watched(stream: AsyncIterator[TokenEvent], watch: Watch) -> AsyncIterator[TokenEvent]:
    async for event in stream:
        if event.token_id is not None:
            watch.token(event.index)
        if event.generation is not None:
            watch.ended(event.index, event.generation)
        yield event
