"""Time to first token of every system and budget, with both floors (ContiguousKV Figures 10, 11).

    python -m bench.ttft --quick --json OUT

Everything here is cold: no pack is kept from one request to the next and all reads are direct. The
papers' own figures are of warm caches: `bench.warm` has those. Systems take turns, request by
request, over the same prefixes and questions, another one first each time. Digests of `ckv` stay
in memory and IMPRESS's reordering is done before. `no-prefetch` and `intra` rows take the reading
ahead away again.

The compute floor is a replay of the bare jitted calls of a request, back to back with everything
on the device (`bench.floor`); a recompute is its own floor. The I/O floor is the bytes that must be
read over fio's bandwidth at that block size, on the same disk in the same run. `ratio_to_floor` is
the median TTFT over the larger floor, `overhead_ms_per_layer` what it is above that floor, by layer
and request. `hardware_floor_ms` is what the machine needs at least, by `bench.floor`. `speedup`
divides mean TTFTs.
"""

from __future__ import annotations

import dataclasses

from bench.common import OURS, Json, Setting, finish, parser, result_file, setting_of
from bench.disk import Disk
from bench.figures import save
from bench.floor import compute_floor_ms
from bench.lab import Lab
from bench.turns import floor_system, show, speedups, take_turns, with_floors
from ckv_jax.config import SystemConfig
from ckv_jax.systems import system_named

QUICK = Setting(prefixes=1, repeats=5)
FULL = Setting(prefixes=2, repeats=16, budgets=(0.05, 0.10, 0.25, 0.50))


def variants(system: SystemConfig) -> dict[str, SystemConfig]:
    """A system as it is, and with its reading ahead taken away again."""
    found = {"default": system}
    if system.name in OURS:
        found["no-prefetch"] = dataclasses.replace(system, prefetch="none")
        found["intra"] = dataclasses.replace(system, prefetch="intra")
    return found


def cold(lab: Lab, disk: Disk, *, ablate: bool) -> list[Json]:
    """Rows without a cache, all systems and variants in turn."""
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
        if not system.computes_all:
            found = compute_floor_ms(lab, system, budgets)
            floors |= {(system, budget): ms for budget, ms in zip(budgets, found, strict=True)}
    return [
        with_floors(part, floors.get((floor_system(part.system), part.budget)), lab, disk)
        for part in taken
    ]


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    p.add_argument("--no-ablation", action="store_true", help="skip the variants of our systems")
    args = p.parse_args()
    setting = setting_of(args)
    with Lab(setting) as lab, Disk(lab.folder) as disk:
        rows = cold(lab, disk, ablate=not args.no_ablation)
        body: Json = {
            "setting": setting.to_json(),
            "rows": rows,
            "speedup": speedups(rows),
            "fio_gb_per_s": disk.found,
            "disk_tool": disk.tool,
        }
        if lab.prefill_s:  # none where prefixes were kept
            body["prefill_s"] = lab.prefill_s
    print(show(rows))
    save("ttft", finish(args, body), args.plot)


if __name__ == "__main__":
    main()
