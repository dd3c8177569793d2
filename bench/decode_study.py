"""Which choice should decode make? Accuracy of rules on the shipped checkpoint, without an engine.

    python -m bench.decode_study [--quick] [--json OUT] [--plot PNG]

Every token of a question chooses for itself what it attends to (`bench.decode_oracle`), as decode
does: units are tokens side by side or alike ones, an index scores them, heads choose each or
together, layers each or in periods. The first 16 and the last 64 tokens of the prefix are attended
beside the budget. JSON: `{"rows": [{"name", "rule", "budget", "task", "accuracy", "ci95",
"needle", "attended", "index_bytes", ...}]}`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bench.common import Json, budget_share, existing_path, finish, positive, result_file, table
from bench.decode_oracle import DecodeOracle, DecodeRule
from bench.digests import bytes_per_token
from bench.figures import save
from bench.selection_study import interval
from ckv_jax.data.ledger import FAMILIES
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.errors import CkvError
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.weights import load_pretrained

BUDGETS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)


def rules() -> dict[str, DecodeRule]:
    """Every rule, at no budget yet."""
    base = DecodeRule(budget=1.0)
    named = {
        "means of 8, each head": replace(base, unit_tokens=8),
        "means of 16, each head": base,
        "alike means of 16 (balanced), each head": replace(base, unit="balanced"),
        "alike means of 16 (k-means), each head": replace(base, unit="kmeans"),
        "bounds of 8, each head": replace(base, unit_tokens=8, index="bounds"),
        "bounds of 8, each head, 2 dense layers": replace(
            base, unit_tokens=8, index="bounds", dense_layers=2
        ),
        "bounds of 16, each head": replace(base, index="bounds"),
        "pq16, each head": replace(base, index="pq16"),
        "signs, each head": replace(base, index="signs"),
        "int4, each head": replace(base, index="int4"),
        "keys, each head": replace(base, index="keys"),
        "means, then int4, each head": replace(base, index="int4", coarse=4),
    }
    for name, rule in list(named.items()):
        together = replace(rule, heads="pooled")
        named[name.replace("each head", "heads pooled")] = together
    ours = replace(base, heads="pooled", every=4, layers=3)
    for index in ("int4", "keys"):
        named[f"{index}, heads pooled, period 4"] = replace(ours, index=index)
    for index in ("signs", "pq16"):
        named[f"{index}, heads pooled, period 4"] = replace(ours, index=index)
    for first in ("means", "signs", "pq16"):
        for times in (4, 16) if first == "means" else (2, 4):
            named[f"{first}, then int4 of {times} x, heads pooled, period 4"] = replace(
                ours, index="int4", coarse_index=first, coarse=times
            )
    return named


def index_bytes(rule: DecodeRule, config: ModelConfig) -> float:
    """Bytes of index per prefix token that a step reads, all layers; records in bfloat16."""
    heads, dim = config.num_kv_heads, config.head_dim
    record = heads * dim * 2 / rule.unit_tokens
    layers = config.num_layers * rule.layers / rule.every
    per_record = {"means": record, "bounds": 2 * record}
    if rule.index in per_record:
        return layers * per_record[rule.index]
    fine = bytes_per_token(rule.index, layers=1, kv_heads=heads, dim=dim)
    if not rule.coarse:
        return layers * fine
    first = record
    if rule.coarse_index != "means":
        first = bytes_per_token(rule.coarse_index, layers=1, kv_heads=heads, dim=dim)
    return layers * (first + min(1.0, rule.coarse * rule.budget) * fine)


def study(
    model: Any, named: Mapping[str, DecodeRule], budgets: Sequence[float], pages: Sequence[Any]
) -> list[Json]:
    """One row per rule, budget and task; "all" is every question."""
    found: dict[tuple[str, float], list[np.ndarray]] = {}
    for number, page in enumerate(pages):
        began = time.monotonic()
        oracle = DecodeOracle(model, page)

        def tally(rule: DecodeRule, oracle: DecodeOracle = oracle) -> np.ndarray:
            got = oracle.ask(rule)
            right = got.logits.argmax(-1) == oracle.page.answers
            return np.stack([oracle.page.families, right, got.needle, got.attended], axis=1)

        found.setdefault(("everything", 1.0), []).append(
            tally(DecodeRule(budget=1.0, index="keys"))
        )
        for name, rule in named.items():
            for budget in budgets:
                found.setdefault((name, budget), []).append(tally(replace(rule, budget=budget)))
        print(f"document {number}: {time.monotonic() - began:.0f} s", flush=True)
    rows: list[Json] = []
    for (name, budget), parts in found.items():
        rule = replace(named.get(name, DecodeRule(budget=1.0)), budget=budget)
        about = {"name": name, "budget": budget, "rule": asdict(rule)}
        if name in named:
            about["index_bytes"] = index_bytes(rule, model.config)
        rows += [about | row for row in _rows(np.concatenate(parts))]
    return rows


def _rows(tally: np.ndarray) -> Iterable[Json]:
    for number, family in enumerate((*FAMILIES, "all")):
        mine = tally if family == "all" else tally[tally[:, 0] == number]
        if len(mine):
            right = int(mine[:, 1].sum())
            yield {
                "task": family,
                "questions": len(mine),
                "accuracy": right / len(mine),
                "ci95": interval(right, len(mine)),
                "needle": float(mine[:, 2].mean()),
                "attended": float(mine[:, 3].mean()),
            }


def show(rows: Sequence[Json]) -> str:
    """Right answers in percent, one line per rule."""
    rows = [row for row in rows if row["task"] == "all"]
    budgets = sorted({row["budget"] for row in rows if row["name"] != "everything"})
    cells = {}
    for row in rows:
        cells.setdefault(row["name"], {})[row["budget"]] = f"{100 * row['accuracy']:.1f}"
    full = cells.pop("everything")[1.0]
    lines = [[name, *(by.get(budget, "") for budget in budgets)] for name, by in cells.items()]
    return table([["everything", *[full] * len(budgets)], *lines],
                 ("right, %", *(f"{budget:.2%}" for budget in budgets)))  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one document, two budgets")
    parser.add_argument("--json", type=result_file, help="write the rows here")
    parser.add_argument("--plot", type=result_file, help="draw accuracy against budget here")
    parser.add_argument(
        "--checkpoint", type=existing_path, help="default: the reference checkpoint"
    )
    parser.add_argument("--documents", type=positive, help="ledgers of 50 questions")
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--budgets", nargs="+", type=budget_share)
    args = parser.parse_args()
    folder = args.checkpoint or reference_folder()
    budgets = args.budgets or (BUDGETS[:2] if args.quick else BUDGETS)
    count = args.documents or (1 if args.quick else 2)
    try:
        pages = [demo_ledger(seed, args.tokens, asked=LEARNED) for seed in range(count)]
    except ValueError as error:
        raise SystemExit(f"--tokens: {error}") from error
    try:
        model = load_pretrained(folder, dtype="float32")
    except CkvError as error:
        raise SystemExit(f"{folder}: {error}") from error
    rows = study(model, rules(), budgets, pages)
    print(show(rows))
    found = {
        "checkpoint": folder.name, "tokens": args.tokens, "documents": count, "rows": rows,
    }  # fmt: skip
    save("decode_study", finish(args, None, found), args.plot)


if __name__ == "__main__":
    main()
