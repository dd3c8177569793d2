"""What the server's bench is held to."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")

from bench.server import bars


def test_bars() -> None:
    rows = [{"errors": 1, "tokens_s": 8.0}, {"errors": 0, "tokens_s": 10.0}]
    held = bars(rows, 5.5)
    assert [one["met"] for one in held.values()] == [False] * 3
    assert held["http_over_engine"]["got"] == 0.8
