"""Where the time to first token goes (ContiguousKV Figures 5 and 13).

    python -m bench.breakdown --quick --json OUT --plot PNG

Stages as the engine thread sees them: waiting for probe keys, selecting (and syncing), waiting for
critical KV, waiting for compute, and the rest (staging, bookkeeping, dispatch). They add up to the
time to first token. Cold requests, systems by turns; `--rows FILE` takes those of a `bench.ttft`
that was made here by this code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.common import Json, Setting, finish, parser, setting_of, table
from bench.figures import save
from bench.turns import cold_rows, rows_option
from ckv_jax.trace import STAGES

SYSTEMS_SHOWN = ("impress", "contiguous-kv", "ckv")
QUICK = Setting(prefixes=1, repeats=4, systems=SYSTEMS_SHOWN)
FULL = Setting(prefixes=1, repeats=12, systems=SYSTEMS_SHOWN, budgets=(0.05, 0.10, 0.25, 0.50))
PARTS = (*STAGES, "other")


def rows_of(measured: Sequence[Json]) -> list[Json]:
    """Mean ms and share of each stage, by system and budget, of rows of `bench.measure`."""
    rows = []
    for row in measured:
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
    p = parser(__doc__, quick=QUICK, full=FULL)
    rows_option(p)
    args = p.parse_args()
    setting = setting_of(args)
    setting = dataclasses.replace(
        setting, systems=tuple(name for name in setting.systems if name != "recompute")
    )
    measured, about = cold_rows(setting, args)
    rows = rows_of(measured)
    header = ["system", "budget", "TTFT ms", *PARTS]
    cells = [
        [r["system"], r["budget"], r["ttft_ms"]["mean"], *(r["breakdown_ms"][p] for p in PARTS)]
        for r in rows
    ]
    print(table(cells, header))
    result = finish(args, None, about | {"rows": rows})
    save("breakdown", result, args.plot)


if __name__ == "__main__":
    main()
