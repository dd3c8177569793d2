"""Where the time to first token goes (ContiguousKV Figures 5 and 13).

    python -m bench.breakdown --quick --json OUT --plot PNG

Stages as the engine thread sees them: waiting for probe keys, selecting (and syncing), waiting for
critical KV, waiting for compute, and the rest (staging, bookkeeping, dispatch). They add up to the
time to first token. Cold requests, systems by turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.common import Json, Setting, finish, parser, save_plot, setting_of, table
from bench.lab import Lab
from bench.turns import take_turns
from ckv_jax.systems import system_named
from ckv_jax.trace import STAGES

SYSTEMS_SHOWN = ("impress", "contiguous-kv", "ckv")
QUICK = Setting(prefixes=1, repeats=4, systems=SYSTEMS_SHOWN)
FULL = Setting(prefixes=1, repeats=12, systems=SYSTEMS_SHOWN, budgets=(0.05, 0.10, 0.25, 0.50))
PARTS = (*STAGES, "other")


def rows_of(lab: Lab) -> list[Json]:
    """Mean ms and share of each stage, by system and budget."""
    systems = {(name, "default"): system_named(name) for name in lab.setting.systems}
    rows = []
    for taken in take_turns(lab, systems):
        row = taken.row()
        spent = row["breakdown_ms"]
        total = sum(spent.values())
        shares = {name: spent[name] / total for name in PARTS}
        rows.append(
            {
                "system": row["system"],
                "budget": row["budget"],
                "ttft_ms": row["ttft_ms"],
                "breakdown_ms": spent,
                "share": shares,
                "io_share": shares["probe_io"] + shares["critical_io_wait"],
            }
        )
    return rows


def draw(figure: Any, rows: Sequence[Json]) -> None:
    """Stacked shares, one bar a system and budget."""
    axis = figure.subplots()
    names = [f"{row['system']}\n{row['budget']:.0%}" for row in rows]
    bottom = [0.0] * len(rows)
    for part in PARTS:
        values = [row["share"][part] for row in rows]
        axis.bar(names, values, bottom=bottom, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axis.set(ylabel="share of TTFT", ylim=(0, 1))
    axis.legend(ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, 1.12))


def main() -> None:
    """The command."""
    args = parser(__doc__, quick=QUICK, full=FULL).parse_args()
    setting = setting_of(args)
    setting = dataclasses.replace(
        setting, systems=tuple(name for name in setting.systems if name != "recompute")
    )
    with Lab(setting) as lab:
        rows = rows_of(lab)
    header = ["system", "budget", "TTFT ms", *PARTS]
    cells = [
        [r["system"], r["budget"], r["ttft_ms"]["mean"], *(r["breakdown_ms"][p] for p in PARTS)]
        for r in rows
    ]
    print(table(cells, header))
    finish(args, setting, {"rows": rows})
    save_plot(args.plot, lambda figure: draw(figure, rows), size=(9, 4.5))


if __name__ == "__main__":
    main()
