"""Time to first token of every system and budget, with both floors (ContiguousKV Figures 10, 11).

    python -m bench.ttft --quick --json OUT

Everything here is cold: no pack is kept from one request to the next and all reads are direct. The
papers' own figures are of warm caches: `bench.warm` has those. Systems take turns, request by
request, over the same prefixes and questions, another one first each time. Digests of `ckv` stay
in memory and IMPRESS's reordering is done before. `no-prefetch` and `intra` rows take the reading
ahead away again, `always` has `ckv` look ahead also where that does not pay.

What the speed-ups hang on and the papers do not settle is the traffic: `--clustering` and
`--stability` set it (see `bench.common.Setting`), and `--sweep-traffic` runs the smallest budget
over a range of both, cold and with warm caches (one round of `bench.warm` over fewer and shorter
prefixes). Its result has a row for every point, in `traffic`.

The compute floor is a replay of the bare jitted calls of a request, back to back with everything
on the device (`bench.floor`); a recompute is its own floor. The I/O floor is the bytes that must be
read over fio's bandwidth at that block size, on the same disk in the same run. `ratio_to_floor` is
the median TTFT over the larger floor, `overhead_ms_per_layer` what it is above that floor, by layer
and request. `speedup` divides mean TTFTs.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from functools import partial
from pathlib import Path

from bench.common import OURS, Json, Setting, finish, parser, setting_of, whole
from bench.disk import Disk
from bench.figures import save
from bench.floor import compute_floor_ms
from bench.kept import Kept, disk_of
from bench.lab import Lab
from bench.rows import floor_system, show, speedups, with_floors
from bench.turns import take_turns
from bench.warm import Rounds, warm_rows, warm_systems
from ckv_jax import compilation_cache
from ckv_jax.config import SystemConfig
from ckv_jax.systems import system_named

QUICK = Setting(prefixes=1, repeats=5)
FULL = Setting(prefixes=2, repeats=16, budgets=(0.05, 0.10, 0.25, 0.50))

WARM_TOKENS = 2000
"""Of each prefix of the warm part of `--sweep-traffic`."""

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
    budgets = lab.setting.budgets
    floors: dict[tuple[SystemConfig, float], float] = {}
    for system in {floor_system(system) for system in systems.values()}:
        if system.selector != "none":
            found = compute_floor_ms(lab, system, budgets)
            floors |= {(system, budget): ms for budget, ms in zip(budgets, found, strict=True)}
    return [
        with_floors(part, floors.get((floor_system(part.system), part.budget)), lab, disk)
        for part in taken
    ]


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--no-ablation", action="store_true", help="leave out variants of our systems")
    p.add_argument("--sweep-traffic", action="store_true", help="over clustering and stability")
    p.add_argument(
        "--warm-prefixes", type=whole, help="of the sweep's warm part (6); 0 leaves it out"
    )
    args = p.parse_args()
    if args.warm_prefixes is None:
        args.warm_prefixes = 6
    elif not args.sweep_traffic:
        p.error("--warm-prefixes is of --sweep-traffic; bench.warm measures warm caches")
    if args.sweep_traffic and (args.checkpoint or args.plot):
        p.error("--sweep-traffic is of structured weights, and draws nothing")
    setting = setting_of(args)
    if args.sweep_traffic:
        about = {name: getattr(args, name) for name in ("quick", "warm_prefixes")}
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
    """Rows of one setting, cold and for a sweep warm, printed, and what follows from them."""
    with Lab(setting) as lab, Disk(lab.folder) as disk:
        rows = cold(lab, disk, ablate=ablate)
        prefill = lab.prefill_s
        if args.sweep_traffic and args.warm_prefixes:
            tokens = 1008 if args.quick else WARM_TOKENS
            smaller = dataclasses.replace(
                setting,
                prefixes=args.warm_prefixes,
                prefix_tokens=tokens,
                repeats=5 * args.warm_prefixes,
            )
            with Lab(smaller, like=lab) as other:
                fill = 5 * args.warm_prefixes
                once = Rounds(rounds=1, fill=fill, fill_most=4 * fill)
                rows += warm_rows(other, disk, warm_systems(smaller.systems), once, Kept(None, {}))
        bandwidth = disk.found
    print(show(rows))
    return (
        {
            "rows": rows,
            "speedup": speedups(rows),
            "fio_gb_per_s": bandwidth,
        }
        | ({"speedup_warm": speedups(rows, "warm")} if args.sweep_traffic else {})
        | ({"prefill_s": prefill} if prefill else {})
    )  # none where prefixes were kept


if __name__ == "__main__":
    main()
