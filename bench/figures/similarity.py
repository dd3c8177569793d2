"""How alike the choices of different layers are."""

from __future__ import annotations

from typing import Any

from bench.figures.style import SERIES, ends, model_name, percent

CAPTION = (
    "Left, the share of a layer's chunks (row) that another layer (column) chose too, at the "
    "smallest budget. Right, the mean of it between the first layers of adjacent periods, by the "
    "length of a period; the band is the paper's for periods of 8, its budget not given."
)


def draw(figure: Any, result: dict[str, Any]) -> None:
    """The layers' matrix of the smallest budget, and coverage by period length."""
    rows = result["rows"]
    left, right = figure.subplots(1, 2)
    first = min(rows, key=lambda row: float(row["budget"]))
    image = left.imshow([[100 * s for s in row] for row in first["layers"]], vmin=0, vmax=100,
                        origin="lower", cmap="cividis")  # fmt: skip
    left.grid(visible=False)
    left.set(title=f"chunks in common, budget {percent(first['budget'])}", xlabel="of layer",
             ylabel="chosen by layer")  # fmt: skip
    figure.colorbar(image, ax=left, label="chunks in common, %")
    periods = sorted(map(int, first["coverage"]))
    low, high, _ = result["published"]["coverage between periods of 8"]
    right.axhspan(100 * low, 100 * high, color="#EDEDED", zorder=0)
    right.annotate("grey: the paper, periods of 8", (periods[0], 100 * low), fontsize=8,
                   va="top", xytext=(0, -4), textcoords="offset points")  # fmt: skip
    right.set(title="coverage between adjacent periods", xlabel="layers per period",
              ylabel="coverage, %", ylim=(0, 100),
              xlim=(periods[0] - 0.8, periods[-1] + 1.4))  # fmt: skip
    right.set_xticks(periods)
    named = []
    for row, color, mark in zip(rows, SERIES, "os^Dv", strict=False):
        values = [100 * row["coverage"][str(period)] for period in periods]
        right.plot(periods, values, color=color, marker=mark)
        named.append((f"budget {percent(row['budget'])}", periods[-1], values[-1], color))
    ends(right, named)
    setting = result["setting"]
    figure.suptitle(
        f"Which chunks the layers of a {model_name(setting['model'])} choose, "
        f"{setting['prefix_tokens']:,} tokens",
        fontsize=10,
    )


def conclude(result: dict[str, Any]) -> str:
    """Coverage between periods of 8 by budget."""
    parts = [f"{row['coverage']['8']:.2f} at {percent(row['budget'])}" for row in result["rows"]]
    low, high, _ = result["published"]["coverage between periods of 8"]
    return (
        f"Coverage between periods of 8 layers: {', '.join(parts)}; published {low:.2f} to "
        f"{high:.2f}."
    )
