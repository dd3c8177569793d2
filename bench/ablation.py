"""What each part of our systems is worth (ContiguousKV Figure 12).

    python -m bench.ablation --quick --json OUT --plot PNG

With caches of 15% and 36% of the data set, as in the paper: everything; without prefetching
(`w/o P`); with LFU in place of the attention-guided cache (`w/o AC`); without both; and IMPRESS,
beside which the rest is due to aligned chunks. Also reading ahead within periods only (`intra`).
"""

from __future__ import annotations

import dataclasses

from bench.common import OURS, Json, Setting, finish, parser, setting_of, table
from bench.figures import save
from bench.lab import Lab
from bench.turns import DEVICE_SHARE, HOST_SHARE, warm_run
from ckv_jax.config import SystemConfig
from ckv_jax.systems import system_named

QUICK = Setting(prefixes=4, prefix_tokens=2000, repeats=6, budgets=(0.25,), systems=OURS)
FULL = Setting(prefixes=12, repeats=5, budgets=(0.25,), systems=OURS)


def variants(system: SystemConfig) -> dict[str, SystemConfig]:
    """The paper's variants by its names."""
    change = dataclasses.replace
    return {
        "full": system,
        "intra": change(system, prefetch="intra"),
        "w/o P": change(system, prefetch="none"),
        "w/o AC": change(system, policy="lfu"),
        "w/o P, AC": change(system, prefetch="none", policy="lfu"),
    }


def rows_of(lab: Lab) -> list[Json]:
    """A row for each system, variant and budget; `repeats` requests for each prefix."""
    rows = []
    requests = 2 * lab.setting.repeats * lab.setting.prefixes
    for budget in lab.setting.budgets:
        runs = [("impress", "full", system_named("impress"))]
        for name in lab.setting.systems:
            runs += [(name, label, s) for label, s in variants(system_named(name)).items()]
        for name, label, system in runs:
            row = warm_run(lab, system, label, budget, requests).row()
            rows.append(row)
            print(f"{name} {label} at {budget:.0%}: {row['ttft_ms']['mean']:.1f} ms", flush=True)
    for row in rows:
        [base] = [r for r in rows if (r["system"], r["budget"]) == ("impress", row["budget"])]
        row["speedup_over_impress"] = base["ttft_ms"]["mean"] / row["ttft_ms"]["mean"]
    return rows


def main() -> None:
    """The command."""
    args = parser(__doc__, quick=QUICK, full=FULL).parse_args()
    setting = setting_of(args)
    with Lab(setting) as lab:
        rows = rows_of(lab)
    cells = []
    for row in rows:
        numbers = [row["ttft_ms"]["mean"], row["ttft_ms"]["p95"], row["speedup_over_impress"]]
        hits = [row["hit_rate"]["device"], row["hit_rate"]["host"], row["coverage"], row["unused"]]
        cells.append([row["system"], row["variant"], row["budget"], *numbers, *hits])
    header = ["system", "variant", "budget", "mean ms", "p95 ms", "speedup", "device", "host",
              "covered", "unused"]  # fmt: skip
    print(table(cells, header))
    caches = {"device": DEVICE_SHARE, "host": HOST_SHARE}
    result = finish(args, setting, {"caches": caches, "rows": rows})
    save("ablation", result, args.plot)


if __name__ == "__main__":
    main()
