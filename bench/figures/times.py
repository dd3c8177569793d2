"""Time to first token against budget, a panel for each system, with what bounds it."""

from __future__ import annotations

from typing import Any

from bench.figures.style import (
    COLORS,
    FAINT,
    INK,
    MARKS,
    machine_line,
    model_name,
    percent,
    systems_of,
)

CAPTION = (
    "Dots are medians. Thick bars are their 95% intervals (by bootstrap, where the result has "
    "them), and thin lines reach to the 95th percentile. Two ticks mark the floors of a request: "
    "the black one its bare jitted calls with everything on the device, the grey one the bytes "
    "that it must read at fio's bandwidth. Nothing stays cached from one request to the next but "
    "the digest of `ckv`, which is in memory."
)


def draw(figure: Any, result: dict[str, Any]) -> None:
    """One panel for each system that reads; recompute's time is in the title."""
    rows = [row for row in result["rows"] if row["variant"] == "default"]
    dense = [row for row in rows if row["system"] == "recompute"]
    rows = [row for row in rows if row["system"] != "recompute"]
    names = systems_of(rows)
    budgets = sorted({row["budget"] for row in rows})
    columns = (len(names) + 1) // 2 if len(names) > 3 else len(names)
    axes = figure.subplots(-(-len(names) // columns), columns, sharex=True, sharey=True,
                           squeeze=False)  # fmt: skip
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        mine = [row for row in rows if row["system"] == name]
        mine.sort(key=lambda row: float(row["budget"]))
        at = [budgets.index(row["budget"]) for row in mine]
        medians = [row["ttft_ms"]["p50"] for row in mine]
        above = [max(0.0, row["ttft_ms"]["p95"] - row["ttft_ms"]["p50"]) for row in mine]
        tick = {"ls": "none", "marker": "_", "ms": 16, "mew": 2}
        axis.plot(at, [row["io_floor_ms"] for row in mine], color=FAINT, **tick)
        axis.plot(at, [row["compute_floor_ms"] for row in mine], color=INK, **tick)
        axis.errorbar(at, medians, yerr=([0] * len(at), above), color=COLORS.get(name, FAINT),
                      marker=MARKS.get(name, "o"), ms=7, ls="none", lw=1)  # fmt: skip
        for x, row in zip(at, mine, strict=True):
            if row["ttft_ms"].get("p50_interval"):  # none of few requests, or of older results
                axis.vlines(
                    x,
                    *row["ttft_ms"]["p50_interval"],
                    color=COLORS.get(name, FAINT),
                    lw=5,
                    alpha=0.5,
                )
        for x, y in zip(at, medians, strict=True):
            axis.annotate(f"{y:.0f}", (x, y), xytext=(9, 0), textcoords="offset points",
                          va="center", fontsize=8, color=COLORS.get(name, FAINT))  # fmt: skip
        axis.set_title(name, color=COLORS.get(name, FAINT), fontweight="bold")
    first = axes.flat[0]
    first.set(xlim=(-0.4, len(budgets) - 0.35), ylim=(0, None))
    first.set_xticks(range(len(budgets)), [percent(budget) for budget in budgets])
    for row in axes:
        row[0].set_ylabel("TTFT, ms")
    for axis in axes[-1]:
        axis.set_xlabel("budget")
    handles = [
        *first.plot([], [], ls="none", marker="_", ms=16, mew=2, color=INK),
        *first.plot([], [], ls="none", marker="_", ms=16, mew=2, color=FAINT),
    ]
    figure.legend(handles, ["floor: the calls alone, all KV on the device",
                            "floor: the bytes alone, at fio's bandwidth"],
                  loc="outside lower center", ncols=2)  # fmt: skip
    setting = result["setting"]
    title = (
        f"{model_name(setting['model'])}, {setting['prefix_tokens']:,}-token prefix, cold: "
        f"median TTFT, line to P95. {machine_line(result['machine'])}"
    )
    if dense:
        title += f". recompute: {dense[0]['ttft_ms']['p50']:,.0f} ms"
    figure.suptitle(title, fontsize=10)


def conclude(result: dict[str, Any]) -> str:
    """Means at the smallest budget, and how far ours are from their floors."""
    rows = [row for row in result["rows"] if row["variant"] == "default"]
    budget = min(row["budget"] for row in rows)
    mine = {row["system"]: row for row in rows if row["budget"] == budget}
    means = ", ".join(f"{name} {mine[name]['ttft_ms']['mean']:,.0f}" for name in systems_of(rows))
    said = f"Means at {percent(budget)}, ms: {means}."
    ratios = [f"{n} {mine[n]['ratio_to_floor']:.2f}" for n in ("ckv", "contiguous-kv") if n in mine]
    return said + (f" Median over the larger floor: {', '.join(ratios)}." if ratios else "")
