"""The qualification on a toy: every stage and system, and a second run with nothing to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench import gpu_qualify
from bench.common import BASELINES, OURS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed"),
]


def test_tiny_runs_all_stages_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_qualify", "--tiny", "--out", str(tmp_path)])
    gpu_qualify.main()
    results = {
        name: json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("copies", "disk", "kernels", "ttft-tiny")
    }
    assert all(found["gb_per_s"] for found in (results["copies"], results["disk"]))
    measured = [row for row in results["kernels"]["rows"] if row["implementation"] == "reference"]
    assert measured and all(row["ms"] > 0 for row in measured)
    rows = results["ttft-tiny"]["rows"]
    assert {row["system"] for row in rows} == {*OURS, *BASELINES}
    for row in rows:
        assert row["ttft_ms"]["p95"] >= row["ttft_ms"]["p50"] > 0
        assert row["compute_floor_ms"] > 0
        assert row["ratio_to_floor"] > 0
        assert set(row["hit_rate"]) == {"device", "host"}
        if row["system"] in OURS:
            assert row["read_amplification"] == 1.0
        if row["system"] in ("impress", "as-h2o-lru", "as-h2o-lfu"):
            assert row["read_amplification"] > 1.0
        if row["system"] != "recompute":
            assert row["ssd_bytes"] > 0 and row["io_floor_ms"] > 0
    speedup = results["ttft-tiny"]["speedup"]
    assert set(speedup) == set(OURS)
    assert set(speedup["ckv"]["0.25"]) == set(BASELINES)
    assert "ratio" in capsys.readouterr().out

    def again(*_: object) -> None:
        raise AssertionError("a finished stage ran again")

    for stage in ("copies", "disk_bandwidth", "kernel_rows", "first_tokens"):
        monkeypatch.setattr(gpu_qualify, stage, again)
    gpu_qualify.main()
    assert capsys.readouterr().out.count("done before") == len(results)
    assert (tmp_path / "report.txt").is_file()
    other = ["gpu_qualify", "--tiny", "--out", str(tmp_path), "--repeats", "3"]
    monkeypatch.setattr(sys, "argv", other)
    with pytest.raises(SystemExit):
        gpu_qualify.main()
    assert "name another --out" in capsys.readouterr().err
