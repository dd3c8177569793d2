"""Right answers against the time to the first token and against budget; coverage between layers."""

from __future__ import annotations

from typing import Any

from bench.figures.style import (
    COLORS,
    INK,
    SERIES,
    checkpoint_name,
    line,
    model_name,
    percent,
    systems_of,
)

CAPTION = (
    "Left, right answers against the time to the first token: up and to the left is better; the "
    "shares beside marks are budgets. Times are of a model with the KV shape of "
    "Qwen2.5-7B, answers of the small checkpoint that ships with the package, so that the plane "
    "holds two measurements, not one. Right, the same answers against budget. Whiskers are 95% "
    "intervals."
)
COVERAGE_CAPTION = (
    "For each layer, the share of its own choice that an earlier layer's choice holds, and the "
    "share that its query weights find on the earlier layer's hidden states."
)
_PAPER = (0.52, 0.64)  # between adjacent periods of 8 layers (ContiguousKV, Figure 7b)
_PLACES = {
    "ckv": (0, -26, "center"), "contiguous-kv": (12, -3, "left"), "as-lru": (0, 11, "center"),
    "impress": (-4, 11, "left"), "as-h2o-lfu": (2, -33, "center"), "as-h2o-lru": (2, -45, "center"),
}  # fmt: skip
"""Where a system's name stands from its middle point: points right, points up, alignment."""


def draw(figure: Any, result: dict[str, Any]) -> None:
    """The plane of time and accuracy where TTFTs are beside, and accuracy by budget."""
    rows = [row for row in result["rows"] if row["task"] == "all"]
    times = {
        (row["system"], row["budget"]): row["ttft_ms"]["mean"]
        for row in result.get("ttft", {}).get("rows", ())
        if row["variant"] == "default"
    }
    lowest = min(row["ci95"][0] for row in rows if row["system"] != "recompute")
    if times:
        plane, by_budget = figure.subplots(1, 2, width_ratios=(1.6, 1), sharey=True)
        _plane(plane, rows, times)
        setting = result["ttft"]["setting"]
        plane.set(
            xlabel=f"mean TTFT, ms ({model_name(setting['model'])}, "
            f"{setting['prefix_tokens']:,} tokens, cold)",
            title="Right answers against time to first token",
        )
        plane.set_ylabel("right answers, %")
    else:
        by_budget = figure.subplots()
        by_budget.set_ylabel("right answers, %")
    _by_budget(by_budget, rows)
    by_budget.set_ylim(100 * lowest - 4, 102)
    figure.suptitle(
        f"{result['questions']} questions on {result['documents']} ledgers of "
        f"{result['tokens']:,} tokens, {checkpoint_name(result['checkpoint'])}; whiskers: 95% "
        "intervals",
        fontsize=10,
    )


def _errors(mine: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    right = [100 * row["accuracy"] for row in mine]
    low = [100 * max(0.0, row["accuracy"] - row["ci95"][0]) for row in mine]
    high = [100 * max(0.0, row["ci95"][1] - row["accuracy"]) for row in mine]
    return right, low, high


def _plane(axis: Any, rows: list[dict[str, Any]], times: dict[tuple[str, float], float]) -> None:
    dense = [ms for (name, _), ms in times.items() if name == "recompute"]
    for name in systems_of(rows):
        mine = [row for row in rows if row["system"] == name and (name, row["budget"]) in times]
        if name == "as-lru":  # everything, whatever the budget: one time
            mine = [row for row in rows if row["system"] == name]
            at = [ms for (system, _), ms in times.items() if system == name][:1]
        else:
            mine.sort(key=lambda row: float(row["budget"]))
            at = [times[name, row["budget"]] for row in mine]
        if not mine or not at or name == "recompute":
            continue
        right, low, high = _errors(mine)
        line(axis, at, right, name, yerr=(low, high), elinewidth=0.7, ms=6)
        x, y = at[len(at) // 2], right[len(at) // 2]
        if len(at) > 1:
            x = (at[0] + at[-1]) / 2
        dx, dy, aligned = _PLACES.get(name, (0, 11, "center"))
        axis.annotate(name, (x, y), xytext=(dx, dy), textcoords="offset points", ha=aligned,
                      color=COLORS[name], fontweight="bold", fontsize=8.5)  # fmt: skip
        up = {"ckv": -12, "contiguous-kv": 9}.get(name)
        if up is not None:  # the others' would hide each other
            for row, px, py in zip(mine, at, right, strict=True):
                told = percent(row["budget"])
                axis.annotate(told, (px, py), xytext=(-9, up), textcoords="offset points",
                              ha="center", fontsize=7, color=COLORS[name])  # fmt: skip
    if dense:
        told = f"recompute: {max(dense):,.0f} ms, far to the right"
        axis.text(0.985, 0.03, told, transform=axis.transAxes, ha="right", fontsize=8)
    axis.set_xlim(0, None)


def _by_budget(axis: Any, rows: list[dict[str, Any]]) -> None:
    budgets = sorted({row["budget"] for row in rows})
    shown = [name for name in systems_of(rows) if name not in ("recompute", "as-lru")]
    for order, name in enumerate(shown):
        mine = [row for row in rows if row["system"] == name]
        mine.sort(key=lambda row: float(row["budget"]))
        right, low, high = _errors(mine)
        shift = 0.09 * (order - (len(shown) - 1) / 2)
        at = [budgets.index(row["budget"]) + shift for row in mine]
        line(axis, at, right, name, yerr=(low, high), elinewidth=0.7, label=name)
    axis.set_xticks(range(len(budgets)), [percent(budget) for budget in budgets])
    axis.set(xlabel="budget", title="… and against budget")
    axis.legend(loc="lower right")


def conclude(result: dict[str, Any]) -> str:
    """Shares of right answers at the smallest budget, everything's beside them."""
    rows = [row for row in result["rows"] if row["task"] == "all" and row["system"] != "recompute"]
    budget = min(row["budget"] for row in rows)
    small = ", ".join(
        f"{row['system']} {100 * row['accuracy']:.1f}" for row in rows if row["budget"] == budget
    )
    full = max((row["accuracy"] for row in rows if row["budget"] == 1), default=None)
    said = f"Right answers at {percent(budget)}, per cent: {small}"
    return said + ("." if full is None else f"; with everything {100 * full:.1f}.")


def draw_coverage(figure: Any, result: dict[str, Any]) -> None:
    """A panel for each distance at the largest budget: earlier choice, and lookahead."""
    budget = max(row["budget"] for row in result["coverage"])
    shown = [row for row in result["coverage"] if row["budget"] == budget]
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for panel, row in zip(panels, shown, strict=True):
        layers = range(row["distance"], row["distance"] + len(row["previous_by_layer"]))
        panel.axhspan(*(100 * share for share in _PAPER), color="#EDEDED", zorder=0)
        for name, color, mark, word in (
            ("previous", SERIES[0], "s", "the earlier layer's choice"),
            ("lookahead", SERIES[1], "o", "lookahead queries"),
        ):
            values = [100 * share for share in row[f"{name}_by_layer"]]
            panel.plot(layers, values, color=color, marker=mark, ms=4, label=word)
        before = "layer" if row["distance"] == 1 else "layers"
        panel.set_title(f"{row['distance']} {before} before")
        step = max(1, -(-len(layers) // 6))
        panel.set(xlabel="layer", ylim=(0, 100), xticks=list(layers)[::step])
    panels[0].set_ylabel(f"own choice covered, %\n(budget {percent(budget)})")
    panels[0].text(0.84, 0.58, "paper, periods of 8", fontsize=7.5, va="center", ha="right",
                   transform=panels[0].transAxes, color=INK)  # fmt: skip
    handles, words = panels[0].get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower center", ncols=2)


def conclude_coverage(result: dict[str, Any]) -> str:
    """Means over layers at the largest budget."""
    budget = max(row["budget"] for row in result["coverage"])
    parts = [
        f"{row['distance']} before: {100 * row['previous']:.0f} and {100 * row['lookahead']:.0f}"
        for row in result["coverage"]
        if row["budget"] == budget
    ]
    return (
        f"Per cent of a layer's choice at {percent(budget)} that an earlier choice and the "
        f"lookahead hold, by layers between them: {'; '.join(parts)}."
    )
