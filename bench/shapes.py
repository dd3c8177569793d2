"""Varied traffic: do programs and memory mappings level off, and what does a restart cost?

    python -m bench.shapes --requests 2000 --json OUT --plot PNG

Calls of random batch, suffix length and budget over prefixes of random lengths, every fourth a
generation, on a small model with random weights. After every `--every` requests the number of
compiled programs that the engine holds and of memory mappings of the process (Linux allows 65,530)
are noted. They rise until programs take half of the mappings that Linux allows, when those used
least recently go; so both have levelled off if the last quarter of the requests takes them at most
10% higher than they ever were before.

`restart`: the same first question in three new processes, one after the other, with one folder of
JAX's compilation cache, empty at first: ms of the first answer, and the median of later ones to
questions like it. The third calls `Engine.warmup` before it answers, as a server does before it
says that it is ready; `ready_ms` is what that took. Bar: its first answer within 1.5 times its
warm time. Without a warm-up the first answer waits for every program to come from disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Json, existing_folder, finish, positive, result_file, table, whole
from bench.figures import save
from bench.random_engine import SMALL, random_engine, random_prefix, random_tokens
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.pipeline import mappings
from ckv_jax.storage.prefix import Prefix

GROWTH = 0.10
"""How much higher the last quarter of the requests may take them."""
SLOWER = 1.5
"""The bar for the first answer after a restart, over the warm time to first token."""
MODEL = dataclasses.replace(SMALL, num_layers=8, hidden_size=128, intermediate_size=256)
CONFIG: Json = {"dtype": "float32", "device_cache_bytes": 64 << 20, "host_cache_bytes": 64 << 20}
WARM = 9
"""Answers whose median is the warm time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked."""

    requests: int = 2000
    every: int = 20
    prefixes: int = 24
    longest_prefix: int = 4000
    longest_suffix: int = 200
    most_batch: int = 16
    most_tokens: int = 24
    """Of a generation."""
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def prefixes(engine: Engine, traffic: Traffic) -> list[Prefix]:
    """Of random lengths, evenly on a logarithmic scale from 32 tokens."""
    rng = np.random.default_rng((traffic.seed, 1))
    lengths = [_log_uniform(rng, 32, traffic.longest_prefix) for _ in range(traffic.prefixes)]
    return [
        random_prefix(engine, random_tokens(engine, length, seed=index), seed=index)
        for index, length in enumerate(lengths)
    ]


def calls(engine: Engine, stored: Sequence[Prefix], traffic: Traffic) -> Iterator[list[Request]]:
    """Batches of questions, `traffic.requests` in all."""
    rng, left = np.random.default_rng((traffic.seed, 2)), traffic.requests
    while left:
        batch = min(left, _log_uniform(rng, 1, traffic.most_batch))
        yield [
            Request(
                prefix=stored[rng.integers(len(stored))],
                suffix=rng.integers(
                    0, engine.model_config.vocab_size, _log_uniform(rng, 1, traffic.longest_suffix)
                ).tolist(),
                budget=float(rng.uniform(0.02, 1.0)),
            )
            for _ in range(batch)
        ]
        left -= batch


def ask(engine: Engine, traffic: Traffic) -> list[Json]:
    """What the engine and the process hold after every few requests."""
    stored = prefixes(engine, traffic)
    rng = np.random.default_rng((traffic.seed, 3))
    rows: list[Json] = []
    done, start = 0, time.perf_counter()
    for number, requests in enumerate(calls(engine, stored, traffic)):
        if number % 4 == 3:
            tokens = _log_uniform(rng, 1, traffic.most_tokens)
            outcomes: Sequence[Any] = engine.generate(
                requests, SamplingParams(max_tokens=tokens)
            ).results()
        else:
            outcomes = engine.reprefill(requests)
        for outcome in outcomes:
            outcome.raise_for_error()
        done += len(requests)
        if done // traffic.every > (rows[-1]["requests"] // traffic.every if rows else 0):
            rows.append(
                {
                    "requests": done,
                    "programs": engine.stats().programs,
                    "mappings": mappings.held(),
                    "seconds": time.perf_counter() - start,
                }
            )
            if len(rows) % 10 == 0:
                print(", ".join(f"{name} {value:.0f}" for name, value in rows[-1].items()))
    return rows


def levelled(rows: Sequence[Json]) -> Json:
    """For programs and mappings: the most before the last quarter and in it, and how much higher
    that is. `added`: the share of the last value that the last quarter added, which says at what
    point of its rise and fall a run ended."""
    three = 0.75 * rows[-1]["requests"]
    found = {}
    for name in ("programs", "mappings"):
        ends = [row[name] for row in rows if row is rows[0] or row["requests"] <= three]
        before = max(ends)
        last = max(row[name] for row in rows if row is rows[-1] or row["requests"] > three)
        grown = round(last / before - 1, 4)
        added = (rows[-1][name] - ends[-1]) / rows[-1][name]
        found[name] = {
            "before": before, "last": last, "grown": grown, "met": grown <= GROWTH, "added": added
        }  # fmt: skip
    return found


def first_answers(store: Path, *, ready: bool) -> Json:
    """ms of a new engine's first answer and of later ones. For a process of its own."""
    with random_engine(MODEL, store, **CONFIG) as engine:
        prefix = random_prefix(engine, random_tokens(engine, 2000, seed=7), seed=7)
        start = time.perf_counter()
        if ready:
            engine.warmup(prefix, max_batch=1, max_suffix=16, budgets=[0.05], max_tokens=0)
        ready_ms = 1e3 * (time.perf_counter() - start)
        spent = []
        for turn in range(WARM + 1):
            suffix = random_tokens(engine, 16, seed=50 + turn).tolist()
            start = time.perf_counter()
            [result] = engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=0.05)])
            spent.append(1e3 * (time.perf_counter() - start))
            result.raise_for_error()
    return {
        "ready_ms": ready_ms,
        "first_ms": spent[0],
        "warm_ms": statistics.median(spent[1:]),
    }


def restart(folder: Path) -> Json:
    """Three processes one after the other, over one store and one compilation cache."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "bench.shapes", "--first-answers", str(folder / "store")]
    found = []
    for more in ([], [], ["--ready"]):
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    ratio = found[-1]["first_ms"] / found[-1]["warm_ms"]
    return {"starts": found, "ratio": ratio, "bar": SLOWER, "met": ratio <= SLOWER}


def _log_uniform(rng: np.random.Generator, least: int, most: int) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(most + 1))))


def main() -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=result_file, help="write the result to this file")
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    p.add_argument("--folder", type=existing_folder, help="folder for the stores")
    p.add_argument("--requests", type=positive, default=2000)
    p.add_argument("--every", type=positive, default=20, help="requests between two notes")
    p.add_argument("--seed", type=whole, default=0)
    p.add_argument("--first-answers", type=Path, metavar="STORE", help=argparse.SUPPRESS)
    p.add_argument("--ready", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.first_answers:
        print(json.dumps(first_answers(args.first_answers, ready=args.ready)))
        return
    traffic = Traffic(requests=args.requests, every=args.every, seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        with random_engine(MODEL, Path(folder) / "store", **CONFIG) as engine:
            rows = ask(engine, traffic)
        again = restart(Path(folder))
    level = levelled(rows)
    cells = [
        [
            name,
            one["before"],
            one["last"],
            f"{one['grown']:+.1%}",
            "met" if one["met"] else "missed",
            f"{one['added']:+.1%}",
        ]
        for name, one in level.items()
    ]
    heads = [
        "most",
        "before the last quarter",
        "in it",
        "higher by",
        f"bar {GROWTH:.0%}",
        "end to end",
    ]
    print(table(cells, heads))
    first, second, ready = again["starts"]
    print(
        f"first answer {first['first_ms']:.0f} ms, after a restart {second['first_ms']:.0f} ms, "
        f"after one with a warm-up of {ready['ready_ms']:.0f} ms {ready['first_ms']:.1f} ms: "
        f"{again['ratio']:.2f} times the warm {ready['warm_ms']:.1f} ms "
        f"(bar {SLOWER}: {'met' if again['met'] else 'missed'})"
    )
    result = finish(args, traffic, {"rows": rows, "levelled": level, "restart": again})
    save("shapes", result, args.plot)


if __name__ == "__main__":
    main()
