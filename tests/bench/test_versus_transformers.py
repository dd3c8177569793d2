"""The comparison runs from end to end on a tiny model and fills in every figure."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.versus_transformers import measure
from ckv_jax import Request
from ckv_jax.model.weights import random_model, save_pretrained
from tests.engine_support import SMALL

MODEL = dataclasses.replace(SMALL, num_layers=2, num_heads=2, num_kv_heads=1)


def test_every_figure_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, tuple[int, ...]]] = []

    def noted(**values: Any) -> Request:
        asked.append((values["budget"], tuple(values["suffix"])))
        return Request(**values)

    monkeypatch.setattr("bench.versus_transformers.Request", noted)
    folder = tmp_path / "checkpoint"
    save_pretrained(random_model(MODEL, seed=1), folder)
    args = argparse.Namespace(
        model="small", system="ckv", budgets=[0.1, 1.0], prefix_tokens=200, suffix_tokens=8,
        repeats=2, recomputes=1, seed=0,
    )  # fmt: skip
    figures = measure(args, folder, tmp_path / "store")
    assert [budget for budget, _ in asked] == 3 * [0.1, 1.0]  # the first two are not measured
    assert len({suffix for _, suffix in asked}) == len(asked)
    assert set(figures["ours_ms"]) == {"0.1", "1"}
    assert (
        min(*figures["ours_ms"].values(), figures["hf_recompute_ms"], figures["hf_suffix_ms"]) > 0
    )
    assert 0 < figures["ssd_bytes"]["0.1"] < figures["ssd_bytes"]["1"]
    assert figures["recompilations"] == 0
    for way, bar in figures["bars"].items():
        fastest = min(figures["hf_ms"][way].values())
        assert figures[f"hf_{way}_ms"] == fastest
        assert bar["got"] == fastest / figures["ours_ms"]["0.1"]
        assert bar["met"] == (bar["got"] >= bar["bar"])
    assert {len(times) for times in figures["samples_ms"].values()} == {1, 2}
