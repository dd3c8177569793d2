"""The HTTP server under load: first tokens, gaps, tokens a second, and what it adds to the engine.

    python -m bench.server --quick --json OUT

`clients` clients in a process of their own ask over HTTP, each as soon as it has its last answer,
about `documents` stored documents in turn: token ids, streamed, at budget 1. `http` is what they
see; `engine` is the same load by as many tasks of the Python API in the server's process. Both are
warmed first, and take turns. Time to first token is from sending a request to its first event with
text; a gap is the time between two events.

`overhead_ms` is measured without load: the same request over HTTP and by the Python API in turn,
p50 of the time to the first token of either, the difference. Random weights in bfloat16, documents
of random KV.

Bars: no error; overhead_ms at most 5; tokens/s over HTTP at least 0.9 times those of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import uvicorn

from bench.common import Json, finish, result_file, table
from bench.random_engine import SMALL, random_engine, random_prefix, random_tokens
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.data.random_checkpoint import save_tokenizer
from ckv_jax.model.config import PUBLISHED, ModelConfig
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.server.app import create_app
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.run import bind, url_of

BARS = {"errors": 0, "overhead_ms": 5.0, "http_over_engine": 0.9}
COLUMNS = (
    "way", "answers", "errors", "tokens_s", "p50_ttft_ms", "p99_ttft_ms", "p50_gap_ms",
    "p99_gap_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured."""

    model: ModelConfig = PUBLISHED["0.5B"]
    documents: int = 4
    document_tokens: int = 4096
    question_tokens: int = 16
    new_tokens: int = 32
    clients: int = 16
    seconds: float = 30.0
    alone: int = 40
    """Requests of either kind for the overhead."""
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


QUICK = Load(model=SMALL, document_tokens=1024, seconds=8.0, alone=20, new_tokens=16)
FULL = Load()


@dataclass(slots=True)
class Seen:
    """What came of some requests, in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0
    seconds: float = 0.0

    def add(self, start: float, events: Sequence[float]) -> None:
        """One answer, by the times of its events."""
        self.ttft.append(events[0] - start)
        self.gaps += np.diff(events).tolist()
        self.tokens += len(events)

    def row(self, way: str) -> Json:
        """One row of the result."""

        def ms(values: list[float], percent: int) -> float:
            return 1e3 * float(np.percentile(values, percent)) if values else 0.0

        return {
            "way": way,
            "answers": len(self.ttft),
            "errors": self.errors,
            "tokens_s": self.tokens / self.seconds,
            "p50_ttft_ms": ms(self.ttft, 50),
            "p99_ttft_ms": ms(self.ttft, 99),
            "p50_gap_ms": ms(self.gaps, 50),
            "p99_gap_ms": ms(self.gaps, 99),
        }


class Prompts:
    """Token ids: documents in turn, each time with another question."""

    def __init__(self, documents: Sequence[Sequence[int]], load: Load, vocab: int) -> None:
        self._documents = documents
        self._load = load
        self._rng = np.random.default_rng(load.seed)
        self._vocab = vocab
        self._turn = 0

    def next(self) -> list[int]:
        """One more."""
        self._turn += 1
        question = self._rng.integers(0, self._vocab, self._load.question_tokens)
        return [*self._documents[self._turn % len(self._documents)], *question.tolist()]


async def over_http(url: str, prompts: Prompts, load: Load, seconds: float) -> Seen:
    """What `clients` of them see in about so many seconds."""
    seen, end = Seen(), time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def ask() -> None:
            while time.perf_counter() < end:
                await ask_once(client, prompts.next(), load, seen)

        start = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(load.clients)))
        seen.seconds = time.perf_counter() - start
    return seen


async def ask_once(client: httpx.AsyncClient, prompt: list[int], load: Load, seen: Seen) -> None:
    """One request over HTTP, streamed. Each token is one event, as logprobs are asked for."""
    body = {
        "model": "bench", "prompt": prompt, "max_tokens": load.new_tokens, "temperature": 0,
        "stream": True, "logprobs": 0,
    }  # fmt: skip
    events = []
    start = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith('data: {"id"') and '"tokens":' in line:
                events += [time.perf_counter()] * len(_tokens(line))
    if answer.status_code != 200 or len(events) != load.new_tokens:
        seen.errors += 1
    else:
        seen.add(start, events)


def _tokens(line: str) -> list[str]:
    found: list[str] = json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]
    return found


async def by_engine(engine: Engine, prompts: Prompts, load: Load, seconds: float) -> Seen:
    """The same load by the Python API."""
    seen, end = Seen(), time.perf_counter() + seconds

    async def ask() -> None:
        while time.perf_counter() < end:
            await ask_engine(engine, prompts.next(), load, seen)

    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(load.clients)))
    seen.seconds = time.perf_counter() - start
    return seen


async def ask_engine(engine: Engine, prompt: list[int], load: Load, seen: Seen) -> None:
    """One request by the Python API."""
    start, events = time.perf_counter(), []
    request = Request(prefix=prompt[:-1], suffix=prompt[-1:], budget=1.0)
    sampling = SamplingParams(max_tokens=load.new_tokens, logprobs=0)
    async for event in engine.agenerate(request, sampling):
        if event.token_id is not None:
            events.append(time.perf_counter())
        if event.generation is not None and event.generation.error is not None:
            seen.errors += 1
            return
    seen.add(start, events)


def client_process(connection: multiprocessing.connection.Connection, load: Load) -> None:
    """Asks over HTTP for as long as it is told to: (url, prompts, clients, seconds) -> Seen."""
    while (told := connection.recv()) is not None:
        url, prompts, clients, seconds = told
        asked = dataclasses.replace(load, clients=clients)
        connection.send(asyncio.run(over_http(url, prompts, asked, seconds)))


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


def overhead(engine: Engine, url: str, prompts: Prompts, load: Load) -> Json:
    """p50 of the time to first token of single requests, over HTTP and by the Python API."""

    async def turns() -> tuple[Seen, Seen]:
        http, api = Seen(), Seen()
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for _ in range(load.alone):
                prompt = prompts.next()
                await ask_once(client, prompt, load, http)
                await ask_engine(engine, prompt, load, api)
        return http, api

    http, api = asyncio.run(turns())
    one, other = (1e3 * statistics.median(seen.ttft) for seen in (http, api))
    return {"http_ttft_ms": one, "engine_ttft_ms": other, "overhead_ms": one - other}


def run(load: Load, folder: Path) -> Json:
    """Rows of both ways under load, and the overhead without."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    clients = context.Process(target=client_process, args=(theirs, load), daemon=True)
    clients.start()
    # Both loads and the client's own pace share the pool: it holds all documents.
    with random_engine(
        load.model, folder / "kv", seed=load.seed, budget=1.0, max_batch=load.clients,
        device_cache_bytes=2 * 2**30, admit_bytes=4 * 2**30,
    ) as engine:  # fmt: skip
        (folder / "tokenizer").mkdir(parents=True)
        save_tokenizer(folder / "tokenizer", 512)
        engine.tokenizer = load_tokenizer(folder / "tokenizer")  # tokens' names are all it is for
        documents = [
            random_prefix(engine, random_tokens(engine, load.document_tokens, seed=i), seed=i)
            for i in range(load.documents)
        ]
        engine.warmup(
            documents[0], max_batch=load.clients, max_suffix=load.question_tokens,
            max_tokens=load.new_tokens,
        )  # fmt: skip
        prompts = Prompts([d.tokens.tolist() for d in documents], load, load.model.vocab_size)

        def over(url: str, seconds: float, count: int = load.clients) -> Seen:
            ours.send((url, prompts, count, seconds))
            seen: Seen = ours.recv()
            return seen

        with serving(engine, load) as url:
            for turn in range(2):  # every batch size that the load can have is met
                asyncio.run(by_engine(engine, prompts, load, load.seconds / 4))
                print(f"warmed, turn {turn}", flush=True)
            over(url, load.seconds / 8)
            rows = [
                over(url, load.seconds).row("http"),
                asyncio.run(by_engine(engine, prompts, load, load.seconds)).row("engine"),
            ]
            alone = overhead(engine, url, prompts, load)
    ours.send(None)
    clients.join()
    return {"rows": rows, **alone, "bars": bars(rows, alone["overhead_ms"])}


def bars(rows: Sequence[Json], overhead_ms: float) -> Json:
    """What the bars are held to, and whether they are met."""
    http, engine = rows
    got = {
        "errors": http["errors"],
        "overhead_ms": overhead_ms,
        "http_over_engine": http["tokens_s"] / engine["tokens_s"],
    }
    return {
        name: {
            "got": got[name],
            "bar": bar,
            "met": got[name] >= bar if name == "http_over_engine" else got[name] <= bar,
        }
        for name, bar in BARS.items()
    }


def main() -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="a small model, fewer seconds")
    p.add_argument("--json", type=result_file, help="write the result to this file")
    p.add_argument("--folder", type=Path, help="folder for the store, on the disk to be measured")
    p.add_argument("--model", choices=PUBLISHED, help="published shape (default 0.5B)")
    for name in ("documents", "document-tokens", "new-tokens", "clients", "alone", "seed"):
        p.add_argument(f"--{name}", type=int)
    p.add_argument("--seconds", type=float)
    args = p.parse_args()
    base = QUICK if args.quick else FULL
    said = {name: getattr(args, name, None) for name in Load.__slots__}
    said["model"] = PUBLISHED[args.model] if args.model else None
    load = dataclasses.replace(base, **{k: v for k, v in said.items() if v is not None})
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        result = run(load, Path(folder))
    print(table([[row[name] for name in COLUMNS] for row in result["rows"]], COLUMNS))
    for name, one in result["bars"].items():
        met = "met" if one["met"] else "missed"
        print(f"{name.replace('_', ' ')}: {one['got']:.2f} (bar {one['bar']}: {met})")
    finish(args, load, result)


if __name__ == "__main__":
    main()
