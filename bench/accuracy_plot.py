"""Accuracy by budget and system, and what an earlier layer knew of a later layer's choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_accuracy", "plot_coverage"]

_PAPER = (0.52, 0.64)  # between adjacent periods of 8 layers (ContiguousKV, Figure 7b)


def plot_accuracy(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw `measure` rows of all tasks together: a line a system, full KV as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    panel: Axes = figure.subplots()
    whole = [row for row in rows if row["task"] == "all"]
    for name in dict.fromkeys(row["system"] for row in whole if row["budget"] < 1):
        mine = sorted((r for r in whole if r["system"] == name), key=lambda r: float(r["budget"]))
        budgets = [100 * row["budget"] for row in mine]
        style = {"ms": 3, "label": name, "color": COLORS[name]}
        panel.plot(budgets, [row["accuracy"] for row in mine], "o-", **style)
        low, high = zip(*(row["ci95"] for row in mine), strict=True)
        panel.fill_between(budgets, low, high, alpha=0.12, color=COLORS[name])
    dense = [row for row in whole if row["budget"] == 1]
    if dense:  # a recompute answers only a few of the questions
        full = max(dense, key=lambda row: int(row["questions"]))["accuracy"]
        panel.axhspan(full - 0.01, full, color="0.85", label="full KV less one point")
    panel.set_xscale("log")
    panel.set_xticks([5, 10, 25, 50, 100], labels=["5", "10", "25", "50", "100"])
    panel.set_xlabel("budget, % of the prefix")
    panel.set_ylabel("share of answers right")
    panel.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_coverage(rows: Sequence[dict[str, Any]], path: Path, *, budget: float) -> None:
    """Draw `coverage` rows of one budget: own choice against lookahead, a panel a distance."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["budget"] == budget]
    figure = Figure(figsize=(3 * len(shown), 2.6), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for panel, row in zip(panels, shown, strict=True):
        layers = range(row["distance"], row["distance"] + len(row["previous_by_layer"]))
        panel.axhspan(*_PAPER, color="0.9", label="paper, adjacent periods")
        panel.plot(layers, row["previous_by_layer"], "o-", ms=3, label="earlier layer's choice")
        panel.plot(layers, row["lookahead_by_layer"], "s-", ms=3, label="lookahead queries")
        panel.set_title(f"{row['distance']} layers before", fontsize=9)
        panel.set_xlabel("layer")
        panel.set_ylim(0, 1)
    panels[0].set_ylabel(f"coverage at {budget:.0%}")
    panels[-1].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
