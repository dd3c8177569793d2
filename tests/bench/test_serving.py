"""The serving bench on a tiny model: every row, every text with all of its tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.random_engine import random_engine, random_prefix, random_tokens
from bench.serving import Serving, bars, run
from tests.engine_support import SMALL

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


@pytest.mark.parametrize("many, wait, met", [(25.0, 3.0, True), (24.0, 3.1, False)])
def test_bars(many: float, wait: float, met: bool) -> None:
    rows = [
        {"load": "one-prefix", "sequences": 1, "tokens_s": 10.0},
        {"load": "one-prefix", "sequences": 8, "tokens_s": 25 / 0.85 - 0.01},
        {"load": "distinct-prefixes", "sequences": 8, "tokens_s": many},
        {"load": "beside-ingest", "sequences": 99, "tokens_s": 1.0, "p99_wait_ms": wait,
         "block_ms": 1.0},
    ]  # fmt: skip
    held = bars(rows, 8)
    assert [one["met"] for one in held.values()] == [met] * 3
    assert held["distinct_over_one"]["got"] == many / 10


def test_a_random_prefix_is_stored_once(tmp_path: Path) -> None:
    with random_engine(MODEL, tmp_path) as engine:
        tokens = random_tokens(engine, 50, seed=1)
        prefix = random_prefix(engine, tokens)
        assert prefix.num_tokens == 50
        assert random_prefix(engine, tokens, seed=9) == prefix
