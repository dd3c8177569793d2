"""Varied traffic on a small model: every request is asked and noted; levelling off by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from bench.random_engine import random_engine
from bench.shapes import Traffic, ask, calls, levelled, prefixes
from ckv_jax.pipeline import mappings
from tests.engine_support import SMALL

MODEL = dataclasses.replace(SMALL, num_layers=2, num_heads=2, num_kv_heads=1)
TRAFFIC = Traffic(
    requests=12, every=4, prefixes=3, longest_prefix=80, longest_suffix=9, most_batch=3,
    most_tokens=3,
)  # fmt: skip


def test_programs_and_mappings_are_noted_after_every_few_requests(tmp_path: Path) -> None:
    with random_engine(MODEL, tmp_path, dtype="float32") as engine:
        stored = prefixes(engine, TRAFFIC)
        batches = [len(batch) for batch in calls(engine, stored, TRAFFIC)]
        rows = ask(engine, TRAFFIC)
        assert rows[-1]["programs"] == engine.stats().programs > rows[0]["programs"] > 0
    assert sum(batches) == 12 == rows[-1]["requests"] and set(batches) > {1}
    assert len(rows) == 3 and rows[-1]["mappings"] > 100
    assert len({prefix.num_tokens for prefix in stored}) == 3


def test_levelling_off_is_of_the_last_quarter() -> None:
    """A program that goes when too many are held makes room for others: the height counts."""
    rows = [
        {"requests": n, "programs": programs, "mappings": mapped}
        for n, programs, mapped in ((50, 60, 100), (75, 40, 80), (90, 66, 120), (100, 50, 90))
    ]
    found = levelled(rows)
    assert found["programs"] == {
        "before": 60, "last": 66, "grown": pytest.approx(0.1), "met": True, "added": 0.2
    }  # fmt: skip
    assert found["mappings"]["grown"] == pytest.approx(0.2) and not found["mappings"]["met"]


COUNTING = """
import mmap, runpy, sys
from pathlib import Path

held = runpy.run_path(sys.argv[1])["held"]
files = [Path(sys.argv[2]) / str(index) for index in range(20)]  # none are merged
held()
before, mapped = held(), []
for file in files:
    file.write_bytes(b"x" * 4096)
    with file.open("r+b") as opened:
        mapped.append(mmap.mmap(opened.fileno(), 4096))
print(held() - before)
"""


def test_mappings_grow_with_what_is_mapped(tmp_path: Path) -> None:
    """In a process where nothing else maps or lets go."""
    command = [sys.executable, "-c", COUNTING, mappings.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 20 <= int(done.stdout) < 40
