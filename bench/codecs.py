"""What codecs save, and what they cost: TTFT by turns in one run, and right answers.

    python -m bench.codecs --quick --json OUT

TTFT: cold requests of `ckv` over structured weights, a prefix stored once with each codec, all of
them asked in turn. Accuracy: ledgers of the reference checkpoint, `--documents` of 50 questions,
at the same budgets. JSON: `{"ttft": [{"codec", "budget", "ttft_ms", "to_none", "ssd_bytes",
...}], "bytes_per_token": {codec: bytes}, "accuracy": [{"codec", "budget", "accuracy", ...}]}`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence

import numpy as np

from bench.accuracy import ask
from bench.common import Json, Setting, finish, parser, setting_of, table, whole
from bench.lab import Lab
from bench.selection_study import interval
from bench.turns import take_turns
from ckv_jax.config import EngineConfig
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.engine import Engine
from ckv_jax.storage.codec import CODECS, codec_named
from ckv_jax.systems import preset

QUICK = Setting(prefixes=1, repeats=6, budgets=(0.25, 0.5, 1.0), systems=("ckv",))
FULL = Setting(prefixes=2, repeats=20, budgets=(0.05, 0.25, 0.5, 1.0), systems=("ckv",))


def ttft(lab: Lab, codecs: Sequence[str]) -> tuple[list[Json], Json]:
    """A row for each codec and budget, and the bytes of a token that each stores."""
    systems = {("ckv", codec): preset("ckv", codec=codec) for codec in codecs}
    rows, sizes = [], {}
    for taken in take_turns(lab, systems):
        layout = taken.layout
        sizes[taken.variant] = layout.stored_bytes * layout.groups / layout.chunk_tokens
        row = taken.row()
        keep = ("budget", "ttft_ms", "breakdown_ms", "ssd_bytes", "attention_mass")
        times = [sample.ttft_ms for sample in taken.samples]
        rows.append({"codec": taken.variant, "median_ms": statistics.median(times)})
        rows[-1] |= {name: row[name] for name in keep}
    plain = {row["budget"]: row["median_ms"] for row in rows if row["codec"] == "none"}
    for row in rows:
        row["to_none"] = row["median_ms"] / plain[row["budget"]] if plain else None
    return rows, sizes


def accuracy(codecs: Sequence[str], budgets: Sequence[float], documents: int) -> list[Json]:
    """Right answers of the reference checkpoint, for each codec and budget."""
    pages = [demo_ledger(seed, 4096, asked=LEARNED) for seed in range(documents)]
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = reference_folder()
        with Engine.from_pretrained(checkpoint, store=folder, config=EngineConfig()) as engine:
            for codec in codecs:
                config = dataclasses.replace(engine.config, system=preset("ckv", codec=codec))
                with engine.variant(config) as served:
                    for budget in budgets:
                        asked = [ask(served, page, budget) for page in pages]
                        right = np.concatenate([part[0] for part in asked])
                        rows.append(
                            {
                                "codec": codec,
                                "budget": budget,
                                "accuracy": float(right.mean()),
                                "ci95": interval(int(right.sum()), len(right)),
                                "questions": len(right),
                                "ssd_bytes_per_question": float(np.mean([p[1] for p in asked])),
                            }
                        )
                        print(f"{codec} at {budget:.0%}: {right.mean():.3f} right", flush=True)
    return rows


def name_of(text: str) -> str:
    """A codec from the command line, a published table or one that its name spells included."""
    try:
        codec_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--codecs", nargs="+", type=name_of, default=list(CODECS), help="tables too")
    p.add_argument("--documents", type=whole, default=8, help="ledgers; 0 leaves accuracy out")
    p.add_argument("--skip-ttft", action="store_true")
    args = p.parse_args()
    setting = setting_of(args)
    if args.skip_ttft and not args.documents:
        p.error("got --skip-ttft and --documents 0, which leave nothing to measure")
    body: Json = {}
    if not args.skip_ttft:
        with Lab(setting) as lab:
            body["ttft"], body["bytes_per_token"] = ttft(lab, args.codecs)
        cells = [
            [row["codec"], row["budget"], row["median_ms"], row["to_none"], row["ssd_bytes"] / 1e6]
            for row in body["ttft"]
        ]
        print(table(cells, ["codec", "budget", "median ms", "to none", "SSD MB"]))
    if args.documents:
        body["accuracy"] = accuracy(args.codecs, setting.budgets, args.documents)
        cells = [[row["codec"], row["budget"], row["accuracy"]] for row in body["accuracy"]]
        print(table(cells, ["codec", "budget", "right"]))
    finish(args, setting, body)


if __name__ == "__main__":
    main()
