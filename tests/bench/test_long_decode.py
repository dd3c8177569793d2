"""Decode of texts that come and go, held to what its first tenth held."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.figures import save
from bench.held import growth
from bench.long_decode import BARS, Steps, run


@pytest.mark.slow
def test_texts_come_and_go_and_nothing_is_left(tmp_path: Path) -> None:
    steps = Steps(
        steps=120, every=4, sequences=2, prefixes=2, prefix_tokens=200, shortest=4, longest=12,
        given_up=3,
    )  # fmt: skip
    found = run(steps, tmp_path / "store")
    assert [row["steps"] for row in found["rows"]] == list(range(4, 121, 4))
    assert max(row["pinned_packs"] for row in found["rows"]) > 0
    assert found["left"] == {"pinned_packs": 0, "running": 0, "queue": 0}
    assert found["growth"].keys() == BARS.keys()
    save("long_decode", found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_what_grows_is_told_and_digests_are_not_counted() -> None:
    rows = [
        {"rss_mb": 500.0 + 40 * n, "digest_mb": 40.0 * n, "pinned_packs": 100 + n, "programs": 7,
         "mappings": 1000 * (n + 1)}
        for n in range(10)
    ]  # fmt: skip
    found = growth(rows[:2], rows[2:], BARS)
    assert {name: one["met"] for name, one in found.items()} == {
        "rss_mb": True, "mappings": False, "pinned_packs": True, "programs": True,
    }  # fmt: skip
    assert found["mappings"]["first"] == 2000 and found["mappings"]["more"] == 4.0
    rows[-1]["programs"] = 8
    assert not growth(rows[:2], rows[2:], BARS)["programs"]["met"]
