"""Many texts at once: tokens per second on one prefix and on many, and waits beside an ingest.

    python -m bench.serving --quick --json OUT

`one-prefix`: one text, and several, decoded over one stored prefix; `distinct-prefixes`: as many,
each over a prefix of its own. Random weights of a published shape in bfloat16, prefixes of random
KV. Everything is warmed by `Engine.warmup` and one call of each load; then loads take turns, each
time with other questions. `tokens_s` is the median over calls of all tokens over the wall clock of
the whole call, first tokens included; `decode_tokens_s` is of the tokens after the first ones, over
the longest time that a text took for its own. Time to first token is from submission; `compiled`
counts what was compiled while it was measured: 0, unless a warm-up has missed a shape.

`beside-ingest`: questions of a small 16-layer model are submitted at even times from a thread of
their own, whether or not those before are answered, while a long text is ingested. `p99_wait_ms` is
of their time in the queue. `block_ms` is the median time between two blocks of an ingest of the
same length that has the machine for itself.

Bars: many texts on distinct prefixes at least 2.5 times the tokens/s of one, and 0.85 times those
of as many on one prefix; beside an ingest p99_wait_ms at most 3 times block_ms.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import (
    PUBLISHED,
    Json,
    budget_share,
    command,
    existing_folder,
    finish,
    positive,
    table,
    whole,
)
from bench.measure import Compilations
from bench.random_engine import SMALL, random_engine, random_prefix, random_tokens
from ckv_jax import Engine, Generation, Request, SamplingParams
from ckv_jax.model.config import ModelConfig
from ckv_jax.storage.prefix import Prefix

BARS = {"distinct_over_one": 2.5, "distinct_over_shared": 0.85, "wait_over_block": 3.0}
COLUMNS = (
    "load", "sequences", "tokens_s", "decode_tokens_s", "p50_ttft_ms", "p99_ttft_ms",
    "p99_wait_ms", "block_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is measured."""

    model: ModelConfig = PUBLISHED["0.5B"]
    beside: ModelConfig = SMALL
    """The model that ingests."""
    budget: float = 0.05
    prefix_tokens: int = 3000
    suffix_tokens: int = 16
    new_tokens: int = 64
    sequences: int = 8
    repeats: int = 7
    ingest_tokens: int = 16_000
    every_s: float = 0.2
    """Between two questions beside the ingest."""
    prefill_block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.new_tokens < 2:
            raise ValueError(f"got new_tokens={self.new_tokens}, expected 2 or more, to decode")


QUICK = Serving(repeats=3)
FULL = Serving()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of `Engine.generate`."""

    texts: list[Generation]
    seconds: float
    compiled: int
    """Programs compiled during the call."""


def generate(engine: Engine, requests: Sequence[Request], new_tokens: int) -> Call:
    """Texts of `new_tokens` tokens each, all submitted at once."""
    with Compilations() as compiled:
        start = time.perf_counter()
        texts = engine.generate(list(requests), SamplingParams(max_tokens=new_tokens)).results()
        seconds = time.perf_counter() - start
    for text in texts:
        text.raise_for_error()
    return Call(texts=texts, seconds=seconds, compiled=compiled.count)


def row_of(load: str, calls: Sequence[Call]) -> Json:
    """One row of the result."""
    texts = [text for call in calls for text in call.texts]
    ttft = [text.queued_ms + text.trace.ttft_ms for text in texts]
    tokens = [[len(text.token_ids) for text in call.texts] for call in calls]
    decoding = [
        sum(n - 1 for n in counts) / max(text.decode_ms for text in call.texts) * 1e3
        for counts, call in zip(tokens, calls, strict=True)
    ]
    return {
        "load": load,
        "sequences": len(tokens[0]),
        "tokens": tokens,
        "tokens_s": statistics.median(
            sum(n) / call.seconds for n, call in zip(tokens, calls, strict=True)
        ),
        "decode_tokens_s": statistics.median(decoding),
        "p50_ttft_ms": float(np.percentile(ttft, 50)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "p99_wait_ms": float(np.percentile([text.queued_ms for text in texts], 99)),
        "block_ms": None,
        "compiled": sum(call.compiled for call in calls),
    }


def texts(setting: Serving, folder: Path) -> list[Json]:
    """The rows of one text, of many on one prefix, and of many on as many prefixes."""
    many = setting.sequences
    with random_engine(setting.model, folder, seed=setting.seed, budget=setting.budget) as engine:
        prefixes = _prefixes(engine, setting, many)
        questions = _questions(engine, setting)
        loads = {
            ("one-prefix", 1): prefixes[:1],
            ("one-prefix", many): prefixes[:1] * many,
            ("distinct-prefixes", many): prefixes,
        }
        engine.warmup(
            prefixes[0],
            max_batch=many,
            max_suffix=setting.suffix_tokens,
            max_tokens=setting.new_tokens,
        )
        calls: dict[tuple[str, int], list[Call]] = {key: [] for key in loads}
        for turn in range(setting.repeats + 1):
            for key, over in loads.items():
                requests = [Request(prefix=prefix, suffix=next(questions)) for prefix in over]
                call = generate(engine, requests, setting.new_tokens)
                if turn:  # the first one warms
                    calls[key].append(call)
            print(f"texts: turn {turn} of {setting.repeats}", flush=True)
    return [row_of(load, found) for (load, _), found in calls.items()]


def beside_ingest(setting: Serving, folder: Path) -> Json:
    """The row of short questions while a long text is ingested."""
    with random_engine(
        setting.beside, folder, seed=setting.seed, budget=setting.budget,
        prefill_block=setting.prefill_block, max_batch=setting.sequences,
    ) as engine:  # fmt: skip
        [prefix] = _prefixes(engine, setting, 1)
        engine.warmup(prefix, max_batch=setting.sequences, max_suffix=setting.suffix_tokens)
        blocks = block_times(engine, random_tokens(engine, setting.ingest_tokens, seed=1))
        print("beside-ingest: ingested once alone", flush=True)
        other = random_tokens(engine, setting.ingest_tokens, seed=2)
        questions = _questions(engine, setting)
        asked = (Request(prefix=prefix, suffix=question) for question in questions)
        with Compilations() as compiled:
            start = time.perf_counter()
            waits, ttft = _ask_during(engine, other, asked, setting.every_s)
            seconds = time.perf_counter() - start
    return {
        "load": "beside-ingest",
        "sequences": len(waits),
        "tokens_s": len(waits) / seconds,
        "decode_tokens_s": None,
        "p50_ttft_ms": float(np.percentile(ttft, 50)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "p50_wait_ms": float(np.percentile(waits, 50)),
        "p99_wait_ms": float(np.percentile(waits, 99)),
        "block_ms": 1e3 * statistics.median(blocks),
        "longest_block_ms": 1e3 * max(blocks),
        "ingest_s": seconds,
        "ingest_alone_s": sum(blocks),
        "compiled": compiled.count,
    }


def block_times(engine: Engine, tokens: np.ndarray) -> list[float]:
    """Seconds from each block of an ingest to the next; those of new shapes compile."""
    at = [time.perf_counter()]
    engine.ingest(tokens, progress=lambda done, total: at.append(time.perf_counter()))
    return [after - before for before, after in itertools.pairwise(at)]


def _ask_during(
    engine: Engine, tokens: np.ndarray, questions: Iterator[Request], every_s: float
) -> tuple[list[float], list[float]]:
    """ms in the queue and to the first token of questions submitted while `tokens` is ingested."""
    ended = threading.Event()
    asked = []

    def ask() -> None:
        while not ended.wait(every_s):
            asked.append(engine.submit(next(questions)))

    thread = threading.Thread(target=ask, name="questions")
    thread.start()
    try:
        engine.ingest(tokens)
    finally:
        ended.set()
        thread.join()
    results = [sequence.result() for sequence in asked]
    for result in results:
        result.raise_for_error()
    if not results:
        raise RuntimeError(f"got an ingest of less than {every_s} s, expected a longer one")
    waits = [result.queued_ms for result in results]
    return waits, [result.queued_ms + result.trace.ttft_ms for result in results]


def _questions(engine: Engine, setting: Serving) -> Iterator[list[int]]:
    for seed in itertools.count(1000):
        yield random_tokens(engine, setting.suffix_tokens, seed=seed).tolist()


def _prefixes(engine: Engine, setting: Serving, count: int) -> list[Prefix]:
    return [
        random_prefix(
            engine, random_tokens(engine, setting.prefix_tokens, seed=100 + index), seed=index
        )
        for index in range(count)
    ]


def bars(rows: Sequence[Json], many: int) -> Json:
    """The three ratios, what they are held to, and whether they are met."""
    by = {(row["load"], row["sequences"]): row["tokens_s"] for row in rows}
    distinct = by["distinct-prefixes", many]
    [beside] = [row for row in rows if row["load"] == "beside-ingest"]
    got = {
        "distinct_over_one": distinct / by["one-prefix", 1],
        "distinct_over_shared": distinct / by["one-prefix", many],
        "wait_over_block": beside["p99_wait_ms"] / beside["block_ms"],
    }
    return {
        name: {
            "got": got[name],
            "bar": bar,
            "met": got[name] <= bar if name == "wait_over_block" else got[name] >= bar,
        }
        for name, bar in BARS.items()
    }


def run(setting: Serving, folder: Path) -> list[Json]:
    """All rows; `folder` holds the stores."""
    return [*texts(setting, folder / "texts"), beside_ingest(setting, folder / "ingest")]


def main() -> None:
    """The command."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="fewer calls")
    p.add_argument(
        "--folder", type=existing_folder, help="folder for the stores, on the disk to measure"
    )
    p.add_argument("--model", choices=PUBLISHED, help="published shape (default 0.5B)")
    p.add_argument("--budget", type=budget_share, help="share of the prefix in (0, 1]")
    for name in ("prefix-tokens", "new-tokens", "sequences", "repeats", "ingest-tokens", "seed"):
        p.add_argument(f"--{name}", type=whole if name == "seed" else positive)
    args = p.parse_args()
    base = QUICK if args.quick else FULL
    said = {name: getattr(args, name, None) for name in Serving.__slots__}
    said["model"] = PUBLISHED[args.model] if args.model else None
    setting = dataclasses.replace(base, **{k: v for k, v in said.items() if v is not None})
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        rows = run(setting, Path(folder))
    held = bars(rows, setting.sequences)
    cells = [["" if row[name] is None else row[name] for name in COLUMNS] for row in rows]
    print(table(cells, COLUMNS))
    for name, one in held.items():
        said_so = "met" if one["met"] else "missed"
        print(f"{name.replace('_', ' ')}: {one['got']:.2f} (bar {one['bar']}: {said_so})")
    finish(args, {"setting": dataclasses.asdict(setting), "rows": rows, "bars": held})


if __name__ == "__main__":
    main()
