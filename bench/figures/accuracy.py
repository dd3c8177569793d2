"""Right answers against the time to the first token and against budget."""

from __future__ import annotations

from typing import Any

from bench.figures.style import (
    COLORS,
    FAINT,
    checkpoint_name,
    line,
    model_name,
    percent,
    systems_of,
)

CAPTION = (
    "Left: right answers against the time to the first token; up and to the left is better. The "
    "shares next to marks are budgets. Times are of a model with the KV shape of Qwen2.5-7B, "
    "answers are of the small checkpoint that ships with the package, so this panel combines two "
    "measurements. Right: the same answers against budget. Whiskers are 95% intervals."
)
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
                      color=COLORS.get(name, FAINT), fontweight="bold", fontsize=8.5)  # fmt: skip
        up = {"ckv": -12, "contiguous-kv": 9}.get(name)
        if up is not None:  # the others' would hide each other
            for row, px, py in zip(mine, at, right, strict=True):
                told = percent(row["budget"])
                axis.annotate(told, (px, py), xytext=(-9, up), textcoords="offset points",
                              ha="center", fontsize=7, color=COLORS.get(name, FAINT))  # fmt: skip
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
