"""TTFT against chunk, period, subperiod and prefix length (ContiguousKV Figures 14 to 16).

    python -m bench.sensitivity --quick --json OUT --plot PNG

Cold requests at a budget of 25%, one thing changed at a time. `attention_mass` is the share of the
probe's attention that the selection covers: what a larger chunk gives away. Accuracy by period
and chunk is `bench.accuracy`'s subject. Prefix lengths are compared with IMPRESS, over keys and
values written without a prefill (`bench.long_kv`), which those rows say (`kv`). With the number of
chosen chunks held (`prefix_tokens_fixed_chunks`), scoring is all that grows with the prefix:
digests are scored in one stage and in two, and by two heads of each period alone or one. `--shares`
has the same lengths with a share of each chosen (`prefix_tokens_share`).
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Sequence

import jax

from bench.common import (
    OURS,
    Json,
    Setting,
    budget_share,
    finish,
    parser,
    positive,
    setting_of,
    table,
)
from bench.figures import save
from bench.lab import Lab
from bench.long_kv import stored
from bench.turns import take_turns
from ckv_jax.budget import Budget
from ckv_jax.config import SystemConfig
from ckv_jax.selection.coarse import Coarse
from ckv_jax.systems import SYSTEMS, preset, system_named

QUICK = Setting(
    prefixes=1, prefix_tokens=2000, repeats=4, budgets=(0.25,), systems=("contiguous-kv",)
)
FULL = Setting(prefixes=1, repeats=6, budgets=(0.25, 0.05), systems=OURS)
CHUNKS = (4, 8, 16, 32, 64)
PERIODS = (4, 8, 16)
SUBPERIODS = (1, 2, 4, 8)
LENGTHS = (1000, 4000, 10_000, 32_000)
QUICK_LENGTHS = (1000, 4000)
FIXED_LENGTHS = (4000, 12_000, 32_000)
FIXED_CHUNKS = 16


def chunk_sizes(system: SystemConfig) -> dict[str, SystemConfig]:
    """Figure 14."""
    return {str(c): dataclasses.replace(system, chunk_tokens=c) for c in CHUNKS}


def periods(system: SystemConfig) -> dict[str, SystemConfig]:
    """Figure 15; the subperiod stays."""
    return {str(p): dataclasses.replace(system, period=p) for p in PERIODS}


def subperiods(system: SystemConfig) -> dict[str, SystemConfig]:
    """Figure 16(b), in periods of 8; a pack never spans subperiods."""
    return {
        str(s): dataclasses.replace(
            system, period=8, subperiod=s, pack_layers=min(s, system.pack_layers)
        )
        for s in SUBPERIODS
    }


def sweep(lab: Lab, parameter: str, found: dict[str, SystemConfig]) -> list[Json]:
    """A row for each value and budget."""
    _forget_programs()
    rows = []
    systems = {(system.name, value): system for value, system in found.items()}
    for taken in take_turns(lab, systems):
        row = taken.row()
        keep = ("system", "budget", "ttft_ms", "breakdown_ms", "ssd_bytes", "attention_mass")
        rows.append({"parameter": parameter, "value": int(taken.variant)})
        rows[-1] |= {name: row[name] for name in keep}
    return rows


def prefix_lengths(lab: Lab, lengths: Sequence[int]) -> list[Json]:
    """Figure 16(a), IMPRESS and ours by turns."""
    rows = []
    for length in lengths:
        setting = dataclasses.replace(lab.setting, prefix_tokens=length)
        names = ("impress", *setting.systems)
        _forget_programs()
        with Lab(setting, like=lab) as other:
            systems = {(name, str(length)): system_named(name) for name in names}
            _write(other, systems.values())
            for taken in take_turns(other, systems):
                row = taken.row()
                found = {"parameter": "prefix_tokens", "value": length, "kv": "written"}
                keep = ("system", "budget", "ttft_ms", "breakdown_ms", "ssd_bytes")
                rows.append(found | {name: row[name] for name in keep})
    return rows


def stages(system: SystemConfig, layers: int) -> dict[tuple[str, str], SystemConfig]:
    """A system that scores a digest in one stage and in two, and by two heads and one of each
    period of a model with so many layers, by name; others as they are. Which heads does not matter
    to time."""
    if system.probe != "digest":
        return {(system.name, ""): system}
    found = {}
    for coarse, words in ((None, "in one stage"), (Coarse(fewest=4), "in two stages")):
        choose = dataclasses.replace(system.choose, coarse=coarse)
        found[f"{system.name} {words}"] = dataclasses.replace(system, choose=choose)
    for count, words in ((2, "by two heads"), (1, "by one head")):
        heads = tuple((layer, 0) for layer in range(layers) if layer % system.period < count)
        found[f"{system.name} {words}"] = preset(system.name, heads=heads)
    return {(name, ""): dataclasses.replace(one, name=name) for name, one in found.items()}


def by_length(lab: Lab, lengths: Sequence[int], share: float | None = None) -> list[Json]:
    """Prefix lengths with 16 chunks, or a share, chosen of each, by turns."""
    rows = []
    kind = "prefix_tokens_share" if share else "prefix_tokens_fixed_chunks"
    for length in lengths:
        budget = share or FIXED_CHUNKS / -(-length // 16)
        assert share or Budget.of(budget).chunks(-(-length // 16)) == FIXED_CHUNKS
        setting = dataclasses.replace(lab.setting, prefix_tokens=length, budgets=(budget,))
        _forget_programs()
        layers = lab.config.num_layers
        systems = {
            k: v for name in setting.systems for k, v in stages(SYSTEMS[name], layers).items()
        }
        with Lab(setting, like=lab) as other:
            _write(other, systems.values())
            for taken in take_turns(other, systems):
                row = taken.row()
                found = {"parameter": kind, "value": length, "kv": "written"}
                keep = ("system", "budget", "ttft_ms", "breakdown_ms", "ssd_bytes")
                rows.append(found | {name: row[name] for name in (*keep, "attention_mass")})
    return rows


def _write(lab: Lab, systems: Iterable[SystemConfig]) -> None:
    """Stores a lab's prefixes in the layouts of systems, without a prefill."""
    for system in systems:
        with lab.engine(system) as engine:
            for index in range(lab.setting.prefixes):
                lab.put(index, stored(engine, lab.work.prefix(index)))


def _forget_programs() -> None:
    """Lets go of what was compiled for values that are through: each program is mapped memory, and
    Linux allows a process 65,530 mappings."""
    jax.clear_caches()
    gc.collect()


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument(
        "--lengths", type=positive, nargs="*", help="prefix lengths; none leaves them out"
    )
    p.add_argument(
        "--fixed-lengths",
        type=positive,
        nargs="*",
        help="those of 16 chosen chunks; none: left out",
    )
    p.add_argument(
        "--shares", type=budget_share, nargs="*", default=[], help="chosen of the same lengths"
    )
    p.add_argument("--lengths-only", action="store_true", help="no chunks, periods, subperiods")
    args = p.parse_args()
    setting = setting_of(args)
    rows = []
    with Lab(setting) as lab:
        for name in setting.systems if not args.lengths_only else ():
            system = SYSTEMS[name]
            rows += sweep(lab, "chunk_tokens", chunk_sizes(system))
            rows += sweep(lab, "period", periods(system))
            rows += sweep(lab, "subperiod", subperiods(system))
        lengths = QUICK_LENGTHS if args.quick else LENGTHS
        rows += prefix_lengths(lab, lengths if args.lengths is None else args.lengths)
        fixed = QUICK_LENGTHS[1:] if args.quick else FIXED_LENGTHS
        fixed = fixed if args.fixed_lengths is None else args.fixed_lengths
        for share in (None, *args.shares):
            rows += by_length(lab, fixed, share)
    cells = [
        [row["parameter"], row["value"], row["system"], row["budget"], row["ttft_ms"]["mean"],
         row["ttft_ms"]["p95"], row["ssd_bytes"] / 1e6, row.get("attention_mass", "")]
        for row in rows
    ]  # fmt: skip
    header = ["parameter", "value", "system", "budget", "mean ms", "p95 ms", "SSD MB", "mass"]
    print(table(cells, header))
    result = finish(args, setting, {"rows": rows})
    save("sensitivity", result, args.plot)


if __name__ == "__main__":
    main()
