"""The serving bench on a tiny model: every row, every text with all of its tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bench.serving import Serving, run
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
