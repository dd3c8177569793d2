"""Where the time to first token goes (ContiguousKV Figures 5 and 13).

    python -m bench.breakdown --quick --json OUT --plot PNG

Stages as the engine thread sees them: waiting for probe keys, selecting (and syncing), waiting for
critical KV, waiting for compute, and the rest (staging, bookkeeping, dispatch). They add up to the
time to first token. Cold requests, systems by turns.
"""

from __future__ import annotations

import dataclasses

from bench.common import Json, Setting, finish, parser, setting_of, table
from bench.figures import save
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
    result = finish(args, setting, {"rows": rows})
    save("breakdown", result, args.plot)


if __name__ == "__main__":
    main()
