"""Compiled programs and memory mappings as requests of many shapes go by."""

from __future__ import annotations

from typing import Any

from bench.figures.style import FAINT, SERIES

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


STEPS_CAPTION = (
    "What process and engine hold as texts come and go, decoded together. The shaded tenth is what "
    "the rest is held to; the dotted line is the most that it may be."
)
_PANELS = {
    "rss_mb": "memory less digests, MB", "pinned_packs": "device packs that texts pin",
    "programs": "compiled programs", "mappings": "memory mappings",
}  # fmt: skip


def draw_steps(figure: Any, result: dict[str, Any]) -> None:
    """A panel for each thing that may not grow."""
    rows, steps = result["rows"], [row["steps"] for row in result["rows"]]
    for axis, (name, title) in zip(figure.subplots(1, 4), _PANELS.items(), strict=True):
        less = [row["digest_mb"] if name == "rss_mb" else 0.0 for row in rows]
        values = [row[name] - part for row, part in zip(rows, less, strict=True)]
        axis.axvspan(0, steps[-1] / 10, color=FAINT, alpha=0.3, lw=0)
        bar = result["growth"][name]["first"] * (1.0 if name == "programs" else 1.1)
        axis.axhline(bar, color="black", ls=":", lw=1)
        axis.plot(steps, values, color=SERIES[0])
        axis.set(xlabel="steps of decode", title=title, xlim=(0, None), ylim=(0, None))


def conclude_steps(result: dict[str, Any]) -> str:
    """How much each grew."""
    grown = ", ".join(f"{name.replace('_', ' ')} {one['more']:+.1%}"
                      for name, one in result["growth"].items())  # fmt: skip
    return (
        f"Over {result['rows'][-1]['steps']:,} steps, against their most in the first tenth: "
        f"{grown}; {'nothing' if not any(result['left'].values()) else 'something'} is left held."
    )
