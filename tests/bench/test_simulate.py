"""The simulated pipeline with parameters that were measured here, on a model for seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bench.common import Setting
from bench.lab import Lab
from bench.simulate import MODELS, PREFIXES, predict, validate

NAMES = ("ckv", "contiguous-kv", "impress", "as-lru")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    setting = Setting(
        model="tiny", prefix_tokens=1008, prefixes=1, repeats=2, budgets=(0.25,), systems=NAMES
    )
    with Lab(setting) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_measured_parameters_describe_this_machine(lab: Lab, name: str) -> None:
    [row] = validate(lab, [name])
    here = row["hardware"]
    assert row["simulated_ms"] >= row["calls_ms"]  # reads and the engine only add to them
    assert row["error"] == pytest.approx(row["simulated_ms"] / row["measured_ms"] - 1)
    assert here["pack_bandwidth"] >= here["thread_bandwidth"]
    assert 1 <= here["call_cores"] <= here["cores"] + 0.2
    found = predict([row], "a800-990pro", 32)
    for model in MODELS:
        mine = [p for p in found if p["model"] == model and p["system"] == name]
        dense = [p for p in found if p["model"] == model and p["system"] == "recompute"]
        assert [p["prefix_tokens"] for p in mine] == list(PREFIXES)
        for lines in (mine, dense):
            assert all(a["ttft_ms"] < b["ttft_ms"] for a, b in itertools.pairwise(lines))
        assert all(a["ttft_ms"] < b["ttft_ms"] for a, b in zip(mine, dense, strict=True))
