"""What the server is held to."""

from __future__ import annotations

from collections.abc import Sequence

from bench.common import Json

_MOST = {"errors": 0, "wrong": 0, "overhead_ms": 5.0}
_LEAST = {"http_over_engine": 0.9, "recomputed_chunks": 1}


def bars(rows: Sequence[Json], overhead_ms: float) -> Json:
    """Each bar, what was got, and whether it is met.

    `rows`: those of `http`, `engine` and the disks. Errors and wrong answers are those of all rows,
    chunks computed again those of the damaged disk.
    """
    by_way = {row["way"]: row for row in rows}
    got = {
        "errors": sum(row["errors"] for row in rows),
        "wrong": sum(row["wrong"] for row in rows),
        "overhead_ms": overhead_ms,
        "http_over_engine": by_way["http"]["tokens_s"] / by_way["engine"]["tokens_s"],
        "recomputed_chunks": by_way["damaged disk"]["recomputed_chunks"],
    }
    most = {name: (bar, got[name] <= bar) for name, bar in _MOST.items()}
    least = {name: (bar, got[name] >= bar) for name, bar in _LEAST.items()}
    return {
        name: {"got": got[name], "bar": bar, "met": met}
        for name, (bar, met) in (most | least).items()
    }
