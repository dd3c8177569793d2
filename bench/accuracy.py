"""Accuracy of every system, budget and task on a checkpoint, and why.

    python -m bench.accuracy [--quick] [--json OUT]
    python -m bench.accuracy --model DIR --dataset sst2.jsonl rte.jsonl [--json OUT]

The engine answers ledgers whose names were never trained on; a study with masks over the dense
KV (`bench.selection_study`) says which rule of choosing costs what. JSON: `{"rows": [{"system",
"budget", "task", "accuracy", "ci95", "chunk_recall", ...}], "coverage": [...], "study": [...]}`.

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
from bench.common import budget_share, existing_path, finish, positive, result_file
from bench.digests import KINDS, bytes_per_token
from bench.figures import save
from bench.heads import HEADED, headed_system
from bench.kept import Kept, checkpoint_fingerprint
from bench.oracle import Answers, Oracle, Rule
from bench.selection_study import (
    coverage,
    half_widths,
    interval,
    quick_rules,
    rules,
    study,
    tally,
    traces,
)
from bench.tasks.suffixes import lengthened
from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.data.ledger import Ledger
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.model.config import PUBLISHED, ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.request import Request
from ckv_jax.selection.coarse import Coarse
from ckv_jax.systems import SYSTEMS

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
STUDIED = 2
"""Documents of the study, of whose hundred rules differences of ten points and more are read."""
_RECOMPUTED = 4  # questions of each ledger whose whole prompt is recomputed: seconds for each


def rule_of(system: SystemConfig, budget: float) -> Rule:
    """The rule of the study that chooses most nearly as a system does.

    Rivals choose tokens, here chunks of one, in every layer: H2O those of all heads' sums, as the
    engine does, IMPRESS's first three heads for all (without its votes and threshold).
    """
    if system.selector == "h2o":
        return Rule(budget=budget, chunk_tokens=1, every=1)
    if system.selector == "impress":
        return Rule(budget=budget, chunk_tokens=1, every=1, probe="heads3")
    if system.selector != "chunk":
        return Rule(every=1)
    coarse = system.choose.coarse
    return Rule(
        budget=budget,
        chunk_tokens=system.chunk_tokens,
        every=system.period,
        probe={"none": "keys", "pq": "pq16"}.get(system.digest, system.digest),
        window=system.choose.queries,
        layers=system.period if system.heads else min(system.choose.score_layers, system.period),
        only=system.heads,
        survivors=0 if system.heads else _survivors(coarse, budget),
        coarse="keys" if system.digest == "none" else system.digest,
        coarse_window=coarse.queries if coarse else 1,
        coarse_layers=coarse.score_layers if coarse else 1,
    )


def _survivors(coarse: Coarse | None, budget: float) -> int:
    """Chunks that a coarse pass leaves for each that is chosen; 0: all are scored with care."""
    if coarse is None:
        return 0
    left = min(coarse.survivors, math.floor(round(0.25 / budget, 9)))
    return left if left >= (coarse.fewest or coarse.survivors) else 0


def of_depth(system: SystemConfig, share: float, layers: int) -> SystemConfig:
    """A system whose period is that share of so many layers, to the nearest pack."""
    pack = system.pack_layers
    period = max(1, round(share * layers / pack)) * pack
    return replace(system, period=period, subperiod=math.gcd(system.subperiod, period))


class Recall:
    """What the rule of a system gives every layer of one ledger, against what it would choose."""

    def __init__(self, model: Transformer, page: Ledger) -> None:
        self._oracle = Oracle(model, page)
        self._full: dict[int, Answers] = {}

    def of(self, system: SystemConfig, budget: float) -> dict[str, float]:
        """`chunk_recall` and `needle` (see `bench.selection_study.study`), means of questions."""
        rule = rule_of(system, budget)
        if rule.budget >= 1:
            return {"chunk_recall": 1.0, "needle": 1.0}
        size = rule.chunk_tokens
        if size not in self._full:
            self._full[size] = self._oracle.full(size)
        found = tally(self._oracle, rule, self._oracle.ask(rule), self._full[size]).mean(0)
        return {"chunk_recall": float(found[2]), "needle": float(found[3])}


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
    names = ("questions", "lengths", "answers", "families", "needles")
    return replace(page, **{name: getattr(page, name)[:count] for name in names})


def measure(
    engine: Engine,
    recall: Recall,
    pages: Sequence[Ledger],
    systems: Mapping[str, SystemConfig],
    budgets: Sequence[float],
    kept: Kept,
) -> Iterator[dict[str, Any]]:
    """Rows of every system at every budget; systems without one have budget 1."""
    for name, system in systems.items():
        everything = system.selector in ("all", "none")
        with engine.variant(EngineConfig(system=system)) as served:
            for budget in (1.0,) if everything else budgets:
                make = partial(_rows, name, served, recall, pages, budget)
                yield from kept.part(f"{name} at {budget:g}", make)["rows"]


def _rows(
    name: str, engine: Engine, recall: Recall, pages: Sequence[Ledger], budget: float
) -> dict[str, Any]:
    """Rows of one system at one budget, one for each family of questions and one for all."""
    system, began = engine.system, time.monotonic()
    dense = system.selector == "none"
    read = [first(page, _RECOMPUTED) if dense else page for page in pages]
    asked = [ask(engine, page, budget) for page in read]
    right = np.concatenate([part[0] for part in asked])
    given = recall.of(system, budget)
    print(
        f"{name} at {budget:.0%}: {right.mean():.3f} right, "
        f"recall {given['chunk_recall']:.2f}, needle {given['needle']:.2f}, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    common = {
        "system": name,
        "budget": budget,
        "period": system.period if system.chunked else 1,
        **given,
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


def digest_sizes() -> list[dict[str, Any]]:
    """Every digest against the keys of all layers, for a 7B prefix: of all layers, and of those
    that select for `ckv`."""
    seven = PUBLISHED["7B"]
    heads = {"num_heads": seven.num_heads, "num_kv_heads": seven.num_kv_heads}
    heads |= {"head_dim": seven.head_dim, "dtype": "bfloat16"}
    chosen = SYSTEMS["ckv"].layout(num_layers=seven.num_layers, **heads).digest_layers

    def per_token(kind: str, layers: int) -> float:
        heads, dim = seven.num_kv_heads, seven.head_dim
        return bytes_per_token(kind, layers=layers, kv_heads=heads, dim=dim)

    full = per_token("keys", seven.num_layers)
    return [
        {
            "digest": kind,
            "layers": layers,
            "share_of_keys": per_token(kind, layers) / full,
            "mib_per_1000_tokens_7b": 1000 * per_token(kind, layers) / 2**20,
        }
        for kind in KINDS
        if kind != "mean"
        for layers in (seven.num_layers, len(chosen))
    ]


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ledgers, under five minutes")
    parser.add_argument("--json", type=result_file, help="write everything here")
    parser.add_argument("--traces", type=result_file, help="write chosen chunk ids here (npz)")
    parser.add_argument(
        "--plot", type=result_file, help="draw accuracy here, coverage in *_coverage"
    )
    parser.add_argument(
        "--model", type=existing_path, metavar="DIR", help="default: the reference checkpoint"
    )
    parser.add_argument(
        "--dataset", type=Path, nargs="+", metavar="FILE", help="JSONL of labelled texts"
    )
    parser.add_argument(
        "--shots", type=positive, default=100, help="examples in a prefix of a dataset"
    )
    parser.add_argument("--prefixes", type=positive, default=4, help="of each dataset")
    parser.add_argument(
        "--questions", type=positive, help="of each dataset, at most half of its lines"
    )
    parser.add_argument(
        "--period-share", type=budget_share, metavar="SHARE", help="a period, as a share of layers"
    )
    parser.add_argument("--documents", type=positive, help="ledgers of 50 questions")
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--suffix-tokens", type=positive, help="sentences before each question")
    parser.add_argument("--systems", nargs="+", choices=(*SYSTEMS, *HEADED), default=list(PRUNING))
    parser.add_argument("--budgets", nargs="+", type=budget_share, help="all; three if --quick")
    parser.add_argument("--skip-study", action="store_true")
    args = parser.parse_args()
    if args.dataset and (args.plot or args.traces):
        parser.error("--plot and --traces are of ledgers, not of a --dataset")
    headed = [name for name in args.systems if name in HEADED]
    if headed and (args.model or args.dataset or args.period_share):
        parser.error(f"{headed[0]} is profiled on ledgers for the reference checkpoint, as it is")
    folder = args.model or reference_folder()
    try:
        systems = {
            name: headed_system(name, folder) if name in HEADED else SYSTEMS[name]
            for name in args.systems
        }
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
    result = finish(args, None, about | report)
    if args.plot:
        save("accuracy", result, args.plot)
        beside = args.plot.with_name(f"{args.plot.stem}_coverage{args.plot.suffix}")
        save("accuracy_coverage", result, beside)
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
        pages = [demo_ledger(seed, args.tokens, asked=LEARNED) for seed in range(count)]
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
        "digests": digest_sizes(),
    }
    named = {} if args.skip_study else quick_rules() if args.quick else rules()
    kept = Kept(
        args.json,
        report
        | {"systems": [str(s) for s in systems.values()], "budgets": budgets}
        | {"rules": [f"{name}: {rule}" for name, rule in named.items()]}
        | {"model": checkpoint_fingerprint(folder)},
    )
    report |= kept.said()
    model = load_pretrained(folder, dtype="float32")
    recall = Recall(model, pages[0])
    with tempfile.TemporaryDirectory() as store:
        config = EngineConfig(system="ckv")
        with Engine.from_pretrained(folder, store=store, config=config) as engine:
            report["rows"] = list(measure(engine, recall, pages, systems, budgets, kept))
    print(summary(report["rows"]))
    report["coverage"] = [
        row for budget in (0.05, 0.25) for row in coverage(model, pages[:2], budget=budget)
    ]
    if not args.skip_study:
        studied = pages[:STUDIED]
        report["study_questions"] = sum(len(page.answers) for page in studied)
        made = kept.part("study", lambda: {"rows": study(model, named, studied)})
        report["study"] = made["rows"]
    if args.traces:
        two = {name: systems.get(name, SYSTEMS[name]) for name in ("contiguous-kv", "ckv")}
        chosen = {name: rule_of(system, 0.05) for name, system in two.items()}
        traces(model, chosen, pages, args.traces)
    return report


if __name__ == "__main__":
    main()
