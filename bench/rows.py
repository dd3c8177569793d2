"""Rows of times to first token: beside their floors, as a table, and as speed-ups."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from bench.common import BASELINES, OURS, Json, table
from bench.disk import Disk
from bench.lab import Lab
from bench.turns import Taken
from ckv_jax.config import SystemConfig


def floor_system(system: SystemConfig) -> SystemConfig:
    """The system that makes the same calls for a request that has nothing to read, and is the same
    for all that do: neither reading ahead nor a cache policy makes calls."""
    return dataclasses.replace(system, name="floor", prefetch="none", overfetch=1.0, policy="lru")


def with_floors(part: Taken, floor_ms: float | None, lab: Lab, disk: Disk) -> Json:
    """A row with its floors; `floor_ms` is of a replay, None for a recompute, its own floor."""
    row = part.row()
    compute_ms = row["ttft_ms"]["p50"] if floor_ms is None else floor_ms
    io_ms = statistics.fmean(sample.io_floor_ms(disk, part.layout) for sample in part.samples)
    above = row["ttft_ms"]["p50"] - max(compute_ms, io_ms)
    return row | {
        "compute_floor_ms": compute_ms,
        "io_floor_ms": io_ms,
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
              "ms/layer", "SSD MB", "ampl.", "covered", "unused")  # fmt: skip
    cells = []
    for r in rows:
        times = [r["ttft_ms"][name] for name in ("mean", "p50", "p95")]
        floors = [r[name] for name in ("compute_floor_ms", "io_floor_ms", "ratio_to_floor",
                                   "overhead_ms_per_layer")]  # fmt: skip
        rest = [r["ssd_bytes"] / 1e6, r["read_amplification"], r["coverage"], r["unused"]]
        cells.append([r["system"], r["variant"], r["budget"], *times, *floors, *rest])
    return table(cells, header)
