"""What each point of mending the rivals moved: times before over after, bytes from SSD beside."""

from __future__ import annotations

from typing import Any

from bench.figures.style import COLORS, FAINT, INK, MARKS, machine_line, percent

CAPTION = (
    "Left, mean TTFT with one point as it was over that of the system as it is: right of 1 the "
    "mended point made it faster; bars are 95% intervals by bootstrap over the questions, which "
    "both answered by turns. Right, MB from SSD per request, hollow before and filled after."
)
_SHORT = {
    1: "three query heads, not KV heads", 2: "probe keys in the caches", 3: "reordering",
    4: "rows fall back alone", 5: "H2O's keys are sure reads", 6: "equal memory",
}  # fmt: skip


def draw(figure: Any, result: dict[str, Any]) -> None:
    """A line for each row."""
    rows = result["rows"]
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for at, row in enumerate(rows):
        color, mark = COLORS[row["system"]], MARKS[row["system"]]
        low, high = row["ratio_interval"]
        left.plot([low, high], [at, at], color=color, lw=4, alpha=0.5)
        left.plot([row["ratio"]], [at], color=color, marker=mark, ms=7)
        left.annotate(f"{row['ratio']:.2f}", (high, at), xytext=(6, 0), va="center",
                      textcoords="offset points", fontsize=8, color=color)  # fmt: skip
        before, after = (row[side]["ssd_bytes"] / 1e6 for side in ("before", "after"))
        right.plot([before, after], [at, at], color=FAINT, lw=1)
        right.plot([before], [at], color=color, marker=mark, ms=7, mfc="white", ls="none")
        right.plot([after], [at], color=color, marker=mark, ms=6, ls="none")
    left.axvline(1, color=INK, lw=1)
    left.set_yticks(range(len(rows)), [label(row) for row in rows])
    left.set(ylim=(len(rows) - 0.4, -0.6), xlabel="mean TTFT before / after", xscale="log")
    ticks = [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20]
    ends = [end for row in rows for end in row["ratio_interval"]]
    left.set(xlim=(min(0.7, *ends) / 1.1, max(1.5, *ends) * 1.25))
    shown = [tick for tick in ticks if left.get_xlim()[0] < tick < left.get_xlim()[1]]
    left.set_xticks(shown, [f"{tick:g}" for tick in shown])
    left.minorticks_off()
    right.set(xlabel="MB from SSD per request", xlim=(0, None))
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
    setting, warm = result["setting"], result["warm_setting"]
    figure.suptitle(
        f"One point put back at a time, at {percent(setting['budgets'][0])} (point 4: its own). "
        f"Cold: {setting['prefix_tokens']:,} tokens; warm: {warm['prefixes']} prefixes of "
        f"{warm['prefix_tokens']:,}. {machine_line(result['machine'])}",
        fontsize=10,
    )


def label(row: dict[str, Any]) -> str:
    """A row in words."""
    what = _SHORT[row["point"]] + (f" ({row['variant']})" if row["variant"] else "")
    return f"{row['point']}. {what}: {row['system']}, {row['temperature']}"


def conclude(result: dict[str, Any]) -> str:
    """Which points can be told from nothing."""
    told = [
        f"{label(row)} {row['ratio']:.2f}"
        for row in result["rows"]
        if not row["variant"].startswith("charged")  # above 1 by what it is
        and not row["ratio_interval"][0] <= 1 <= row["ratio_interval"][1]
    ]
    total = len(result["rows"])
    if not told:
        return f"None of {total} ratios can be told from 1."
    return f"{len(told)} of {total} ratios can be told from 1: {'; '.join(told)}."
