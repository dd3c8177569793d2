"""Accuracy of every system, budget and task on a checkpoint.

    python -m bench.accuracy [--quick] [--json OUT]
    python -m bench.accuracy --model DIR --dataset sst2.jsonl rte.jsonl [--json OUT]

The engine answers ledgers whose names were never trained on. JSON: `{"rows": [{"system", "budget",
"task", "accuracy", "ci95", "ssd_bytes_per_question", ...}]}`.

With `--dataset` it is asked few-shot in place of ledgers (`bench.few_shot`): files of `{"text",
"label"}` lines, each named after its task (sst2, subj, trec, rte). A file that is not there or is
malformed has a row with the reason, the others are asked, and the exit status is 3; where none can
be asked, nothing is written.

`--period-share` sets every period to a share of the model's depth, so that models of different
depth compare: the papers' 8 layers are 0.29 of the 28 of a 7B, and half of the shipped 16.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import few_shot
from bench.common import (
    add_systems,
    budget_share,
    command,
    existing_path,
    finish,
    half_widths,
    interval,
    positive,
    result_file,
)
from bench.figures import save
from bench.kept import Kept, checkpoint_fingerprint
from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.data import ledger as words
from ckv_jax.data.ledger import Ledger
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.model.config import ModelConfig
from ckv_jax.request import Request
from ckv_jax.systems import system_named

_FILLERS = np.array([words.WORD_IDS[word] for word in words.FILLERS], np.int32)
DOT = np.int32(words.WORD_IDS["."])
_SENTENCE = 6  # words and full stop
BUDGETS = (0.05, 0.10, 0.25, 0.50, 1.0)
PAPER_LOSS = {
    "contiguous-kv": {0.05: 5.62, 0.10: 3.56, 0.25: 1.21, 0.50: 0.04},
    "impress": {0.05: 13.31, 0.10: 8.37, 0.25: 4.79, 0.50: 1.67},
    "as-h2o-lfu": {0.05: 15.85, 0.10: 10.64, 0.25: 4.77, 0.50: 2.08},
}
"""Points below AttentionStore, means of models and tasks (ContiguousKV §5.2, Figure 9): its own
decline, and that plus what it gains on the others."""
PRUNING = ("recompute", "as-lru", "as-h2o-lfu", "impress", "contiguous-kv", "ckv")
"""Systems whose answers may differ: H2O's are the same with either cache, and those that choose at
every token are `bench.decode_accuracy`'s."""
_RECOMPUTED = 4  # questions of each ledger whose whole prompt is recomputed: seconds for each


def lengthened(page: Ledger, tokens: int, seed: int = 0) -> Ledger:
    """`page` with every suffix `tokens` long: sentences of filler words, then the question.

    The sentence before the question ends with a full stop. Raises ValueError if a question is
    longer than `tokens`.
    """
    longest = int(page.lengths.max(initial=0))
    if longest > tokens:
        raise ValueError(f"got suffixes of {tokens} tokens, expected at least {longest}")
    rng = np.random.default_rng((seed, tokens, 11))
    suffixes = rng.choice(_FILLERS, (len(page.answers), tokens))
    for row, question, length in zip(suffixes, page.questions, page.lengths, strict=True):
        row[tokens - length - 1 :: -_SENTENCE] = DOT
        row[tokens - length :] = question[:length]
    return replace(
        page, questions=suffixes.astype(np.int32), lengths=np.full_like(page.lengths, tokens)
    )


def of_depth(system: SystemConfig, share: float, layers: int) -> SystemConfig:
    """A system whose period is that share of so many layers, to the nearest pack; itself, if it
    selects in every layer."""
    if system.period == 1:
        return system
    pack = system.pack_layers
    period = max(1, round(share * layers / pack)) * pack
    return replace(system, period=period, subperiod=math.gcd(system.subperiod, period))


def ask(engine: Engine, page: Ledger, budget: float) -> tuple[np.ndarray, float]:
    """Right answers [Q], and bytes from the SSD for each question."""
    prefix = engine.ingest(page.tokens)
    requests = [
        Request(prefix=prefix, suffix=question[:length].tolist(), budget=budget)
        for question, length in zip(page.questions, page.lengths, strict=True)
    ]
    results = engine.reprefill(requests)
    right = np.array([r.token_id for r in results]) == page.answers
    batches = {id(r.trace.bytes): r.trace for r in results}.values()
    ssd = sum(trace.bytes["ssd"] for trace in batches) / len(requests)
    return right, ssd


def first(page: Ledger, count: int) -> Ledger:
    """The ledger with its first `count` questions; families take turns in them."""
    names = ("questions", "lengths", "answers", "families")
    return replace(page, **{name: getattr(page, name)[:count] for name in names})


def measure(
    engine: Engine,
    pages: Sequence[Ledger],
    systems: Mapping[str, SystemConfig],
    budgets: Sequence[float],
    kept: Kept,
) -> Iterator[dict[str, Any]]:
    """Rows of every system at every budget; systems without one have budget 1."""
    for name, system in systems.items():
        everything = system.computes_all or system.own.selects == "all"
        with engine.variant(EngineConfig(system=system)) as served:
            for budget in (1.0,) if everything else budgets:
                make = partial(_rows, name, served, pages, budget)
                yield from kept.part(f"{name} at {budget:g}", make)["rows"]


def _rows(name: str, engine: Engine, pages: Sequence[Ledger], budget: float) -> dict[str, Any]:
    """Rows of one system at one budget, one for each family of questions and one for all."""
    system, began = engine.system, time.monotonic()
    dense = system.computes_all
    read = [first(page, _RECOMPUTED) if dense else page for page in pages]
    asked = [ask(engine, page, budget) for page in read]
    right = np.concatenate([part[0] for part in asked])
    print(
        f"{name} at {budget:.0%}: {right.mean():.3f} right, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    common = {
        "system": name,
        "budget": budget,
        "period": system.period if system.chunked else 1,
        "ssd_bytes_per_question": float(np.mean([part[1] for part in asked])),
    }
    kinds = np.concatenate([page.families for page in read])
    rows = []
    for index, family in enumerate((*LEARNED, "all")):
        mine = right if family == "all" else right[kinds == index]
        rows.append(common | {
            "task": family,
            "accuracy": float(mine.mean()),
            "ci95": interval(int(mine.sum()), len(mine)),
            "questions": len(mine),
        })  # fmt: skip
    return {"rows": rows}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Points lost against full KV, a line per system, the paper's below them."""
    total = [row for row in rows if row["task"] == "all"]
    found = {(row["system"], row["budget"]): row["accuracy"] for row in total}
    dense = [row for row in total if row["budget"] == 1.0]
    if not dense:
        return ""
    full = max(dense, key=lambda row: row["questions"])["accuracy"]  # recompute answers only a few
    lines = [f"full KV: {full:.1%} right; points lost at each budget:"]
    for name in dict.fromkeys(system for system, _ in found):
        lost = {b: 100 * (full - v) for (s, b), v in found.items() if s == name and b < 1}
        if lost:
            lines.append(f"{name:>14} " + "  ".join(f"{b:.0%}: {v:5.2f}" for b, v in lost.items()))
    lines.append("and in the paper, with other models and tasks:")
    for name, published in PAPER_LOSS.items():
        lines.append(f"{name:>14} " + "  ".join(f"{b:.0%}: {v:5.2f}" for b, v in published.items()))
    return "\n".join(lines)


def main() -> None:
    parser = command(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ledgers, under five minutes")
    parser.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    parser.add_argument(
        "--model", type=existing_path, metavar="DIR", help="model (default: reference checkpoint)"
    )
    parser.add_argument(
        "--dataset", type=Path, nargs="+", metavar="FILE", help="JSONL files of labelled texts"
    )
    parser.add_argument(
        "--shots", type=positive, default=100, help="examples in each prefix of a dataset"
    )
    parser.add_argument("--prefixes", type=positive, default=4, help="prefixes of each dataset")
    parser.add_argument(
        "--questions", type=positive, help="questions of each dataset, at most half of its lines"
    )
    parser.add_argument(
        "--period-share", type=budget_share, metavar="SHARE", help="layers of a period, as a share"
    )
    parser.add_argument("--documents", type=positive, help="ledgers, of 50 questions each")
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of a ledger")
    parser.add_argument(
        "--suffix-tokens", type=positive, help="tokens of the sentences before each question"
    )
    add_systems(parser, PRUNING)
    parser.add_argument(
        "--budgets", nargs="+", type=budget_share, help="budgets (default: all; --quick: three)"
    )
    args = parser.parse_args()
    if args.dataset and args.plot:
        parser.error("got --plot with --dataset, expected one of them: --plot draws ledgers")
    folder = args.model or reference_folder()
    try:
        systems = {name: system_named(name) for name in args.systems}
        if args.period_share:
            layers = ModelConfig.from_hf(folder).num_layers
            systems = {n: of_depth(s, args.period_share, layers) for n, s in systems.items()}
        report = (
            of_files(folder, systems, args) if args.dataset else of_ledgers(folder, systems, args)
        )
    except CkvError as error:
        raise SystemExit(f"{folder}: {error}") from error
    if all("why_skipped" in row for row in report["rows"]):
        print("no file can be asked: nothing is written")
        raise SystemExit(3)
    about = {"checkpoint": folder.name, "paper_points_lost": PAPER_LOSS}
    result = finish(args, about | report)
    save("accuracy", result, args.plot)
    Kept(args.json, {}).forget()
    if any("why_skipped" in row for row in report["rows"]):
        raise SystemExit(3)


def of_files(
    folder: Path, systems: Mapping[str, SystemConfig], args: argparse.Namespace
) -> dict[str, Any]:
    """The result of a run over `--dataset`."""
    size = few_shot.Size(
        shots=args.shots,
        prefixes=args.prefixes,
        questions=args.questions or (32 if args.quick else 256),
    )
    budgets = args.budgets or (BUDGETS[:3] if args.quick else BUDGETS)
    with tempfile.TemporaryDirectory() as store:
        config = EngineConfig(system="ckv")
        with Engine.from_pretrained(folder, store=store, config=config) as engine:
            rows = list(few_shot.measure(engine, args.dataset, systems, budgets, size))
    for row in rows:
        if "why_skipped" in row:
            print(f"{row['dataset']} skipped: {row['why_skipped']}")
    print(summary([row for row in rows if "why_skipped" not in row]))
    return {"few_shot": asdict(size), "rows": rows}


def of_ledgers(
    folder: Path, systems: Mapping[str, SystemConfig], args: argparse.Namespace
) -> dict[str, Any]:
    """The result of a run over generated ledgers."""
    budgets = args.budgets or (BUDGETS[:3] if args.quick else BUDGETS)
    count = args.documents or (2 if args.quick else 6)
    try:
        pages = [demo_ledger(seed, args.tokens) for seed in range(count)]
    except ValueError as error:
        raise SystemExit(f"--tokens: {error}") from error
    if args.suffix_tokens:
        pages = [lengthened(page, args.suffix_tokens) for page in pages]
    report: dict[str, Any] = {
        "checkpoint": folder.name,
        "tokens": args.tokens,
        "suffix_tokens": args.suffix_tokens,
        "documents": count,
        "questions": sum(len(page.answers) for page in pages),
        "half_width": half_widths(sum(len(page.answers) for page in pages)),
    }
    kept = Kept(
        args.json,
        report
        | {"systems": [str(s) for s in systems.values()], "budgets": budgets}
        | {"model": checkpoint_fingerprint(folder)},
    )
    report |= kept.said()
    with tempfile.TemporaryDirectory() as store:
        config = EngineConfig(system="ckv")
        with Engine.from_pretrained(folder, store=store, config=config) as engine:
            report["rows"] = list(measure(engine, pages, systems, budgets, kept))
    print(summary(report["rows"]))
    return report


if __name__ == "__main__":
    main()
