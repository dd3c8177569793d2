"""Tokens loaded from the SSD, IMPRESS's being 100% (ContiguousKV Table 2).

    python -m bench.io_reduction --quick --json OUT --plot PNG

Counted are the keys and values that requests demanded, in whole tokens (all layers, keys and
values); `with_probe` adds the keys read to choose them, `with_unused` what was read ahead and then
not used. `--rows FILE` takes the cold rows of a `bench.ttft` that was made here by this
code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.common import OURS, Json, Setting, finish, parser, setting_of, table
from bench.figures import save
from bench.turns import cold_rows, rows_option
from ckv_jax.systems import system_named

QUICK = Setting(prefixes=1, repeats=4, systems=("impress", *OURS))
FULL = Setting(prefixes=2, repeats=16, systems=("impress", *OURS), budgets=(0.05, 0.10, 0.25, 0.50))
PAPER = {"SST-2 7B": 0.0621, "SST-2 14B": 0.0664, "RTE 7B": 0.0600, "RTE 14B": 0.0571}


def rows_of(measured: Sequence[Json]) -> list[Json]:
    """Tokens by system and budget, and their share of IMPRESS's, of rows of `bench.measure`.

    Raises SystemExit where a row read nothing, or has none of IMPRESS at its budget beside it.
    """
    rows = []
    budgets = {row["budget"] for row in measured if row["system"] == "impress"}
    if not measured:
        raise SystemExit("there are no rows to compare")
    for row in measured:
        name = f"{row['system']} at {row['budget']:.0%}"
        if not row["ssd_kv_bytes"] or not row["read_amplification"]:
            raise SystemExit(f"{name} read no keys and values from the SSD, got nothing to count")
        if row["budget"] not in budgets:
            raise SystemExit(f"{name} has no row of impress beside it, the measure of all")
        loaded = row["tokens_loaded"]
        with_probe = loaded * (1 + row["ssd_probe_bytes"] / row["ssd_kv_bytes"])
        unused = row["read_amplification_with_unused"] / row["read_amplification"]
        rows.append(
            {
                "system": row["system"],
                "budget": row["budget"],
                "tokens": {
                    "critical": loaded,
                    "with_probe": with_probe,
                    "with_unused": with_probe + loaded * (unused - 1),
                },
            }
        )
    for row in rows:
        [base] = [r for r in rows if (r["system"], r["budget"]) == ("impress", row["budget"])]
        row["share_of_impress"] = {
            name: value / base["tokens"][name] for name, value in row["tokens"].items()
        }
    return rows


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    rows_option(p)
    args = p.parse_args()
    setting = setting_of(args)
    if reading_nothing := [n for n in setting.systems if system_named(n).selector == "none"]:
        p.error(f"got {', '.join(reading_nothing)}, which reads nothing: there is nothing to count")
    if "impress" not in setting.systems:
        setting = dataclasses.replace(setting, systems=("impress", *setting.systems))
    measured, about = cold_rows(setting, args)
    rows = rows_of(measured)
    cells = []
    for row in rows:
        cells.append([row["system"], row["budget"], *row["share_of_impress"].values()])
    print(table(cells, ["system", "budget", "critical", "with probe", "with unused"]))
    result = finish(args, None, about | {"rows": rows, "paper": PAPER})
    save("io_reduction", result, args.plot)


if __name__ == "__main__":
    main()
