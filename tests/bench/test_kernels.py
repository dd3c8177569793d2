from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernel_targets import without_native

from bench import kernels
from bench.common import Setting
from bench.kernels import main

KERNELS = {"gather", "attend", "attend one query", "score keys", "score int4",
           "score pq", "select", "score 2 int4 peaks by 4", "score 2 int4 peaks by 16"}  # fmt: skip


def test_every_kernel_is_measured_against_the_ceilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    sizes = ["--models", "tiny", "--prefix-tokens", "100", "--budgets", "0.5", "--repeats", "1"]
    main([*sizes, "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {row["kernel"] for row in found["rows"]} == KERNELS
    native = [row for row in found["rows"] if row["implementation"] == "cpu"]
    assert {row["kernel"] for row in native} == {n for n in KERNELS if "int" in n or "one" in n}
    assert all(("note" in row) == bool(without_native("cpu")) for row in native)
    for row in found["rows"]:
        assert row["implementation"] in ("reference", "cpu")
        if "note" in row:
            continue
        assert row["ms"] > 0
        assert row["share"] > 0
        assert row["copy_gb_per_s"] > 0 and row["matmul_gflop_per_s"] > 0
        assert row["peak_mb"] > row["temporary_mb"] >= 0
    score = next(row for row in found["rows"] if row["kernel"] == "score keys")
    assert score["peak_mb"] * 1e6 >= 112 * 2 * 16 * 2  # at least the keys themselves
    assert list(tmp_path.iterdir()) == [path]  # its parts are in it


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "kernels.json", list[int]()

    def rows(setting: Setting) -> list[dict[str, object]]:
        asked.append(setting.prefix_tokens)
        if asked == [100, 200]:
            raise KeyboardInterrupt
        return [
            {"prefix_tokens": setting.prefix_tokens, "copy_gb_per_s": 1, "matmul_gflop_per_s": 1}
        ]

    monkeypatch.setattr(kernels, "kernel_rows", rows)
    monkeypatch.setattr("bench.kept.same_code", lambda commit: True)
    said = ["--models", "tiny", "--prefix-tokens", "100", "200", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        main(said)
    assert [row["prefix_tokens"] for row in main(said)["rows"]] == [100, 200]
    assert asked == [100, 200, 200]
    monkeypatch.setattr("bench.kept.same_code", lambda commit: False)
    main(said)
    assert asked == [100, 200, 200, 100, 200]  # nothing was kept of a run that ended
