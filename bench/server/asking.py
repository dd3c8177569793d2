"""Clients over HTTP, in a process of their own; and the same load by the Python API."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import httpx
import uvicorn

from bench.server.load import Known, Load, Prompt, Prompts, Seen
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.server.app import bind, create_app, url_of
from ckv_jax.server.config import ServerConfig


class Clients:
    """A process that asks over HTTP, by connections that stay open."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_process, args=(theirs,), daemon=True)
        self._process.start()

    def ask(self, url: str, prompts: Prompts | Known, load: Load, seconds: float) -> Seen:
        """What clients see: each asks once, and on until `seconds` are over."""
        self._ours.send((url, prompts, load, seconds))
        seen: Seen = self._ours.recv()
        return seen

    def close(self) -> None:
        """Ends the process."""
        self._ours.send(None)
        self._process.join()


def _process(connection: Connection) -> None:
    asyncio.run(_clients(connection))


async def _clients(connection: Connection) -> None:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as web:
        while (told := await asyncio.to_thread(connection.recv)) is not None:
            connection.send(await over_http(web, *told))


async def over_http(
    web: httpx.AsyncClient, url: str, prompts: Prompts | Known, load: Load, seconds: float
) -> Seen:
    """What so many clients see in about so many seconds."""
    seen, start = Seen(), time.perf_counter()

    async def ask() -> None:
        while True:
            await _ask_once(web, url, prompts.next(), load, seen)
            if time.perf_counter() >= start + seconds:
                return

    await asyncio.gather(*(ask() for _ in range(load.clients)))
    seen.seconds = time.perf_counter() - start
    return seen


async def _ask_once(
    web: httpx.AsyncClient, url: str, prompt: Prompt, load: Load, seen: Seen
) -> None:
    """One request over HTTP, streamed. Each token is one event, as logprobs are asked for."""
    body = {
        "model": "bench", "prompt": prompt.tokens, "max_tokens": load.new_tokens, "temperature": 0,
        "stream": True, "logprobs": 0,
    }  # fmt: skip
    events: list[float] = []
    tokens: list[str] = []
    ended = False
    start = time.perf_counter()
    try:
        async with web.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith('data: {"id"') and '"tokens":' in line:
                    new = json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]
                    events += [time.perf_counter()] * len(new)
                    tokens += new
                ended = line == "data: [DONE]" or ended
    except httpx.HTTPError:
        ended = False
    if not ended or not events:
        seen.errors += 1
        return
    seen.add(start, events)
    seen.wrong += prompt.expected not in (None, tokens[0])


async def by_engine(engine: Engine, prompts: Prompts, load: Load, seconds: float) -> Seen:
    """The same load by the Python API."""
    seen, start = Seen(), time.perf_counter()

    async def ask() -> None:
        while True:
            await _ask_engine(engine, prompts.next(), load, seen)
            if time.perf_counter() >= start + seconds:
                return

    await asyncio.gather(*(ask() for _ in range(load.clients)))
    seen.seconds = time.perf_counter() - start
    return seen


async def _ask_engine(engine: Engine, prompt: Prompt, load: Load, seen: Seen) -> None:
    """One request by the Python API."""
    start, events = time.perf_counter(), []
    request = Request(prefix=prompt.tokens[:-1], suffix=prompt.tokens[-1:], budget=1.0)
    sampling = SamplingParams(max_tokens=load.new_tokens, logprobs=0)
    async for event in engine.agenerate(request, sampling):
        if event.token_id is not None:
            events.append(time.perf_counter())
        if event.generation is not None and event.generation.error is not None:
            seen.errors += 1
            return
    seen.add(start, events)


@contextmanager
def serving(engine: Engine, load: Load) -> Iterator[str]:
    """The application over `engine`, served from a thread of this process; yields its URL."""
    config = ServerConfig(model="bench", max_requests=4 * load.clients, store_tokens=10**9)
    app = create_app(engine, config)
    with bind("127.0.0.1", 0) as bound:
        settings = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join()
            app.state.service.close()
