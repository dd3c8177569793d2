"""Systems take turns on the same prefixes and questions, so that none has a quieter machine.

Their times to first token become rows, beside floors, and speed-ups.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bench.common import BASELINES, OURS, Json, table
from bench.disk import Disk
from bench.floor import hardware_floor_ms
from bench.lab import Lab
from bench.measure import Sample, measured, row_of
from bench.workload import normal_choice
from ckv_jax import Engine
from ckv_jax.buckets import probe_bucket
from ckv_jax.config import SystemConfig
from ckv_jax.storage.layout import Layout

RECOMPUTE_REPEATS = 6
"""A recompute is the same work every time, and slow: the fewest that have an interval."""

DEVICE_SHARE, HOST_SHARE = 0.15, 0.36
"""Memory of warm runs, as shares of the data set: 10 GB and 24 GB of the paper's 67 GB."""
DEVICE_BUFFERS, HOST_BUFFERS = 0.02, 0.4 / 24
"""Of that memory, the least that is for packs on their way: the paper's 0.2 and 0.4 GB (§4.5)."""
BUFFERED_LAYERS = 3
"""But at least what baselines have in flight: a layer's keys and values, and those of two more."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Samples of one system at one budget."""

    system: SystemConfig
    variant: str
    budget: float
    samples: list[Sample]
    layout: Layout


def take_turns(lab: Lab, systems: Mapping[tuple[str, str], SystemConfig]) -> list[Taken]:
    """Cold requests: every system (by name and variant) answers every question in turn, another one
    first each time, and what one has left to do in the background is over before the next is asked.

    Systems that prune nothing are measured once and appear at every budget.
    """
    setting = lab.setting
    for index in range(setting.prefixes):
        lab.ingest(index, list(systems.values()))
    engines: dict[tuple[str, str], Engine] = {}
    samples: dict[tuple[str, str, float], list[Sample]] = {}
    try:
        for key, system in systems.items():
            engines[key] = lab.engine(system)
            for index in range(setting.prefixes):
                lab.warm(engines[key], index, budgets_of(system, setting.budgets))
            print(f"warm: {' '.join(key)}", flush=True)
        for budget in setting.budgets:
            serving = {
                key: engine
                for key, engine in engines.items()
                if budget in budgets_of(engine.system, setting.budgets)
            }
            for engine in serving.values():
                if engine.system.computes_all:
                    continue  # compiled by what stored the prefixes
                for index in range(setting.prefixes):
                    lab.ask(engine, index, 11_001, budget)
            for turn in range(setting.repeats):
                for key, engine in rotated(list(serving.items()), turn):
                    if engine.system.computes_all and turn >= RECOMPUTE_REPEATS:
                        continue
                    sample = measured(lab, engine, turn % setting.prefixes, turn, budget)
                    samples.setdefault((*key, budget), []).append(sample)
                    engine.settle()  # IMPRESS's rewriting is not the next one's load
    finally:
        for engine in engines.values():
            engine.close()
    return [
        Taken(
            system=system,
            variant=key[1],
            budget=budget,
            samples=samples.get((*key, budget)) or samples[*key, setting.budgets[0]],
            layout=engines[key].layout,
        )
        for key, system in systems.items()
        for budget in setting.budgets
    ]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The same items in the same order, from number `by` on, around the end."""
    by %= max(1, len(items))
    return [*items[by:], *items[:by]]


def budgets_of(system: SystemConfig, budgets: Sequence[float]) -> Sequence[float]:
    """The budgets at which a system has to be measured."""
    return budgets if not system.computes_all and system.own.selects != "all" else budgets[:1]


def warm_requests(lab: Lab, requests: int) -> list[int]:
    """Which prefix each request of a warm run asks, drawn normally."""
    rng = np.random.default_rng((lab.setting.seed, 3))
    return [int(index) for index in normal_choice(rng, lab.setting.prefixes, requests)]


def equal_memory(
    lab: Lab,
    system: SystemConfig,
    *,
    device_share: float = DEVICE_SHARE,
    host_share: float = HOST_SHARE,
) -> dict[str, int]:
    """Sizes of an engine by their names in `EngineConfig`, the same in sum for every system.

    Packs on their way and the digests of all prefixes are paid from the share that caches have
    the rest of: buffers on both tiers, digests on the device, as many as fit beside the buffers.
    """
    prefixes = lab.setting.prefixes
    device, host = (int(share * lab.kv_bytes * prefixes) for share in (device_share, host_share))
    layout = lab.layout(system)
    size = layout.chunk_tokens
    padded = probe_bucket(layout.num_chunks(lab.work.prefix_tokens)) * size
    digest = prefixes * sum(layout.digest_record(padded)) * len(layout.digest_layers)
    moving = BUFFERED_LAYERS * lab.kv_bytes // lab.config.num_layers
    buffers = [
        min(max(int(share * total), moving), total // 2)
        for share, total in ((DEVICE_BUFFERS, device), (HOST_BUFFERS, host))
    ]
    digest = min(digest, device - buffers[0])
    return {
        "prefetch_device_bytes": buffers[0],
        "prefetch_host_bytes": buffers[1],
        "digest_bytes": digest,
        "device_cache_bytes": device - buffers[0] - digest,
        "host_cache_bytes": host - buffers[1],
    }


def floor_system(system: SystemConfig) -> SystemConfig:
    """The system that makes the same calls for a request that has nothing to read, and is the same
    for all that do: neither reading ahead nor a cache policy makes calls."""
    return dataclasses.replace(system, name="floor", prefetch="none", policy="lru")


def with_floors(part: Taken, floor_ms: float | None, lab: Lab, disk: Disk) -> Json:
    """A row with its floors; `floor_ms` is of a replay, None for a recompute, its own floor."""
    row = row_of(part.system.name, part.budget, part.variant, part.samples, part.layout)
    compute_ms = row["ttft_ms"]["p50"] if floor_ms is None else floor_ms
    io_ms = statistics.fmean(sample.io_floor_ms(disk, part.layout) for sample in part.samples)
    above = row["ttft_ms"]["p50"] - max(compute_ms, io_ms)
    read_ms = 1e3 * disk.latency(part.layout.pack_bytes)
    return row | {
        "compute_floor_ms": compute_ms,
        "io_floor_ms": io_ms,
        "hardware_floor_ms": hardware_floor_ms(lab, part.system, part.budget, io_ms, read_ms),
        "ratio_to_floor": row["ttft_ms"]["p50"] / max(compute_ms, io_ms),
        "overhead_ms_per_layer": above / lab.config.num_layers,
    }


def speedups(rows: Sequence[Json], variant: str = "default") -> Json:
    """Mean TTFT of each baseline over that of each of our systems, by budget."""
    means = {
        (row["system"], row["budget"]): row["ttft_ms"]["mean"]
        for row in rows
        if row["variant"] == variant
    }
    return {
        ours: {
            f"{budget:g}": {
                baseline: means[baseline, budget] / means[ours, budget]
                for baseline in BASELINES
                if (baseline, budget) in means
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
              "ms/layer", "hardware", "SSD MB", "ampl.", "covered", "unused")  # fmt: skip
    cells = []
    for r in rows:
        times = [r["ttft_ms"][name] for name in ("mean", "p50", "p95")]
        floors = [r[name] for name in ("compute_floor_ms", "io_floor_ms", "ratio_to_floor",
                                   "overhead_ms_per_layer", "hardware_floor_ms")]  # fmt: skip
        rest = [r["ssd_bytes"] / 1e6, r["read_amplification"], r["coverage"], r["unused"]]
        cells.append([r["system"], r["variant"], r["budget"], *times, *floors, *rest])
    return table(cells, header)
