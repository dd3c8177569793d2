"""Compiled programs and memory mappings as requests of many shapes go by."""

from __future__ import annotations

from typing import Any

from bench.figures.style import SERIES

CAPTION = "Compiled programs, and mappings of the process, by how many requests were answered."


def draw(figure: Any, result: dict[str, Any]) -> None:
    """A panel each."""
    rows = result["rows"]
    for axis, name in zip(figure.subplots(1, 2), ("programs", "mappings"), strict=True):
        axis.plot([row["requests"] for row in rows], [row[name] for row in rows], color=SERIES[0])
        axis.set(xlabel="requests answered", title=name, ylim=(0, None))


def conclude(result: dict[str, Any]) -> str:
    """What there is in the end."""
    last = result["rows"][-1]
    return (
        f"{last['programs']:,} programs and {last['mappings']:,} mappings after "
        f"{last['requests']:,} requests."
    )
