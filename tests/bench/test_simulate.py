"""The simulated pipeline with parameters that were measured here, on a model for seconds."""

from __future__ import annotations

import math

import pytest

from bench.common import Setting
from bench.lab import Lab
from bench.simulate import predict, validate


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ckv", "contiguous-kv", "impress", "as-lru"])
def test_measured_parameters_describe_this_machine(name: str) -> None:
    setting = Setting(
        model="tiny", prefix_tokens=1008, prefixes=1, repeats=2, budgets=(0.25,), systems=(name,)
    )
    with Lab(setting) as lab:
        [row] = validate(lab, setting.systems)
    here = row["hardware"]
    assert row["simulated_ms"] >= row["calls_ms"] > 0  # reads and the engine only add to them
    assert row["error"] == pytest.approx(row["simulated_ms"] / row["measured_ms"] - 1)
    assert here["job_overhead"] > 0 and here["read_cpu"] > 0 and here["read_latency"] >= 0
    assert here["pack_bandwidth"] >= here["thread_bandwidth"] > 0
    assert 1 <= here["call_cores"] <= here["cores"] + 0.2
    times = [p["ttft_ms"] for p in predict([row], "a800-990pro", 32)]
    assert all(math.isfinite(ms) and ms > 0 for ms in times)
