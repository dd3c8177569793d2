"""Bytes read for each byte needed, request by request (ContiguousKV Figure 4).

    python -m bench.read_amplification --quick --json OUT --plot PNG

A request's read amplification is what it demanded of the SSD over the keys and values of important
tokens in it. Where whole chunks take part in attention it is 1 by construction; `with_unused` also
counts what was read ahead and not used. A request that used nothing of what it read has no ratio:
`requests_in_vain` counts them, and `of_all_bytes`, all that was read over all that was needed, has
their bytes as well. Cold, and with caches (`warm`), where the few tokens that are missing still
cost whole chunks: the paper's extreme values.
"""

from __future__ import annotations

import numpy as np

from bench.common import (
    Json,
    Setting,
    finish,
    parser,
    setting_of,
    summary,
    table,
)
from bench.figures import save
from bench.lab import Lab
from bench.turns import Taken, take_turns, warm_requests
from bench.warm import Rounds, one_round, taken
from ckv_jax.systems import system_named

SHOWN = ("impress", "as-h2o-lfu", "contiguous-kv", "ckv")
QUICK = Setting(prefixes=4, prefix_tokens=2000, repeats=8, budgets=(0.25,), systems=SHOWN)
FULL = Setting(prefixes=8, repeats=24, budgets=(0.25, 0.05), systems=SHOWN)
EDGES = (1, 2, 4, 8, 16, 32, 64)
MOST_FILLING = 4
"""Times the measured requests: at most so many fill the caches before."""


def row_of(part: Taken) -> Json:
    """The distribution over requests that used any of what they read; None where none did."""
    read = [sample for sample in part.samples if sample.pack_bytes]
    used = [sample for sample in read if sample.needed_bytes]
    values = [sample.read_amplification for sample in used]
    unused = [sample.pack_bytes / sample.needed_bytes for sample in used]
    counts, _ = np.histogram(np.maximum(values, 1.0), bins=(*EDGES, np.inf))
    needed = sum(sample.needed_bytes for sample in read)
    return {
        "system": part.system.name,
        "budget": part.budget,
        "variant": part.variant,
        "read_amplification": summary(values) if used else None,
        "with_unused": summary(unused) if used else None,
        "of_all_bytes": sum(sample.pack_bytes for sample in read) / needed if needed else None,
        "histogram": {"edges": list(EDGES), "share": (counts / max(1, len(used))).tolist()},
        "requests": len(part.samples),
        "requests_that_read": len(read),
        "requests_in_vain": len(read) - len(used),
    }


def main() -> None:
    """The command."""
    args = parser(__doc__, quick=QUICK, full=FULL).parse_args()
    setting = setting_of(args)
    systems = {(name, "cold"): system_named(name) for name in setting.systems}
    rows = []
    with Lab(setting) as lab:
        rows += [row_of(part) for part in take_turns(lab, systems)]
        how = Rounds(rounds=1, fill=setting.repeats, fill_most=MOST_FILLING * setting.repeats)
        asked = warm_requests(lab, how.fill + setting.repeats)
        for name in setting.systems:
            system, budget = system_named(name), setting.budgets[0]
            rounds = [one_round(lab, system, budget, asked, how)]
            rows.append(row_of(taken(lab, (name, "warm"), system, budget, rounds)))
    cells = []
    for row in rows:
        found, whole = row["read_amplification"] or {}, row["with_unused"] or {}
        numbers = [found.get(name) for name in ("mean", "p50", "p95", "max")]
        cells.append(
            [row["system"], row["variant"], row["budget"], *numbers, whole.get("mean"),
             row["requests_in_vain"]]
        )  # fmt: skip
    header = ["system", "variant", "budget", "mean", "p50", "p95", "max", "with unused", "in vain"]
    print(table(cells, header))
    result = finish(args, setting, {"rows": rows})
    save("read_amplification", result, args.plot)


if __name__ == "__main__":
    main()
