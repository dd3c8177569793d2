from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import kernels
from bench.kernels import main

KERNELS = {"gather", "attend", "score keys", "score int8", "score int4", "score pq", "select"}


def test_every_kernel_is_measured_against_the_ceilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    sizes = ["--models", "tiny", "--prefix-tokens", "100", "--budgets", "0.5", "--repeats", "1"]
    main([*sizes, "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {row["kernel"] for row in found["rows"]} == KERNELS
    for row in found["rows"]:
        assert row["implementation"] == "reference"
        assert row["ms"] > 0
        assert row["share"] > 0
        assert row["copy_gb_per_s"] > 0 and row["matmul_gflop_per_s"] > 0
        assert row["peak_mb"] > row["temporary_mb"] >= 0
    score = next(row for row in found["rows"] if row["kernel"] == "score keys")
    assert score["peak_mb"] * 1e6 >= 112 * 2 * 16 * 2  # at least the keys themselves

    def again(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(kernels, "kernel_rows", again)
    assert main([*sizes, "--json", str(path), "--resume"])["rows"] == found["rows"]
    with pytest.raises(SystemExit, match="other arguments"):
        main([*sizes, "--json", str(path), "--resume", "--repeats", "2"])
