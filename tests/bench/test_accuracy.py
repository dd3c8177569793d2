"""`bench.accuracy` end to end, small: the report's schema and the plot."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.accuracy import main, of_depth
from bench.common import interval
from ckv_jax.data.reference import LEARNED, demo_ledger
from ckv_jax.systems import CKV


@pytest.mark.parametrize(
    ("sizes", "share", "expected"),
    [
        ((1, 1, 1), 0.5, (1, 1)),  # selects in every layer
        ((4, 8, 4), 0.01, (4, 4)),
        ((4, 8, 4), 0.45, (8, 4)),
        ((2, 4, 4), 0.4, (6, 2)),
        ((4, 8, 4), 1.0, (16, 4)),
    ],
)
def test_a_period_is_a_share_of_16_layers_to_the_nearest_pack(
    sizes: tuple[int, int, int], share: float, expected: tuple[int, int]
) -> None:
    pack, period, subperiod = sizes
    system = replace(CKV, pack_layers=pack, period=period, subperiod=subperiod)
    found = of_depth(system, share, 16)
    assert (found.period, found.subperiod) == expected


@pytest.mark.slow
def test_the_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, plot = tmp_path / "a.json", tmp_path / "a.png"
    command = (
        "accuracy --quick --tokens 256 --documents 1 --budgets 0.25 --systems as-lru impress ckv "
        f"--suffix-tokens 12 --json {out} --plot {plot}"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    # Programs over tokens of all questions of a batch grow with it.
    monkeypatch.setattr("bench.accuracy.demo_ledger", partial(demo_ledger, questions=8))
    main()
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert {(row["system"], row["budget"]) for row in rows} == {
        ("as-lru", 1.0), ("impress", 0.25), ("ckv", 0.25),
    }  # fmt: skip
    for row in rows:
        assert row["task"] in (*LEARNED, "all")
        right = row["accuracy"] * row["questions"]
        assert right == pytest.approx(round(right))
        assert row["ci95"] == pytest.approx(interval(round(right), row["questions"]))
    asked = 8
    for system in ("as-lru", "impress", "ckv"):
        *families, total = [row for row in rows if row["system"] == system]
        assert total["task"] == "all" and total["questions"] == asked
        assert sum(row["questions"] for row in families) == asked
        right = sum(row["questions"] * row["accuracy"] for row in families)
        assert total["accuracy"] == pytest.approx(right / asked)
        # Everything takes part, and the checkpoint has learned to look.
        assert total["accuracy"] > 0.8 or system != "as-lru"
    assert plot.stat().st_size > 1000
