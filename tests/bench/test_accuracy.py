"""`bench.accuracy` end to end, small: the report's schema and the plot."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import TINY

from bench import ttft
from bench.accuracy import main, of_depth
from bench.common import interval, system_name
from bench.disk import Disk
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.tokenizer import tokenizer_files
from ckv_jax.model.weights import random_model, save_pretrained
from ckv_jax.systems import CKV, SYSTEMS
from tests.support.pages import add_largest


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


# -- systems ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and the tokenizer whose ids are those of ledgers."""
    folder = tmp_path_factory.mktemp("model")
    ids = ModelConfig.from_hf(reference_folder()).vocab_size
    save_pretrained(random_model(replace(TINY, num_layers=2, vocab_size=ids)), folder)
    for file in tokenizer_files(reference_folder()):
        shutil.copy(file, folder)
    return folder


def rows_of(name: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The rows of a system that answers four questions about one short ledger."""
    out = folder / "a.json"
    command = f"accuracy --model {model} --tokens 192 --documents 1 --budgets 0.25 --json {out}"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--systems", name])
    monkeypatch.setattr("bench.accuracy.demo_ledger", partial(demo_ledger, questions=4))
    main()
    return json.loads(out.read_text())["rows"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_answers(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(name, model, tmp_path, monkeypatch)
    assert {row["system"] for row in rows} == {name}
    assert [row["questions"] for row in rows if row["task"] == "all"] == [4]


def test_the_system_of_its_page_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add_largest(tmp_path, monkeypatch)
    assert system_name(name, generates=True) == name  # as bench.decode and bench.decode_accuracy
    rows = rows_of(name, model, tmp_path, monkeypatch)
    assert rows[-1]["system"] == name and rows[-1]["ssd_bytes_per_question"] > 0
    command = "ttft --model tiny --prefix-tokens 128 --prefixes 1 --repeats 1 --budgets 0.5"
    out = tmp_path / "t.json"
    monkeypatch.setattr("bench.ttft.Disk", partial(Disk, seconds=0.1, file_bytes=1 << 20))
    monkeypatch.setattr("bench.floor.REPLAYS", 1)
    monkeypatch.setattr(sys, "argv", [*command.split(), "--json", str(out), "--systems", name])
    ttft.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["system"] == "largest" and row["ttft_ms"]["mean"] > 0
