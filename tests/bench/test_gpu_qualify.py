"""The qualification on a toy: every stage and system, and a second run with nothing to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench import gpu_first, gpu_qualify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed"),
]

SYSTEMS = ("ckv", "impress", "recompute")


def test_tiny_runs_all_stages_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gpu_qualify", "--tiny", "--out", str(tmp_path), "--systems", *SYSTEMS]
    monkeypatch.setattr(sys, "argv", words)
    gpu_qualify.main()
    results = {
        name: json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("copies", "disk", "kernels", "ttft-tiny")
    }
    assert all(found["gb_per_s"] for found in (results["copies"], results["disk"]))
    measured = [row for row in results["kernels"]["rows"] if row["implementation"] == "reference"]
    assert measured and all(row["ms"] > 0 for row in measured)
    rows = results["ttft-tiny"]["rows"]
    assert {row["system"] for row in rows} == {*SYSTEMS}
    for row in rows:
        assert row["ttft_ms"]["p95"] >= row["ttft_ms"]["p50"] > 0
        assert row["compute_floor_ms"] > 0
        assert row["ratio_to_floor"] > 0
        assert set(row["hit_rate"]) == {"device", "host"}
        if row["system"] == "ckv":
            assert row["read_amplification"] == 1.0
        if row["system"] == "impress":
            assert row["read_amplification"] > 1.0
        if row["system"] != "recompute":
            assert row["ssd_bytes"] > 0 and row["io_floor_ms"] > 0
    speedup = results["ttft-tiny"]["speedup"]
    assert speedup.keys() == {"ckv"} and speedup["ckv"]["0.25"].keys() == {"impress", "recompute"}
    assert "ratio" in capsys.readouterr().out

    def again(*_: object) -> None:
        raise AssertionError("a finished stage ran again")

    for stage in ("copies", "disk_bandwidth", "kernel_rows", "first_tokens"):
        monkeypatch.setattr(gpu_qualify, stage, again)
    gpu_qualify.main()
    assert capsys.readouterr().out.count("done before") == len(results)
    assert (tmp_path / "report.txt").is_file()
    monkeypatch.setattr(sys, "argv", [*words, "--repeats", "3"])
    with pytest.raises(SystemExit):
        gpu_qualify.main()
    assert "name another --out" in capsys.readouterr().err


def test_first_answers_every_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_qualify", "--tiny", "--first", "--systems", "ckv", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    gpu_qualify.main()
    found = json.loads((tmp_path / "first.json").read_text())
    assert [found[name].get("error") for name in gpu_first.STAGES] == [None] * 7
    assert all(row["us"] > 0 for row in found["numerics"]["rows"])
    compared = [row for row in found["numerics"]["rows"] if "difference" in row]
    assert all(row["difference"] < 0.02 for row in compared)  # of masses, by a native library
    rows = {(row["from"], row["budget"]): row for row in found["first_token"]["rows"]}
    assert rows["ssd", 0.25]["ssd_bytes"] > 0 == rows["device", 0.25]["ssd_bytes"]
    assert rows["device", 0.25]["calls"] > 0
    assert {row["compiled"] for row in found["decode"]["rows"]} == {0}


def test_a_stage_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(gpu_first, "host", fail)
    words = ["gpu_qualify", "--tiny", "--first", "--only", "host", "copies", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    gpu_qualify.main()
    found = json.loads((tmp_path / "first.json").read_text())
    assert "the device fell off the bus" in found["host"]["error"]
    assert found["copies"]["gb_per_s"]["pageable"] > 0


def test_a_stage_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_qualify", "--tiny", "--first", "--only", "hots", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="got stages hots"):
        gpu_qualify.main()
