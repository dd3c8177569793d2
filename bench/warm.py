"""Time to first token with warm caches, as the papers measure it (ContiguousKV Figures 10, 11).

    python -m bench.warm --json OUT
    python -m bench.warm --shares 0.04 0.10 --budgets 0.25 --json OUT

Memory is the paper's: 10 GB of its 67 GB of KV on the device and 24 GB on the host, 15% and 36% of
the data set. `--shares 0.04 0.10` is what the same memory is of Qwen2.5-14B's 226 GB (Table 1; of
32B's 301 GB it is 3% and 8%), on which Figure 12 stands, at a budget of 25%. Digests and buffers
take room from it, so all systems have the same total (`memory` in each row says how it is used).

Caches of several systems do not fit into memory together, so systems take turns by rounds: in each
round every system, another one first, starts with empty caches, fills them with requests that are
not counted, and answers the same measured ones. Filling goes on until the caches are full: at least
`--fill` requests and at most `--fill-most`, as what reads a twentieth of a prefix needs many more
than what reads all of it. Samples of all rounds count together; `ttft_ms_by_round` has them apart.
`filled`, `hit_rate_of_fill`, of its last quarter, and `hit_rate_by_half` of what is measured say
whether caches had levelled off. No system knows scores of an earlier round; but a prefix that
IMPRESS has reordered stays so, as after longer service, unless the run was cut short and went on
over newly written prefixes. Reordering is over before the next request is asked.

Requests are drawn normally over the prefixes, whose KV is written straight to disk, without a
prefill (`bench.long_kv`): of the data set only those prefixes are written that some request asks,
in all layouts. Floors are those of `bench.ttft`.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.common import (
    BASELINES,
    OURS,
    Json,
    Setting,
    budget_share,
    finish,
    parser,
    positive,
    setting_of,
)
from bench.disk import Disk
from bench.floor import compute_floor_ms
from bench.kept import Kept, disk_of
from bench.lab import Lab, forget_scores
from bench.long_kv import store_prefixes
from bench.measure import Compilations, Sample, hit_rate, measured
from bench.memory import release_heap, status_mb
from bench.turns import (
    DEVICE_SHARE,
    HOST_SHARE,
    Taken,
    equal_memory,
    floor_system,
    rotated,
    show,
    speedups,
    warm_requests,
    with_floors,
)
from ckv_jax import Engine
from ckv_jax.config import SystemConfig
from ckv_jax.systems import system_named

SHOWN = tuple(name for name in (*OURS, *BASELINES) if name != "recompute")
QUICK = Setting(prefixes=6, prefix_tokens=1008, repeats=12, budgets=(0.05,), systems=SHOWN)
FULL = Setting(prefixes=64, repeats=100, budgets=(0.05,), systems=SHOWN)


FULL_ENOUGH = 0.98
"""Of the caches' bytes: packs do not divide a tier without rest."""
LOOK_EVERY = 16
"""Requests after which filling looks whether that is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How a warm run goes; measured requests of a round are the setting's `repeats`."""

    rounds: int = 3
    fill: int = 100
    """Requests that fill a system's caches in each round, at least."""
    fill_most: int = 640
    """And at most, where the caches are not full before."""
    device_share: float = DEVICE_SHARE
    host_share: float = HOST_SHARE

    def memory(self, lab: Lab, system: SystemConfig) -> dict[str, int]:
        """Sizes of an engine, see `equal_memory`."""
        return equal_memory(lab, system, device_share=self.device_share, host_share=self.host_share)


Key = tuple[str, str]
"""Name and variant of a system."""


def warm_systems(names: Sequence[str]) -> dict[Key, SystemConfig]:
    """Systems by name and variant; those that keep nothing in caches are left out."""
    systems = {(name, "warm"): system_named(name) for name in names}
    return {key: system for key, system in systems.items() if not system.computes_all}


def warm_rows(
    lab: Lab, disk: Disk, systems: Mapping[Key, SystemConfig], how: Rounds, kept: Kept
) -> list[Json]:
    """A row for each system at the setting's budget."""
    [budget] = lab.setting.budgets
    asked = warm_requests(lab, how.fill + lab.setting.repeats)
    stored = store_prefixes(lab, {0, *asked}, list(systems.values()))  # floors are over prefix 0
    floors: dict[SystemConfig, float] = {}
    for bare in {floor_system(system) for system in systems.values()}:
        [floors[bare]] = compute_floor_ms(lab, bare, [budget])
    found: dict[Key, list[Json]] = {key: [] for key in systems}
    for turn in range(how.rounds):
        for key, system in rotated(list(systems.items()), turn * len(systems) // how.rounds):
            name = f"round {turn}, {', '.join(key)}"
            found[key].append(
                kept.part(name, lambda s=system: one_round(lab, s, budget, asked, how))  # type: ignore[misc]
            )
            mean = statistics.fmean(one["ttft_ms"] for one in found[key][-1]["samples"])
            print(f"{name}: {mean:.1f} ms", flush=True)
    about = {
        "rounds": how.rounds,
        "requests": how.rounds * lab.setting.repeats,
        "prefixes": lab.setting.prefixes,
        "prefixes_asked": len(set(asked)),
        "prefix_tokens": lab.work.prefix_tokens,
        "data_set_bytes": lab.setting.prefixes * lab.kv_bytes,
        "stored_bytes": stored,
        "device_share": how.device_share,
        "host_share": how.host_share,
    }
    rows = []
    for key, system in systems.items():
        samples = [Sample(**sample) for one in found[key] for sample in one["samples"]]
        part = Taken(
            system=system, variant=key[1], budget=budget, samples=samples, layout=lab.layout(system)
        )
        row = with_floors(part, floors[floor_system(system)], lab, disk)
        rows.append(row | about | _of_rounds(found[key]) | {"memory": how.memory(lab, system)})
    return rows


def one_round(
    lab: Lab, system: SystemConfig, budget: float, asked: Sequence[int], how: Rounds
) -> Json:
    """Requests from empty caches on, the first `how.fill` of prefixes `asked` again and again until
    the caches are full: samples of the others, and what of the fill and of memory is to be known.
    """
    forget_scores(lab.store, lab.store.prefixes())  # reordered ones as well
    fill: list[Sample] = []
    samples: list[Sample] = []
    with lab.engine(system, memory=how.memory(lab, system)) as engine:
        longest = max(len(lab.work.suffix(question)) for question in range(32))
        engine.warmup(lab.prefix(asked[0], engine), max_suffix=longest, budgets=[budget])
        for number in range(how.fill_most):
            due = number >= how.fill and number % LOOK_EVERY == 0
            if due and filled(engine) >= FULL_ENOUGH:
                break
            fill.append(measured(lab, engine, asked[number % how.fill], number, budget))
        full = filled(engine)
        with Compilations() as compiled:
            for number, index in enumerate(asked[how.fill :], how.fill_most):
                samples.append(measured(lab, engine, index, number, budget))
        digests, resident = engine.stats().digest_bytes, status_mb("VmRSS")
    del engine
    gc.collect()
    release_heap()  # what these caches held, before the next ones
    return {
        "samples": [dataclasses.asdict(sample) for sample in samples],
        "hit_rate_of_fill": hit_rate(fill[-max(1, len(fill) // 4) :]),
        "fill_requests": len(fill),
        "filled": full,
        "compiled": compiled.count,
        "digest_bytes": digests,
        "resident_mb": resident,
    }


def filled(engine: Engine) -> float:
    """Share of both caches' bytes that hold packs."""
    stats, config = engine.stats(), engine.config
    room = config.device_cache_bytes + config.host_cache_bytes
    return (stats.device_bytes + stats.host_bytes) / room if room else 1.0


def _of_rounds(rounds: Sequence[Json]) -> Json:
    """What tells rounds and their halves apart."""
    samples = [[Sample(**sample) for sample in one["samples"]] for one in rounds]
    halves = [
        [sample for one in samples for sample in one[: len(one) // 2]],
        [sample for one in samples for sample in one[len(one) // 2 :]],
    ]
    return {
        "ttft_ms_by_round": [statistics.fmean(x.ttft_ms for x in one) for one in samples],
        "fill_requests": [one["fill_requests"] for one in rounds],
        "filled": min(one["filled"] for one in rounds),
        "hit_rate_of_fill": [one["hit_rate_of_fill"] for one in rounds],
        "hit_rate_by_half": [hit_rate(half) for half in halves],
        "compiled": sum(one["compiled"] for one in rounds),
        "digest_bytes": max(one["digest_bytes"] for one in rounds),
        "resident_mb": max(one["resident_mb"] for one in rounds),
    }


def main() -> None:
    """The command."""
    p = parser(__doc__, quick=QUICK, full=FULL)
    p.add_argument("--rounds", type=positive, help="rounds; every system runs once in each")
    p.add_argument("--fill", type=positive, help="minimum requests of a round that fill the caches")
    p.add_argument("--fill-most", type=positive, help="maximum requests that fill the caches")
    p.add_argument(
        "--shares", type=budget_share, nargs=2, metavar=("DEVICE", "HOST"),
        default=(DEVICE_SHARE, HOST_SHARE), help="cache sizes as shares of all stored KV",
    )  # fmt: skip
    args = p.parse_args()
    if args.checkpoint:
        p.error("got --checkpoint, expected none: this benchmark uses structured random weights")
    setting = setting_of(args)
    if len(setting.budgets) > 1:
        p.error(f"caches are filled at one budget, got {len(setting.budgets)}")
    device, host = args.shares
    how = Rounds(
        rounds=args.rounds or (2 if args.quick else 3),
        fill=args.fill or (24 if args.quick else 100),
        fill_most=args.fill_most or (48 if args.quick else 640),
        device_share=device,
        host_share=host,
    )
    if how.fill_most < how.fill:
        p.error(f"--fill-most is {how.fill_most}, expected at least {how.fill}, which is --fill")
    systems = warm_systems(setting.systems)
    if not systems:
        p.error(f"{', '.join(setting.systems)} keeps nothing in caches")
    about = setting.to_json() | dataclasses.asdict(how) | {"disk": disk_of(args.folder)}
    kept = Kept(args.json, about)
    with Lab(setting) as lab, Disk(lab.folder) as disk:
        rows = warm_rows(lab, disk, systems, how, kept)
        bandwidth = disk.found
    print(show(rows))
    body = {
        "setting": setting.to_json(),
        **kept.said(),
        "rows": rows,
        "speedup": speedups(rows, "warm"),
        "fio_gb_per_s": bandwidth,
        "peak_mb": status_mb("VmHWM"),
    }
    finish(args, body)
    kept.forget()


if __name__ == "__main__":
    main()
