"""The pipeline's model held against measurements, and what it predicts for a data sheet."""

from __future__ import annotations

from typing import Any

from bench.figures.style import COLORS, FAINT, MARKS, ends, line, machine_line, percent, systems_of

CAPTION = (
    "Left, the model of the pipeline against medians measured on this machine; the band is the "
    "goal. Right, what the same model gives for a data sheet of another machine. Predictions are "
    "not measurements."
)
_SHEETS = {"a800-990pro": "an A800 and a 990 Pro"}
"""Presets of machines by what a stranger calls them."""


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Simulated over measured, and predictions for 7B at the smallest budget."""
    rows, goal = result["validation"], result["goal"]
    left, right = figure.subplots(1, 2)
    low, high = (f(row["measured_ms"] for row in rows) for f in (min, max))
    span = [low / 1.4, high * 1.4]
    left.fill_between(span, [x * (1 - goal) for x in span], [x * (1 + goal) for x in span],
                      color="#EDEDED", label=f"within {goal:.0%}")  # fmt: skip
    left.plot(span, span, color=FAINT, lw=1)
    budgets = sorted({row["budget"] for row in rows})
    for row in rows:
        name = row["system"]
        filled = row["budget"] == budgets[0]
        left.plot(row["measured_ms"], row["simulated_ms"], ls="none", marker=MARKS[name],
                  color=COLORS[name], mfc=COLORS[name] if filled else "white", ms=8,
                  label=f"{name}, {percent(row['budget'])} ({row['error']:+.0%})")  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="measured median TTFT, ms",
             ylabel="simulated TTFT, ms", title=f"Measured on {machine_line(result['machine'])}",
             xlim=span, ylim=span)  # fmt: skip
    ticks = [tick for tick in (50, 70, 100, 150, 200, 300, 500, 700, 1000) if low <= tick <= high]
    for axis in (left.xaxis, left.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_tick_params(which="minor", bottom=False, left=False, labelbottom=False,
                             labelleft=False)  # fmt: skip
    left.legend(fontsize=7, loc="upper left")
    predicted = result["predictions"]
    shown = [
        row for row in predicted if row["model"] == "7B" and row["budget"] in (budgets[0], 1.0)
    ]
    tokens = sorted({row["prefix_tokens"] for row in shown})
    times = [row["ttft_ms"] for row in shown]
    right.set(xscale="log", yscale="log", xlim=(tokens[0] * 0.85, tokens[-1] * 3.2),
              ylim=(min(times) * 0.75, max(times) * 1.4))  # fmt: skip
    named = []
    for name in systems_of(shown):
        mine = [row for row in shown if row["system"] == name]
        line(right, [r["prefix_tokens"] for r in mine], [r["ttft_ms"] for r in mine], name)
        named.append((name, mine[-1]["prefix_tokens"], mine[-1]["ttft_ms"], COLORS[name]))
    right.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
    right.minorticks_off()
    right.yaxis.set_major_formatter("{x:,.0f}")
    sheet = _SHEETS.get(predicted[0]["preset"], predicted[0]["preset"])
    right.set(xlabel="tokens of the prefix", ylabel="predicted TTFT, ms",
              title=f"Predicted for 7B on {sheet}, budget {percent(budgets[0])}")  # fmt: skip
    ends(right, named)


def conclude(result: dict[str, Any]) -> str:
    """The largest error against the goal."""
    said = "within" if result["largest_error"] <= result["goal"] else "outside"
    return (
        f"The largest error against a measured median is {result['largest_error']:.1%}, {said} the "
        f"goal of {result['goal']:.0%}."
    )
