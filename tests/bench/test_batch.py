from __future__ import annotations

import pytest

from bench.batch import bars, run, show
from bench.common import Setting
from bench.lab import Lab


@pytest.mark.slow
def test_rows_and_bars_of_a_tiny_run() -> None:
    setting = Setting(
        model="tiny",
        dtype="float32",
        prefix_tokens=512,
        suffix_tokens=8,
        prefixes=2,
        budgets=(0.1,),
        repeats=2,
        systems=("ckv",),
    )
    with Lab(setting) as lab:
        rows = run(lab, "ckv", (1, 8))
    assert [(row["load"], row["batch"]) for row in rows] == [
        ("same-prefix", 1), ("same-prefix", 8), ("mixed", 1), ("mixed", 8),
    ]  # fmt: skip
    for row in rows:
        assert row["requests_s"] > 0
        assert 0 < row["ttft_ms"]["mean"] <= row["ttft_ms"]["p95"] * 1.001
        assert 0 < row["ssd_kv_bytes"] <= row["ssd_bytes"]
    (found,) = bars(rows).values()
    assert found["never_more_than_the_union"]
    assert found["overlap"] >= 0.5
    assert found["ssd_bytes_ratio"] <= 1.5
    assert found["met"]["ssd_bytes"]
    assert "same-prefix" in show(rows)
