"""The share of a later layer's choice that an earlier layer already knew, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_coverage"]

_PAPER = (0.52, 0.64)  # between adjacent periods of 8 layers (ContiguousKV, Figure 7b)


def plot_coverage(rows: Sequence[dict[str, Any]], path: Path, *, budget: float) -> None:
    """Draw `coverage` rows of one budget: own choice against lookahead, a panel a distance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["budget"] == budget]
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(3 * len(shown), 2.6), sharey=True, squeeze=False
    )
    for panel, row in zip(panels[0], shown, strict=True):
        layers = range(row["distance"], row["distance"] + len(row["previous_by_layer"]))
        panel.axhspan(*_PAPER, color="0.9", label="paper, adjacent periods")
        panel.plot(layers, row["previous_by_layer"], "o-", ms=3, label="earlier layer's choice")
        panel.plot(layers, row["lookahead_by_layer"], "s-", ms=3, label="lookahead queries")
        panel.set_title(f"{row['distance']} layers before", fontsize=9)
        panel.set_xlabel("layer")
        panel.set_ylim(0, 1)
    panels[0][0].set_ylabel(f"coverage at {budget:.0%}")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
