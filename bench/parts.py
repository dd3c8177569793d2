"""Stored texts in any order: right answers and time to first token against a full recompute.

    python -m bench.parts [--quick] --json OUT

Accuracy, of two to four texts put together: `within`, every fact is in one text, and `seams`, a
fact lies where two texts meet, on the shipped checkpoint, which knows facts by words beside each
other; `aliases`, a name in one text and what it stands for in an earlier one, anywhere in either,
on a model written by hand (`bench.bound`). `full` is the dense prefill, stored as one text; `plain`
computes nothing again; `first` is EPIC's choice, `attended` ProphetKV's, `both` ours, each at equal
shares. Time: prefixes of random KV on the shape of Qwen2.5-7B, thin, nothing in memory but digests
and programs, recompute and parts by turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.bound import bound_model
from bench.common import SHAPES, Json, budget_share, finish, median_interval, result_file, table
from bench.random_engine import random_engine, random_prefix, random_tokens
from bench.selection_study import half_widths, interval
from bench.tasks.texts import Texts, alias_texts, ledger_texts, seam_texts
from ckv_jax import Blend, Engine, EngineConfig, Request
from ckv_jax.data.reference import reference_folder
from ckv_jax.identity import random_fingerprint
from ckv_jax.storage.store import ChunkStore

WAYS = ("first", "attended", "both")


def ways(shares: Sequence[float], budgets: Sequence[float]) -> list[tuple[str, float, Blend]]:
    """(name, budget, blend) of every way but `full`."""
    found = []
    for budget in budgets:
        found.append(("plain", budget, Blend(recompute=0)))
        for share in shares:
            found += [
                (way, budget, Blend(recompute=share, choice=way))  # type: ignore[arg-type]
                for way in WAYS
            ]
    return found


def accuracy(
    engine: Engine, name: str, made: Callable[..., Texts], counts: Sequence[int], tokens: int,
    documents: int, asked: Sequence[tuple[str, float, Blend]],
) -> Iterator[Json]:  # fmt: skip
    """A row of right answers for each way, over texts of all `counts`."""
    right: dict[int, list[bool]] = {i: [] for i in range(-1, len(asked))}
    again: dict[int, list[float]] = {i: [] for i in right}
    for seed in range(documents):
        page = made(seed, counts[seed % len(counts)], tokens)
        parts = [engine.ingest(text) for text in page.texts]
        whole = engine.ingest(np.concatenate(page.texts))
        for index in right:
            if index < 0:
                requests = [Request(prefix=whole, suffix=q, budget=1.0) for q in page.questions]
            else:
                _, budget, blend = asked[index]
                requests = [
                    Request(parts=parts, suffix=q, budget=budget, blend=blend)
                    for q in page.questions
                ]
            for result, answer in zip(engine.reprefill(requests), page.answers, strict=True):
                right[index].append(result.token_id == answer)
                again[index].append(result.trace.recomputed_tokens / whole.num_tokens)
    for index, (way, budget, blend) in enumerate([("full", 1.0, Blend(recompute=1)), *asked], -1):
        yield {
            "task": name,
            "way": way,
            "budget": budget,
            "recompute": blend.recompute,
            "recomputed_share": float(np.mean(again[index])) if index >= 0 else 1.0,
            "accuracy": float(np.mean(right[index])),
            "ci95": interval(sum(right[index]), len(right[index])),
            "questions": len(right[index]),
            "half_width": half_widths(len(right[index])),
        }


def all_accuracy(documents: int, tokens: int, shares: Sequence[float]) -> list[Json]:
    """The rows of all tasks."""
    rows: list[Json] = []
    counts = (2, 3, 4)
    with (
        tempfile.TemporaryDirectory() as store,
        Engine.from_pretrained(reference_folder(), store=store) as engine,
    ):
        asked = ways(shares, (1.0, 0.25))
        within = accuracy(
            engine, "within", partial(ledger_texts, questions=8), counts, 2 * tokens,
            max(3, documents // 4), asked,
        )  # fmt: skip
        rows += _said(within)
        seams = accuracy(engine, "seams", seam_texts, counts, tokens, documents, asked)
        rows += _said(seams)
    model = bound_model()
    with tempfile.TemporaryDirectory() as store:
        config = EngineConfig(dtype="float32")
        opened = ChunkStore.open(Path(store))
        with Engine(model, None, opened, random_fingerprint(model), config) as engine:
            made = partial(alias_texts, questions=6)
            aliases = accuracy(
                engine, "aliases", made, counts, 2 * tokens, max(3, documents // 2), asked
            )
            rows += _said(aliases)
    return rows


def _said(rows: Iterator[Json]) -> list[Json]:
    found = list(rows)
    for row in found:
        print(
            f"{row['task']}: {row['way']} at budget {row['budget']:g}, "
            f"{row['recomputed_share']:.1%} recomputed: {row['accuracy']:.3f} right "
            f"of {row['questions']}",
            flush=True,
        )
    return found


def ttft(
    model: str, tokens: int, texts: int, repeats: int, recomputes: int, shares: Sequence[float],
    budgets: Sequence[float],
) -> list[Json]:  # fmt: skip
    """Rows of times: the dense prefill, and each budget and share, by turns."""
    cold = {"device_cache_bytes": 0, "host_cache_bytes": 0}
    settings = [(budget, share) for budget in budgets for share in (0.0, *shares)]
    times: dict[tuple[float, float] | None, list[float]] = {key: [] for key in (None, *settings)}
    told: dict[tuple[float, float], Json] = {}
    with (
        tempfile.TemporaryDirectory() as store,
        random_engine(SHAPES[model], Path(store), **cold) as engine,
    ):
        parts = [
            random_prefix(engine, random_tokens(engine, tokens // texts, seed=i), seed=i)
            for i in range(texts)
        ]
        for turn in range(repeats + 1):  # the first compiles
            suffix = random_tokens(engine, 32, seed=100 + turn).tolist()
            for key in times:
                if key is None:
                    if turn <= recomputes:
                        trace = engine.recompute(Request(parts=parts, suffix=suffix)).trace
                        times[None].append(trace.ttft_ms)
                    continue
                blend = Blend(recompute=key[1])
                asked = Request(parts=parts, suffix=suffix, budget=key[0], blend=blend)
                (result,) = engine.reprefill([asked])
                result.raise_for_error()
                times[key].append(result.trace.ttft_ms)
                told[key] = {
                    "recomputed_tokens": result.trace.recomputed_tokens,
                    "blended_tokens": result.trace.blended_tokens,
                    "ssd_bytes": result.trace.bytes["ssd"],
                    "breakdown_ms": result.trace.breakdown_ms,
                }
            print(f"turn {turn} done", flush=True)
    dense = statistics.median(times[None][1:])
    rows: list[Json] = [
        {"way": "full", "median_ms": dense, "interval": median_interval(times[None][1:])}
    ]
    for key in settings:
        median = statistics.median(times[key][1:])
        rows.append(
            {
                "way": "both" if key[1] else "plain", "budget": key[0], "recompute": key[1],
                "median_ms": median, "interval": median_interval(times[key][1:]),
                "recomputed_share": told[key]["recomputed_tokens"] / tokens,
                "speedup": dense / median, **told[key],
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer texts, under five minutes")
    parser.add_argument("--json", type=result_file, help="write everything here")
    parser.add_argument("--model", choices=SHAPES, default="kv7b-thin", help="shape that is timed")
    parser.add_argument("--tokens", type=int, default=8000, help="of all texts that are timed")
    parser.add_argument("--budgets", type=budget_share, nargs="+", default=(0.25, 1.0))
    parser.add_argument("--documents", type=int, help="sets of texts; 0 leaves accuracy out")
    parser.add_argument("--skip-ttft", action="store_true")
    args = parser.parse_args()
    shares = (0.1, 0.3)
    documents = args.documents if args.documents is not None else (9 if args.quick else 24)
    body: Json = {"texts": [2, 3, 4], "documents": documents}
    if documents:
        body["accuracy"] = all_accuracy(documents, 1024, shares)
    if not args.skip_ttft:
        repeats, recomputes = (2, 1) if args.quick else (3, 2)
        body["ttft"] = ttft(
            args.model, args.tokens, 4, repeats, recomputes, shares, args.budgets
        )  # fmt: skip
        header = ("way", "budget", "recomputed", "median ms", "x of full")
        cells = [
            [r["way"], r.get("budget", ""), r.get("recomputed_share", 1.0), r["median_ms"],
             r.get("speedup", 1.0)]
            for r in body["ttft"]
        ]  # fmt: skip
        print(table(cells, header))
    finish(args, None, body)


if __name__ == "__main__":
    main()
