from __future__ import annotations

import json
from pathlib import Path

from bench.kernels import main

KERNELS = {"gather", "attend", "score keys", "score int8", "score int4", "score pq", "select"}


def test_every_kernel_is_measured_against_the_ceilings(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    sizes = ["--models", "tiny", "--prefix-tokens", "100", "--budgets", "0.5", "--repeats", "1"]
    main([*sizes, "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {row["kernel"] for row in found["rows"]} == KERNELS
    assert found["ceiling"]["copy_gb_per_s"] > 0
    assert found["ceiling"]["matmul_gflop_per_s"] > 0
    for row in found["rows"]:
        assert row["implementation"] == "reference"
        assert row["ms"] > 0
        assert row["share"] > 0
        assert row["temporary_mb"] >= 0
