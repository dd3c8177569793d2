"""Memory of an ingest, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from bench.memory import Lengths, rows_of


def test_an_ingest_in_a_process_of_its_own(tmp_path: Path) -> None:
    rows = rows_of(Lengths(tokens=(600,)), tmp_path)
    assert [row["programs"] for row in rows] == ["compiled", "from the cache"]
    for row in rows:
        assert row["tokens"] == 600
        assert row["kv_mb"] == 600 * 4 * 2 * 4 * 64 * 2 / 1e6
        assert row["peak_mb"] > row["before_mb"] > 50
        assert row["ingest_mb"] == row["peak_mb"] - row["before_mb"]
    assert any((tmp_path / "cache" / "600").glob("*-cache"))
