"""Clients over HTTP, in a process of their own; and the same load by the Python API."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import httpx
import numpy as np
import uvicorn

from bench.common import Json
from bench.random_engine import SMALL
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.model.config import ModelConfig
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
    return await _asked(load, seconds, lambda seen: _ask_once(web, url, prompts.next(), load, seen))


async def _asked(load: Load, seconds: float, ask: Callable[[Seen], Awaitable[None]]) -> Seen:
    """What clients see, each of which asks once, and on until `seconds` are over."""
    seen, start = Seen(), time.perf_counter()

    async def client() -> None:
        while True:
            await ask(seen)
            if time.perf_counter() >= start + seconds:
                return

    await asyncio.gather(*(client() for _ in range(load.clients)))
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
    if not ended:
        seen.errors += 1
    if not ended or not events:  # no token of it became text
        return
    seen.add(start, events)
    seen.wrong += prompt.expected not in (None, tokens[0])


async def by_engine(engine: Engine, prompts: Prompts, load: Load, seconds: float) -> Seen:
    """The same load by the Python API."""
    return await _asked(load, seconds, lambda seen: _ask_engine(engine, prompts.next(), load, seen))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured."""

    model: ModelConfig = SMALL
    """A small one: the larger the model, the less of the time is the server's."""
    documents: int = 4
    document_tokens: int = 4096
    question_tokens: int = 16
    new_tokens: int = 32
    clients: int = 16
    seconds: float = 30.0
    """Of either way, all turns together; each disk has a third of them."""
    turns: int = 3
    alone: int = 40
    """Requests of either kind for the overhead."""
    seed: int = 0


QUICK = Load(documents=2, document_tokens=1024, seconds=6.0, turns=2, alone=20, new_tokens=16)
FULL = Load()


@dataclass(slots=True)
class Seen:
    """What came of some requests, in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0
    wrong: int = 0
    """Answers whose first token is another than the expected one."""
    seconds: float = 0.0

    def add(self, start: float, events: Sequence[float]) -> None:
        """One answer, by the times of its tokens."""
        self.ttft.append(events[0] - start)
        self.gaps += np.diff(events).tolist()
        self.tokens += len(events)

    def extend(self, other: Seen) -> None:
        """What came of others, at another time."""
        self.ttft += other.ttft
        self.gaps += other.gaps
        self.tokens += other.tokens
        self.errors += other.errors
        self.wrong += other.wrong
        self.seconds += other.seconds

    def row(self, way: str) -> Json:
        """One row of the result."""

        def ms(values: list[float], percent: int) -> float:
            return 1e3 * float(np.percentile(values, percent)) if values else 0.0

        return {
            "way": way,
            "answers": len(self.ttft),
            "errors": self.errors,
            "wrong": self.wrong,
            "tokens_s": self.tokens / self.seconds,
            "p50_ttft_ms": ms(self.ttft, 50),
            "p99_ttft_ms": ms(self.ttft, 99),
            "p50_gap_ms": ms(self.gaps, 50),
            "p99_gap_ms": ms(self.gaps, 99),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids, and the text of the first token that comes after them; None: whatever comes."""

    tokens: list[int]
    expected: str | None = None


class Prompts:
    """Documents in turn, each time with another question of random tokens."""

    def __init__(self, documents: Sequence[Sequence[int]], load: Load, vocab: int) -> None:
        self._documents = documents
        self._load = load
        self._rng = np.random.default_rng(load.seed)
        self._vocab = vocab
        self._turn = 0

    def next(self) -> Prompt:
        """One more."""
        self._turn += 1
        question = self._rng.integers(0, self._vocab, self._load.question_tokens)
        document = self._documents[self._turn % len(self._documents)]
        return Prompt(tokens=[*document, *question.tolist()])


class Known:
    """Prompts whose answers are known, in turn."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._turn = 0

    def next(self) -> Prompt:
        """One more."""
        self._turn += 1
        return self._prompts[self._turn % len(self._prompts)]
