"""Resident memory of a server over its first requests."""

from __future__ import annotations

from typing import Any

from bench.figures.style import BLUE

CAPTION = (
    "Resident memory after each number of requests, no two alike. The first requests compile "
    "programs for their shapes."
)


def draw(figure: Any, result: dict[str, Any]) -> None:
    """MB by requests."""
    axis = figure.subplots()
    title = f"{result['setting']['model']}; {result['failed']} requests failed"
    rows = result["rows"]
    xs, ys = [row["requests"] for row in rows], [row["rss_mb"] for row in rows]
    axis.plot(xs, ys, color=BLUE, marker="o")
    axis.set(xlabel="requests answered", ylabel="resident memory, MB", title=title,
             xlim=(0, None), ylim=(0, None))  # fmt: skip
    axis.annotate(
        f"{ys[-1]:,} MB", (xs[-1], ys[-1]), (0, -14), textcoords="offset points", ha="right"
    )


def conclude(result: dict[str, Any]) -> str:
    """How much the last quarter of the requests added."""
    last = result["rows"][-1]
    late = next(row for row in result["rows"] if row["requests"] >= 0.75 * last["requests"])
    return (
        f"{last['rss_mb']:,} MB after {last['requests']:,} requests, of which the last "
        f"{last['requests'] - late['requests']:,} added {last['rss_mb'] - late['rss_mb']}."
    )
