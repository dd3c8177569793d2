"""The HTTP server under load: first tokens, gaps, tokens per second, what it adds to the engine.

    python -m bench.server --quick --json OUT

`clients` clients in a process of their own ask over HTTP, each as soon as it has its last answer,
about `documents` stored documents in turn: token ids, streamed, at budget 1. `http` is what they
see; `engine` is the same load by as many tasks of the Python API in the server's process. Both are
warmed first, and take turns. Time to first token is from sending a request to its first event with
text; a gap is the time between two events. Random weights in bfloat16, documents of random KV.

`overhead_ms` is measured without load: the same request over HTTP and by the Python API in turn,
p50 of the time to the first token of either, the difference.

The rows `plain disk`, `slow disk` and `damaged disk` are the same load over HTTP on the reference
checkpoint, with nothing kept in memory (see `bench.server.disks`): `wrong` counts the answers whose
first token is not that of a dense prefill.

Bars: no error and nothing wrong anywhere, chunks computed again on the damaged disk; overhead_ms at
most 5; tokens/s over HTTP at least 0.9 times those of the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from bench.common import (
    PUBLISHED,
    Json,
    amount,
    command,
    existing_folder,
    finish,
    positive,
    table,
    whole,
)
from bench.random_engine import random_engine, random_prefix, random_tokens
from bench.server.asking import FULL, QUICK, Clients, Load, Prompts, Seen, by_engine, serving
from bench.server.disks import over_disks
from ckv_jax import Engine
from ckv_jax.data.reference import save_tokenizer
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer

COLUMNS = (
    "way", "answers", "errors", "wrong", "tokens_s", "p50_ttft_ms", "p99_ttft_ms", "p50_gap_ms",
    "p99_gap_ms",
)  # fmt: skip

_MOST = {"errors": 0, "wrong": 0, "overhead_ms": 5.0}
_LEAST = {"http_over_engine": 0.9, "recomputed_chunks": 1}


def bars(rows: Sequence[Json], overhead_ms: float) -> Json:
    """Each bar, what was got, and whether it is met.

    `rows`: those of `http`, `engine` and the disks. Errors and wrong answers are those of all rows,
    chunks computed again those of the damaged disk.
    """
    by_way = {row["way"]: row for row in rows}
    got = {
        "errors": sum(row["errors"] for row in rows),
        "wrong": sum(row["wrong"] for row in rows),
        "overhead_ms": overhead_ms,
        "http_over_engine": by_way["http"]["tokens_s"] / by_way["engine"]["tokens_s"],
        "recomputed_chunks": by_way["damaged disk"]["recomputed_chunks"],
    }
    most = {name: (bar, got[name] <= bar) for name, bar in _MOST.items()}
    least = {name: (bar, got[name] >= bar) for name, bar in _LEAST.items()}
    return {
        name: {"got": got[name], "bar": bar, "met": met}
        for name, (bar, met) in (most | least).items()
    }


def overhead(engine: Engine, clients: Clients, url: str, prompts: Prompts, load: Load) -> Json:
    """p50 of the time to first token of single requests, over HTTP and by the Python API."""
    http, api = Seen(), Seen()
    one = dataclasses.replace(load, clients=1, new_tokens=2)
    for _ in range(load.alone):
        http.extend(clients.ask(url, prompts, one, 0.0))
        api.extend(asyncio.run(by_engine(engine, prompts, one, 0.0)))
    served, asked = (1e3 * statistics.median(seen.ttft) for seen in (http, api))
    return {"http_ttft_ms": served, "engine_ttft_ms": asked, "overhead_ms": served - asked}


def beside_the_engine(load: Load, clients: Clients, folder: Path) -> tuple[list[Json], Json]:
    """Rows of both ways under load, and the overhead without."""
    # Both loads and the client's own pace share the pool: it holds all documents.
    with random_engine(
        load.model, folder / "kv", seed=load.seed, budget=1.0, max_batch=load.clients,
        device_cache_bytes=2 * 2**30, admit_bytes=4 * 2**30,
    ) as engine:  # fmt: skip
        engine.tokenizer = _every_id(folder / "tokenizer", load.model.vocab_size)
        documents = [
            random_prefix(engine, random_tokens(engine, load.document_tokens, seed=i), seed=i)
            for i in range(load.documents)
        ]
        engine.warmup(
            documents[0], max_batch=load.clients, max_suffix=load.question_tokens,
            max_tokens=load.new_tokens,
        )  # fmt: skip
        prompts = Prompts([d.tokens.tolist() for d in documents], load, load.model.vocab_size)
        http, api = Seen(), Seen()
        with serving(engine, load) as url:
            for turn in range(2):  # every batch size that the load can have is met
                asyncio.run(by_engine(engine, prompts, load, load.seconds / 4))
                print(f"warmed, turn {turn}", flush=True)
            clients.ask(url, prompts, load, load.seconds / 8)
            for _ in range(load.turns):
                http.extend(clients.ask(url, prompts, load, load.seconds / load.turns))
                api.extend(asyncio.run(by_engine(engine, prompts, load, load.seconds / load.turns)))
            alone = overhead(engine, clients, url, prompts, load)
    return [http.row("http"), api.row("engine")], alone


def _every_id(folder: Path, vocab_size: int) -> Tokenizer:
    """A tokenizer with text for every id of the model, as a real one has."""
    folder.mkdir(parents=True)
    known = save_tokenizer(folder, 512)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f" w{id_}" for id_ in range(known, vocab_size)])
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def run(load: Load, folder: Path) -> Json:
    """All rows, the overhead, and what the bars say."""
    clients = Clients()
    try:
        rows, alone = beside_the_engine(load, clients, folder / "beside")
        rows += over_disks(load, clients, folder / "disks")
    finally:
        clients.close()
    return {"rows": rows, **alone, "bars": bars(rows, alone["overhead_ms"])}


def main() -> None:
    """The command."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="shorter documents, fewer seconds")
    p.add_argument(
        "--folder", type=existing_folder, help="folder for the store, on the disk to measure"
    )
    p.add_argument("--model", choices=PUBLISHED, help="published shape (default: a small model)")
    for name in ("documents", "document-tokens", "new-tokens", "clients", "turns", "alone", "seed"):
        p.add_argument(f"--{name}", type=whole if name == "seed" else positive)
    p.add_argument("--seconds", type=amount, help="seconds of load, over all turns")
    args = p.parse_args()
    if args.seconds == 0:
        p.error("got --seconds 0, expected more")
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
    finish(args, {"setting": dataclasses.asdict(load), **result})


if __name__ == "__main__":
    main()
