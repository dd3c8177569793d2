"""Budgets that follow the question, on texts that did not calibrate them.

    python -m bench.calibration --texts A.txt B.txt C.txt --json bench/results/calibration.json

Each text in turn is held out: the others calibrate (`Engine.calibrate`), and questions about the
held-out one are asked at each fidelity and at fixed budgets: passages begun again, and pieces of
what follows its prefix. A row says how many first tokens are full attention's, and which share of
the KV was read for that: packs of all budgets that were tried, each once, from an engine without
anything cached before. `ratio` divides that by the bytes of the smallest fixed budget that agrees
as often (1.0 always does).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.common import (
    Json,
    existing_path,
    finish,
    positive,
    result_file,
    table,
)
from bench.fidelity_tasks import continuations, read_texts
from ckv_jax import Engine, Request
from ckv_jax.data import smollm2
from ckv_jax.fidelity import BUDGETS, budget_for
from ckv_jax.storage.prefix import Prefix

FIDELITIES = (0.9, 0.95, 0.98)
PASSAGE = 24


def questions_of(name: str, tokens: np.ndarray, length: int, count: int) -> list[list[int]]:
    """Half of them passages of the prefix begun again, half pieces of what follows it."""
    rng = np.random.default_rng(7)
    recalls = [
        tokens[at : at + PASSAGE].tolist()
        for at in rng.integers(64, length - 64 - PASSAGE, count // 2)
    ]
    after = continuations(name, tokens, length, count - count // 2)
    return recalls + [question.suffix.tolist() for question in after.questions]


def answer(
    engine: Engine, prefix: Prefix, suffix: list[int], budget: float | None, fidelity: float | None
) -> tuple[int, float, float]:
    """(first token, budget, bytes read) of one question in an engine that has nothing cached."""
    with engine.variant(engine.config) as fresh:
        if fidelity is not None:
            budget = budget_for(fresh, prefix, suffix, fidelity).budget
        assert budget is not None
        [result] = fresh.reprefill([Request(prefix=prefix, suffix=suffix, budget=budget)])
        result.raise_for_error()
        return result.token_id, budget, fresh.stats().reads * fresh.layout.pack_bytes


def rows_of(engine: Engine, texts: dict[str, np.ndarray], args: argparse.Namespace) -> list[Json]:
    """A row of each held-out text and way to set a budget."""
    prefixes = {name: engine.ingest(tokens[: args.prefix_tokens]) for name, tokens in texts.items()}
    rows: list[Json] = []
    for name, tokens in texts.items():
        engine.calibrate(
            [prefix for other, prefix in prefixes.items() if other != name],
            questions=args.calibrate,
        )
        asked = questions_of(name, tokens, args.prefix_tokens, args.questions)
        full = [answer(engine, prefixes[name], suffix, 1.0, None) for suffix in asked]
        for budget, fidelity in [(b, None) for b in BUDGETS] + [(None, f) for f in FIDELITIES]:
            found = [answer(engine, prefixes[name], s, budget, fidelity) for s in asked]
            same = [ours[0] == theirs[0] for ours, theirs in zip(found, full, strict=True)]
            rows.append(
                {
                    "text": name,
                    "fidelity": fidelity,
                    "fixed": budget,
                    "questions": len(asked),
                    "agree": float(np.mean(same)),
                    "budget": float(np.mean([one[1] for one in found])),
                    "bytes": float(np.mean([one[2] for one in found])),
                    "full_bytes": float(np.mean([one[2] for one in full])),
                }
            )
            print(
                f"{name} {budget or f'fidelity {fidelity}'}: {np.mean(same):.1%} agree", flush=True
            )
    return rows


def summary(rows: Sequence[Json]) -> list[Json]:
    """Means over the texts, and each fidelity's bytes over those of a fixed budget that does as
    well."""
    found: list[Json] = []
    for fidelity, fixed in dict.fromkeys((row["fidelity"], row["fixed"]) for row in rows):
        mine = [row for row in rows if (row["fidelity"], row["fixed"]) == (fidelity, fixed)]
        one: Json = {"fidelity": fidelity, "fixed": fixed}
        one |= {key: float(np.mean([row[key] for row in mine])) for key in ("agree", "budget")}
        one["share"] = float(np.mean([row["bytes"] / row["full_bytes"] for row in mine]))
        found.append(one)
    for one in found:
        if one["fidelity"] is not None:
            well = [x["share"] for x in found if x["fixed"] and x["agree"] >= one["agree"]]
            one["ratio"] = one["share"] / min([*well, 1.0])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", type=existing_path, help="checkpoint; default: SmolLM2, fetched")
    p.add_argument("--texts", type=existing_path, nargs="+", required=True, help="three or more")
    p.add_argument("--prefix-tokens", type=positive, default=4000)
    p.add_argument("--questions", type=positive, default=100, help="of each held-out text")
    p.add_argument("--calibrate", type=positive, default=200, help="questions of a calibration")
    p.add_argument("--json", type=result_file)
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or smollm2.fetch()
        with Engine.from_pretrained(model, store=f"{folder}/store") as opened:
            config = replace(opened.config, device_cache_bytes=1 << 30)
            os.environ["XDG_CACHE_HOME"] = folder  # the user's own calibration stays
            texts = {
                name: np.asarray(opened.encode(text[: 20 * args.prefix_tokens], begins=True))
                for name, text in read_texts(args.texts).items()
            }
            with opened.variant(config) as engine:
                rows = rows_of(engine, texts, args)
    found = summary(rows)
    names = ("fidelity", "fixed", "agree", "budget", "share", "ratio")
    print(table([[one.get(name) or "" for name in names] for one in found], names))
    about = {
        "prefix_tokens": args.prefix_tokens,
        "questions": args.questions,
        "calibrate": args.calibrate,
        "texts": sorted(texts),
    }
    finish(args, None, {"setting": about, "rows": rows, "summary": found})


if __name__ == "__main__":
    main()
