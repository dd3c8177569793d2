"""What each part of a system is worth, and what its sizes are worth."""

from __future__ import annotations

from typing import Any

from bench.figures.style import (
    COLORS,
    INK,
    half_width,
    line,
    machine_line,
    model_name,
    percent,
    systems_of,
)

ABLATION_CAPTION = (
    "Mean TTFT with a part taken away, less the mean of the whole system: to the right of zero, "
    "the part was worth having. Lines are 95% intervals of the difference, from the standard "
    "deviations and numbers of requests, as if these were independent. All took turns by rounds "
    "with the same requests."
)
SENSITIVITY_CAPTION = (
    "Mean TTFT as one size changes; both axes are logarithmic. With subperiods, periods have 8 "
    "layers; prefixes of other lengths are written with KV that no model computed. Whiskers "
    "are 95% intervals of the mean, from P50, P95 and the number of requests, as if times were "
    "normal."
)
_NAMES = {
    "chunk_tokens": "tokens per chunk", "period": "layers per period",
    "subperiod": "layers per subperiod", "prefix_tokens": "tokens of the prefix",
}  # fmt: skip


def differences(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each variant of ours against the whole: ms more, half of its 95% interval."""
    rows = result["rows"]
    found = []
    for row in rows:
        if row["system"] == "impress" or row["variant"] == "warm":
            continue
        key = (row["system"], row["budget"], "warm")
        [whole] = [r for r in rows if (r["system"], r["budget"], r["variant"]) == key]
        halves = [half_width(one["ttft_ms"]) for one in (row, whole)]
        found.append(
            {
                "system": row["system"],
                "budget": row["budget"],
                "variant": row["variant"],
                "ms": row["ttft_ms"]["mean"] - whole["ttft_ms"]["mean"],
                "half": (halves[0] ** 2 + halves[1] ** 2) ** 0.5,
                "whole_ms": whole["ttft_ms"]["mean"],
            }
        )
    return found


def draw_ablation(figure: Any, result: dict[str, Any]) -> None:
    """A panel for each system and budget, a row for each part taken away."""
    found = differences(result)
    kinds = list(dict.fromkeys((one["system"], one["budget"]) for one in found))
    axes = figure.subplots(1, len(kinds), sharex=True, squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        mine = [one for one in found if (one["system"], one["budget"]) == kind]
        for at, one in enumerate(mine):
            line(axis, [one["ms"]], [at], one["system"], xerr=[one["half"]], ms=7)
            axis.annotate(f"{one['ms']:+.1f} ± {one['half']:.1f}", (one["ms"], at), xytext=(0, 8),
                          textcoords="offset points", ha="center", fontsize=8,
                          bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip
        axis.axvline(0, color=INK, lw=1)
        axis.set_yticks(range(len(mine)), [_words(one["variant"]) for one in mine])
        axis.set_ylim(len(mine) - 0.4, -0.7)
        axis.grid(visible=False, axis="y")
        [base] = [r for r in result["rows"] if (r["system"], r["budget"]) == ("impress", kind[1])]
        axis.set_title(
            f"{kind[0]} at {percent(kind[1])}: {mine[0]['whole_ms']:.0f} ms as it is\n"
            f"(impress {base['ttft_ms']['mean']:.0f} ms)",
            color=COLORS[kind[0]],
        )
        axis.set_xlabel("ms more than the whole system")
    setting, row = result["setting"], result["rows"][0]
    sizes = f"{percent(row['device_share'])} and {percent(row['host_share'])}"
    figure.suptitle(
        f"{model_name(setting['model'])}, {setting['prefixes']} prefixes of "
        f"{setting['prefix_tokens']:,} tokens,\n{_asked(result['rows'])} with caches of {sizes}. "
        f"{machine_line(result['machine'])}",
        fontsize=10,
    )


def _asked(rows: list[dict[str, Any]]) -> str:
    """How many requests a mean is of."""
    counts = {row["ttft_ms"]["n"] for row in rows}
    told = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{told} requests each"


def _words(variant: str) -> str:
    return {
        "w/o P": "no prefetching",
        "w/o AC": "LFU in place of the\nattention-guided cache",
        "w/o P, AC": "no prefetching\nand LFU",
    }.get(variant, variant)


def conclude_ablation(result: dict[str, Any]) -> str:
    """Which parts can be told from nothing, those worth having apart from those that cost time."""
    found = differences(result)
    told = {
        "slower without": [one for one in found if one["ms"] > one["half"]],
        "faster without": [one for one in found if -one["ms"] > one["half"]],
    }
    parts = [
        f"{how} in {len(ones)} ("
        + ", ".join(
            f"{one['system']} {one['variant']} {one['ms']:+.1f} ± {one['half']:.1f} ms"
            for one in ones
        )
        + ")"
        for how, ones in told.items()
        if ones
    ]
    if not parts:
        return f"None of the {len(found)} differences can be told from nothing."
    return f"Of {len(found)} differences, requests are {' and '.join(parts)}."


FIXED_CHUNKS = "prefix_tokens_fixed_chunks"
BY_STAGES = (FIXED_CHUNKS, "prefix_tokens_share")
"""Rows that compare ways of scoring, by prefix length."""


def draw_sensitivity(figure: Any, result: dict[str, Any]) -> None:
    """A column for each size, a row for each budget; without those of as many chunks of any prefix,
    each of which has a budget of its own."""
    rows = [row for row in result["rows"] if row["parameter"] not in BY_STAGES]
    names = list(dict.fromkeys(row["parameter"] for row in rows))
    budgets = sorted({row["budget"] for row in rows})
    axes = figure.subplots(len(budgets), len(names), squeeze=False, sharex="col")
    for budget, panels in zip(budgets, axes, strict=True):
        for axis, name in zip(panels, names, strict=True):
            mine = [row for row in rows if (row["parameter"], row["budget"]) == (name, budget)]
            for system in systems_of(mine):
                points = [row for row in mine if row["system"] == system]
                line(
                    axis, [row["value"] for row in points],
                    [row["ttft_ms"]["mean"] for row in points], system, label=system,
                    yerr=[half_width(row["ttft_ms"]) for row in points],
                )  # fmt: skip
            values = sorted({row["value"] for row in mine})
            axis.set(xscale="log", yscale="log", title=f"budget {percent(budget)}")
            axis.set_xticks(values, [f"{v // 1000}k" if v >= 1000 else str(v) for v in values])
            axis.xaxis.set_minor_locator(_none())
            _round_ticks(axis, [row["ttft_ms"]["mean"] for row in mine])
        panels[0].set_ylabel("mean TTFT, ms")
    for axis, name in zip(axes[-1], names, strict=True):
        axis.set_xlabel(_NAMES.get(name, name))
    handles = axes[0][-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(handles[1]))
    setting = result["setting"]
    figure.suptitle(
        f"{model_name(setting['model'])}, {setting['prefix_tokens']:,}-token prefix where it "
        f"does not change, cold, {_asked(rows)};\nwhiskers: 95% intervals. "
        f"{machine_line(result['machine'])}",
        fontsize=10,
    )


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _round_ticks(axis: Any, values: list[float]) -> None:
    """A handful of round numbers on a logarithmic y axis, which covers `values`."""
    low, high = min(values) * 0.85, max(values) * 1.2
    steps = [n * 10**e for e in range(5) for n in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)]
    inside = [step for step in steps if low <= step <= high]
    every = -(-len(inside) // 5)
    axis.set_ylim(low, high)
    axis.set_yticks(inside[::every], [f"{step:,.0f}" for step in inside[::every]])
    axis.yaxis.set_minor_locator(_none())


def conclude_sensitivity(result: dict[str, Any]) -> str:
    """How each system grows from the shortest prefix to the longest."""
    rows = [row for row in result["rows"] if row["parameter"] == "prefix_tokens"]
    fixed = [row for row in result["rows"] if row["parameter"] == FIXED_CHUNKS]
    said = []
    if rows:
        budget = min(row["budget"] for row in rows)
        said.append(_grows([row for row in rows if row["budget"] == budget], percent(budget)))
    if fixed:
        said.append(_grows(fixed, "16 chosen chunks"))
    return " ".join(said) or "No prefix lengths were measured."


def _grows(rows: list[dict[str, Any]], chosen: str) -> str:
    parts = []
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = sorted(
            (row for row in rows if row["system"] == name), key=lambda row: int(row["value"])
        )
        first, last = (row["ttft_ms"]["mean"] for row in (mine[0], mine[-1]))
        parts.append(f"{name} {first:,.0f} to {last:,.0f}")
    lengths = sorted({row["value"] for row in rows})
    return (
        f"Prefixes of {lengths[0]:,} to {lengths[-1]:,} tokens at {chosen}, mean ms: "
        f"{'; '.join(parts)}."
    )
