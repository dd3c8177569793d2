"""Time to first token of every system and budget, with both floors (ContiguousKV Figures 10, 11).

    python -m bench.ttft --quick --json OUT

Systems take turns, request by request, over the same prefixes and questions. `default` rows are
cold: no pack is kept from one request to the next and all reads are direct; digests of `ckv` stay
in memory (`digest_bytes` says how much) and IMPRESS's reordering is done before. `no-prefetch` and
`intra` rows take the reading ahead away again, `always` has `ckv` look ahead also where that does
not pay. `warm` rows have a device cache of 15% and a host cache of 36% of the data set, requests
drawn normally over the prefixes, digests and buffers paid from the same memory, and know nothing
of earlier runs.

What the speed-ups hang on and the papers do not settle is the traffic: `--clustering` and
`--stability` set it (see `bench.common.Setting`), and `--sweep-traffic` runs the smallest budget
over a range of both. Its result has a row for every point, in `traffic`.

The compute floor is a replay of the bare jitted calls of a request, back to back with everything
on the device (`bench.floor`); a recompute is its own floor. The I/O floor is the bytes that must be
read over fio's bandwidth at that block size, on the same disk in the same run. `ratio_to_floor` is
the median TTFT over the larger floor, `overhead_ms_per_layer` what it is above that floor, by layer
and request. `speedup` divides mean TTFTs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.common import (
    OURS,
    RIVALS,
    Json,
    Setting,
    finish,
    parser,
    setting_of,
    table,
)
from bench.disk import Disk
from bench.figures import save
from bench.floor import compute_floor_ms
from bench.kept import Kept, disk_of
from bench.lab import Lab
from bench.turns import Taken, take_turns, warm_run
from ckv_jax import compilation_cache
from ckv_jax.config import PolicyName, SystemConfig
from ckv_jax.systems import system_named

QUICK = Setting(prefixes=1, repeats=5)
FULL = Setting(prefixes=2, repeats=16, budgets=(0.05, 0.10, 0.25, 0.50))

WARM_TOKENS = 2000
"""Of each of the many prefixes of a warm run."""

TRAFFIC = ((1.0, 0.0), (4.0, 0.0), (1.0, 0.8), (2.0, 0.8))
"""Clustering and stability of `--sweep-traffic`: what both papers' numbers leave open."""


def variants(system: SystemConfig) -> dict[str, SystemConfig]:
    """A system as it is, and with its reading ahead taken away again."""
    found = {"default": system}
    if system.name in OURS:
        found["no-prefetch"] = dataclasses.replace(system, prefetch="none")
        found["intra"] = dataclasses.replace(system, prefetch="intra")
        if not system.speculate_always:
            found["always"] = dataclasses.replace(system, speculate_always=True)
    return found


def cold(lab: Lab, disk: Disk, *, ablate: bool) -> list[Json]:
    """Rows without a cache, all systems and variants by turns."""
    systems = {
        (name, variant): system
        for name in lab.setting.systems
        for variant, system in variants(system_named(name)).items()
        if ablate or variant == "default"
    }
    taken = take_turns(lab, systems)
    floors: dict[SystemConfig, list[float]] = {}
    for system in map(floor_system, systems.values()):
        if system.selector != "none" and system not in floors:
            floors[system] = compute_floor_ms(lab, system, lab.setting.budgets)
    return [_with_floors(part, floors.get(floor_system(part.system)), lab, disk) for part in taken]


def floor_system(system: SystemConfig) -> SystemConfig:
    """The system that makes the same calls for a request that has nothing to read, and is the same
    for all that do: neither reading ahead nor a cache policy makes calls."""
    return dataclasses.replace(
        system,
        name=f"floor of {system.selector}",
        prefetch="none",
        speculate="previous",
        speculate_always=True,
        overfetch=1.0,
        policy="lru",
    )


def warm(
    lab: Lab, disk: Disk, systems: Sequence[str], requests: int, *, ablate: bool
) -> list[Json]:
    """Rows with both caches; ours also with the other cache policies, to `ablate`."""
    budget, rows = lab.setting.budgets[0], []
    rivals: tuple[PolicyName, ...] = ("lfu", "lru")
    floors: dict[SystemConfig, list[float]] = {}
    for name in systems:
        system = system_named(name)
        bare = floor_system(system)
        if bare not in floors:
            floors[bare] = compute_floor_ms(lab, bare, lab.setting.budgets[:1])
        for policy in (system.policy, *(rivals if ablate and name in OURS else ())):
            variant = "warm" if policy == system.policy else f"warm-{policy}"
            changed = dataclasses.replace(system, policy=policy)
            part = warm_run(lab, changed, variant, budget, requests)
            rows.append(_with_floors(part, floors[bare], lab, disk))
            print(f"{name} {variant}: {rows[-1]['ttft_ms']['mean']:.1f} ms", flush=True)
    return rows


def _with_floors(part: Taken, floors: Sequence[float] | None, lab: Lab, disk: Disk) -> Json:
    row = part.row()
    compute_ms = row["ttft_ms"]["p50"]
    if floors is not None:
        compute_ms = floors[lab.setting.budgets.index(part.budget)]
    io_ms = statistics.fmean(sample.io_floor_ms(disk, part.layout) for sample in part.samples)
    above = row["ttft_ms"]["p50"] - max(compute_ms, io_ms)
    return row | {
        "compute_floor_ms": compute_ms,
        "io_floor_ms": io_ms,
        "ratio_to_floor": row["ttft_ms"]["p50"] / max(compute_ms, io_ms),
        "overhead_ms_per_layer": above / lab.config.num_layers,
    }


def speedups(rows: Sequence[Json], variant: str = "default") -> Json:
    """Mean TTFT of each rival over that of each of our systems, by budget."""
    means = {
        (row["system"], row["budget"]): row["ttft_ms"]["mean"]
        for row in rows
        if row["variant"] == variant
    }
    return {
        ours: {
            f"{budget:g}": {
                rival: means[rival, budget] / means[ours, budget]
                for rival in RIVALS
                if (rival, budget) in means
            }
            for (name, budget) in means
            if name == ours
        }
        for ours in OURS
        if any(name == ours for name, _ in means)
    }


def show(rows: Sequence[Json]) -> str:
    """The rows as a table."""
    header = ("system", "variant", "budget", "mean", "p50", "p95", "compute", "I/O", "ratio",
              "ms/layer", "SSD MB", "ampl.", "covered", "unused")  # fmt: skip
    cells = []
    for r in rows:
        times = [r["ttft_ms"][name] for name in ("mean", "p50", "p95")]
        floors = [r[name] for name in ("compute_floor_ms", "io_floor_ms", "ratio_to_floor",
                                   "overhead_ms_per_layer")]  # fmt: skip
        rest = [r["ssd_bytes"] / 1e6, r["read_amplification"], r["coverage"], r["unused"]]
        cells.append([r["system"], r["variant"], r["budget"], *times, *floors, *rest])
    return table(cells, header)


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--no-ablation", action="store_true", help="leave out variants of our systems")
    p.add_argument("--warm-prefixes", type=int, help="prefixes of the warm part; 0 leaves it out")
    p.add_argument("--warm-tokens", type=int, help="tokens of each of them")
    p.add_argument("--sweep-traffic", action="store_true", help="over clustering and stability")
    args = p.parse_args()
    if args.sweep_traffic and (args.checkpoint or args.plot):
        p.error("--sweep-traffic is of structured weights, and draws nothing")
    setting = setting_of(args)
    if args.sweep_traffic:
        about = {name: getattr(args, name) for name in ("quick", "warm_prefixes", "warm_tokens")}
        kept = Kept(args.json, setting.to_json() | about | {"disk": disk_of(args.folder)})
        with tempfile.TemporaryDirectory(prefix="ckv-bench-") as programs:
            compilation_cache.enable(Path(programs))  # points differ in weights alone
            points = swept(setting, args, kept)
        finish(args, setting, kept.said() | {"traffic": points})
        kept.forget()
        return
    body = measured_with(setting, args, ablate=not args.no_ablation)
    result = finish(args, setting, body)
    save("ttft", result, args.plot)


def swept(setting: Setting, args: argparse.Namespace, kept: Kept) -> list[Json]:
    """The smallest budget at every point of `TRAFFIC`, without variants of our systems, and without
    recompute, which traffic does not change."""
    points = []
    systems = tuple(name for name in setting.systems if name != "recompute")
    for clustering, stability in TRAFFIC:
        print(f"clustering {clustering:g}, stability {stability:g}", flush=True)
        point = {"clustering": clustering, "stability": stability}
        chosen = dataclasses.replace(setting, budgets=setting.budgets[:1], systems=systems, **point)
        measure = partial(measured_with, chosen, args, ablate=False)
        points.append(point | kept.part(f"{clustering:g}, {stability:g}", measure))
    return points


def measured_with(setting: Setting, args: argparse.Namespace, *, ablate: bool) -> Json:
    """Cold and warm rows of one setting, printed, and what follows from them."""
    with Lab(setting) as lab, Disk(lab.folder) as disk:
        rows = cold(lab, disk, ablate=ablate)
        prefill = lab.prefill_s
        prefixes = args.warm_prefixes
        if prefixes is None:
            prefixes = 5 if args.quick else 16
        if prefixes:
            tokens = args.warm_tokens or (1008 if args.quick else WARM_TOKENS)
            smaller = dataclasses.replace(setting, prefixes=prefixes, prefix_tokens=tokens)
            names = [name for name in setting.systems if name != "recompute"]
            with Lab(smaller, like=lab) as other:
                requests = (4 if args.quick else 10) * prefixes
                rows += warm(other, disk, names, requests, ablate=ablate)
        bandwidth = disk.found
    print(show(rows))
    return {
        "rows": rows,
        "speedup": speedups(rows),
        "speedup_warm": speedups(rows, "warm"),
        "fio_gb_per_s": bandwidth,
    } | ({"prefill_s": prefill} if prefill else {})  # none where prefixes were kept


if __name__ == "__main__":
    main()
