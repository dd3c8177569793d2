"""Requests against filled caches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from kernel_targets import BEST

from bench import kernels
from bench.common import Setting
from bench.kernels import main
from bench.lab import KEPT, Lab
from bench.memory import Lengths, rows_of
from bench.serving import Serving, run
from ckv_jax.storage.store import ChunkStore
from tests.engine_support import SMALL


def test_a_prefix_is_computed_once_for_all_benchmarks_and_nothing_learned_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEPT, str(tmp_path / "prefixes"))
    setting, answers = Setting(model="tiny", prefix_tokens=300, prefixes=1), []
    for computed in (1, 0):
        with Lab(setting) as lab, lab.engine("impress") as engine:
            lab.warm(engine, 0, [0.2])  # reorders
            answers.append(lab.ask(engine, 0, 5, 1.0)[1].logits)
            assert len(lab.prefill_s) == computed
            layout = lab.base.layout.hex
    np.testing.assert_array_equal(*answers)
    with ChunkStore.open(tmp_path / "prefixes") as store:
        assert [prefix.layout.hex for prefix in store.prefixes()] == [layout]


# -- memory of an ingest ---------------------------------------------------------------------------


def test_an_ingest_in_a_process_of_its_own(tmp_path: Path) -> None:
    rows = rows_of(Lengths(tokens=(600,)), tmp_path)
    assert [row["programs"] for row in rows] == ["compiled", "from the cache"]
    for row in rows:
        assert row["tokens"] == 600
        assert row["kv_mb"] == 600 * 4 * 2 * 4 * 64 * 2 / 1e6
        assert row["peak_mb"] > row["before_mb"] > 50
        assert row["ingest_mb"] == row["peak_mb"] - row["before_mb"]
    assert any((tmp_path / "cache" / "600").glob("*-cache"))


# -- serving ---------------------------------------------------------------------------------------


MODEL = dataclasses.replace(SMALL, num_layers=2, num_heads=2, num_kv_heads=1)
TINY = Serving(
    model=MODEL, beside=MODEL, budget=0.1, prefix_tokens=100, suffix_tokens=5, new_tokens=6,
    sequences=2, repeats=2, ingest_tokens=256, every_s=5e-3, prefill_block=16,
)  # fmt: skip


def test_every_row_is_there_and_every_text_whole(tmp_path: Path) -> None:
    rows = run(TINY, tmp_path)
    loads = [(row["load"], row["sequences"]) for row in rows[:3]]
    assert loads == [("one-prefix", 1), ("one-prefix", 2), ("distinct-prefixes", 2)]
    for row in rows[:3]:
        assert row["tokens"] == [[6] * row["sequences"]] * 2
        assert row["block_ms"] is None
    beside = rows[3]
    assert beside["load"] == "beside-ingest" and beside["sequences"] >= 1
    assert beside["longest_block_ms"] >= beside["block_ms"] > 0
    assert beside["p99_ttft_ms"] > beside["p99_wait_ms"] >= beside["p50_wait_ms"]


# -- kernels ---------------------------------------------------------------------------------------


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
    assert {row["kernel"] for row in native} == {n for n in KERNELS if "int" in n or "attend" in n}
    assert all(("note" in row) == (BEST.path is None) for row in native)
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
