"""How alike the choices of different layers are."""

from __future__ import annotations

from typing import Any

from bench.figures.style import SERIES, ends, model_name, percent

CAPTION = (
    "Left, the share of a layer's chunks (row) that another layer (column) chose too, at the "
    "smallest budget. Right, the mean of it between the first layers of adjacent periods, by the "
    "length of a period; the band is the paper's for periods of 8, its budget not given. The "
    "structured random weights behind benchmarks were set by such published figures: where the "
    "model is one of those, that it lies within the band is no finding."
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
    periods = sorted(int(p) for p, covered in first["coverage"].items() if covered is not None)
    low, high, _ = result["published"]["coverage between periods of 8"]
    right.set(title="coverage between adjacent periods", xlabel="layers per period",
              ylabel="coverage, %", ylim=(0, 100))  # fmt: skip
    if periods:
        right.axhspan(100 * low, 100 * high, color="#EDEDED", zorder=0)
        was_set = ",\nby which the weights were set" if _is_set(result) else ""
        right.annotate(
            f"grey: the paper, periods of 8{was_set}", (periods[0], 100 * low), fontsize=8,
            va="top", xytext=(0, -4), textcoords="offset points",
        )  # fmt: skip
        right.set(xlim=(periods[0] - 0.8, periods[-1] + 1.4), xticks=periods)
        _lines(right, rows, periods)
    setting = result["setting"]
    figure.suptitle(
        f"Which chunks the layers of a {model_name(setting['model'])} choose, "
        f"{setting['prefix_tokens']:,} tokens",
        fontsize=10,
    )


def _lines(axis: Any, rows: list[dict[str, Any]], periods: list[int]) -> None:
    """A line for each budget."""
    named = []
    for row, color, mark in zip(rows, SERIES, "os^Dv", strict=False):
        values = [100 * row["coverage"][str(period)] for period in periods]
        axis.plot(periods, values, color=color, marker=mark)
        named.append((f"budget {percent(row['budget'])}", periods[-1], values[-1], color))
    ends(axis, named)


def _is_set(result: dict[str, Any]) -> bool:
    """Whether the model's weights are the structured ones, which published figures set."""
    return result["setting"]["checkpoint"] is None


def conclude(result: dict[str, Any]) -> str:
    """Coverage between periods of 8 by budget."""
    covered = [(row["coverage"]["8"], percent(row["budget"])) for row in result["rows"]]
    parts = [f"{share:.2f} at {budget}" for share, budget in covered if share is not None]
    low, high, _ = result["published"]["coverage between periods of 8"]
    was_set = " The weights were set by it: that ours agrees is no finding."
    return (
        f"Coverage between periods of 8 layers: {', '.join(parts) or 'no two of them'}; published "
        f"{low:.2f} to {high:.2f}.{was_set if _is_set(result) else ''}"
    )
