"""What the server's bench is held to."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="the server needs the extra `serve`")

from bench.server.__main__ import bars


def test_bars() -> None:
    rows = [
        {"way": "http", "errors": 1, "wrong": 0, "tokens_s": 8.0},
        {"way": "engine", "errors": 0, "wrong": 0, "tokens_s": 10.0},
        {"way": "slow disk", "errors": 0, "wrong": 2, "recomputed_chunks": 7},
        {"way": "damaged disk", "errors": 2, "wrong": 0, "recomputed_chunks": 0},
    ]
    held = bars(rows, 5.5)
    assert [one["met"] for one in held.values()] == [False] * 5
    assert held["http_over_engine"]["got"] == 0.8
    assert (held["errors"]["got"], held["wrong"]["got"]) == (3, 2)
    good = [
        row | {"errors": 0, "wrong": 0, "tokens_s": 9.0, "recomputed_chunks": 5} for row in rows
    ]
    assert all(one["met"] for one in bars(good, 5.0).values())
