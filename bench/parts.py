"""Stored texts in any order: right answers and time to first token against a full recompute.

    python -m bench.parts [--quick] --json OUT

Accuracy, of two to four texts put together: `within`, every fact is in one text, and `seams`, a
fact lies where two texts meet, on the shipped checkpoint, which knows facts by words beside each
other; `aliases`, a name in one text and what it stands for in an earlier one, anywhere in either,
on a model written by hand (`bench.bound`). `full` is the dense prefill, stored as one text; `plain`
computes nothing again; `first` is EPIC's choice, `attended` ProphetKV's, `both` ours, each at equal
shares. All are asked the same questions: `against` has how many more one answers rightly than
another, with the interval of a paired difference. Time: prefixes of random KV on the shape of
Qwen2.5-7B, thin, nothing in memory but digests and programs, recompute and parts by turns, nine
questions each, none of which any other of them was asked: medians with their intervals.
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
from bench.common import (
    SHAPES,
    Json,
    budget_share,
    finish,
    median_interval,
    positive,
    result_file,
    table,
    whole,
)
from bench.random_engine import random_engine, random_prefix, random_tokens
from bench.selection_study import half_widths, interval, paired_interval
from bench.tasks.texts import Texts, alias_texts, ledger_texts, seam_texts
from ckv_jax import Blend, Engine, EngineConfig, Request
from ckv_jax.data.reference import reference_folder
from ckv_jax.identity import random_fingerprint
from ckv_jax.storage.store import ChunkStore

WAYS = ("first", "attended", "both")
TEXTS = (2, 3, 4)
"""How many are put together where answers are counted."""
TIMED_TEXTS, SUFFIX_TOKENS = 4, 32
"""How many are put together where time is taken, and what is asked over them."""
QUESTIONS = 9
"""Of every time, those that compile not counted: the interval of a median of fewer is their
range."""
ACCURACY_TOKENS = 1024
SHARES, ACCURACY_BUDGETS = (0.1, 0.3), (1.0, 0.25)


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
    every = [("full", 1.0, Blend(recompute=1)), *asked]
    for index, (way, budget, blend) in enumerate(every, -1):
        others = {
            other: right[number]
            for number, (other, its, its_blend) in enumerate(every, -1)
            if number != index
            and (other == "full" or its == budget)
            and (other in ("full", "plain") or its_blend.recompute == blend.recompute)
        }
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
            "against": {name: paired_interval(right[index], of) for name, of in others.items()},
        }


def all_accuracy(documents: int, tokens: int) -> list[Json]:
    """The rows of all tasks."""
    rows: list[Json] = []
    with (
        tempfile.TemporaryDirectory() as store,
        Engine.from_pretrained(reference_folder(), store=store) as engine,
    ):
        asked = ways(SHARES, ACCURACY_BUDGETS)
        within = accuracy(
            engine, "within", partial(ledger_texts, questions=8), TEXTS, 2 * tokens,
            max(3, documents // 4), asked,
        )  # fmt: skip
        rows += _said(within)
        seams = accuracy(engine, "seams", seam_texts, TEXTS, tokens, documents, asked)
        rows += _said(seams)
    model = bound_model()
    with tempfile.TemporaryDirectory() as store:
        config = EngineConfig(dtype="float32")
        opened = ChunkStore.open(Path(store))
        with Engine(model, None, opened, random_fingerprint(model), config) as engine:
            made = partial(alias_texts, questions=6)
            aliases = accuracy(
                engine, "aliases", made, TEXTS, 2 * tokens, max(3, documents // 2), asked
            )
            rows += _said(aliases)
    return rows


def _said(rows: Iterator[Json]) -> list[Json]:
    found = list(rows)
    for row in found:
        print(
            f"{row['task']}: {row['way']} at budget {row['budget']:g}, "
            f"{row['recomputed_share']:.1%} recomputed: {row['accuracy']:.3f} right "
            f"of {row['questions']}"
            + "".join(
                f", {100 * found['difference']:+.1f} points of {name} "
                f"({100 * found['ci95'][0]:+.1f} to {100 * found['ci95'][1]:+.1f})"
                for name, found in row["against"].items()
            ),
            flush=True,
        )
    return found


def ttft(
    model: str, tokens: int, texts: int, questions: int, shares: Sequence[float],
    budgets: Sequence[float],
) -> list[Json]:  # fmt: skip
    """Rows of times: the dense prefill, and each budget and share, by turns, each of which has a
    question of its own: what one has read and chosen helps no other."""
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
        for turn in range(questions + 1):  # the first compiles
            for number, key in enumerate(times):
                asked_before = turn * len(times) + number
                suffix = random_tokens(engine, SUFFIX_TOKENS, seed=100 + asked_before).tolist()
                if key is None:
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
        {
            "way": "full", "median_ms": dense, "interval": median_interval(times[None][1:]),
            "questions": questions,
        }
    ]  # fmt: skip
    for key in settings:
        median = statistics.median(times[key][1:])
        rows.append(
            {
                "way": "both" if key[1] else "plain", "budget": key[0], "recompute": key[1],
                "median_ms": median, "interval": median_interval(times[key][1:]),
                "questions": questions,
                "recomputed_share": told[key]["recomputed_tokens"] / tokens,
                "speedup": dense / median, **told[key],
            }
        )  # fmt: skip
    return rows


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer texts, under five minutes")
    parser.add_argument("--json", type=result_file, help="write everything here")
    parser.add_argument("--model", choices=SHAPES, default="kv7b-thin", help="shape that is timed")
    parser.add_argument("--tokens", type=positive, help="of all texts that are timed")
    parser.add_argument("--budgets", type=budget_share, nargs="+", default=(0.25, 1.0))
    parser.add_argument("--documents", type=whole, help="sets of texts; 0 leaves accuracy out")
    parser.add_argument("--skip-ttft", action="store_true")
    args = parser.parse_args(arguments)
    if args.documents is None:
        args.documents = 9 if args.quick else 24
    args.tokens = args.tokens or (4000 if args.quick else 8000)
    if args.tokens < TIMED_TEXTS:
        parser.error(f"got --tokens {args.tokens}, expected one for each of {TIMED_TEXTS} texts")
    if args.skip_ttft and not args.documents:
        parser.error("got --skip-ttft and --documents 0, which leave nothing to measure")
    return args


def main() -> None:
    """The command."""
    args = parsed()
    body: Json = {"setting": {}}
    if args.documents:
        body["accuracy"] = all_accuracy(args.documents, ACCURACY_TOKENS)
        body["setting"]["accuracy"] = {
            "documents": args.documents, "texts": TEXTS, "shares": SHARES,
            "budgets": ACCURACY_BUDGETS,
            "tokens": {
                "within": 2 * ACCURACY_TOKENS, "seams": ACCURACY_TOKENS,
                "aliases": 2 * ACCURACY_TOKENS,
            },
            "questions": {row["task"]: row["questions"] for row in body["accuracy"]},
        }  # fmt: skip
    if not args.skip_ttft:
        body["setting"]["ttft"] = {
            "model": args.model, "tokens": args.tokens, "texts": TIMED_TEXTS, "shares": SHARES,
            "budgets": args.budgets, "suffix_tokens": SUFFIX_TOKENS, "questions": QUESTIONS,
        }  # fmt: skip
        body["ttft"] = ttft(args.model, args.tokens, TIMED_TEXTS, QUESTIONS, SHARES, args.budgets)
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
