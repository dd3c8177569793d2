"""Figures in the README are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def test_the_table_of_systems_is_what_was_measured() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| ([\d,]+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.M
    )
    times = {
        row["system"]: row["ttft_ms"]["mean"]
        for row in json.loads((RESULTS / "ttft.json").read_text())["rows"]
        if row["variant"] == "default" and row["budget"] == 0.05
    }
    accuracy = {
        (row["system"], row["budget"]): row["accuracy"]
        for row in json.loads((RESULTS / "accuracy.json").read_text())["rows"]
        if row["task"] == "all"
    }
    full = accuracy["as-lru", 1.0]
    assert {name for name, _, _ in rows} == set(times)
    for name, ms, right in rows:
        assert ms == f"{times[name]:,.0f}", name
        assert float(right) == round(100 * accuracy.get((name, 0.05), full), 1), name
    assert round(24 * accuracy["recompute", 1.0], 9) == 23
