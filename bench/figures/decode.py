"""Decode: tokens per second, and right answers by budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.figures.style import COLORS, FAINT, MARKS, checkpoint_name, line, percent, systems_of

SPEED_CAPTION = (
    "Left: tokens per second of all sequences together, from SSD (black: with the store in "
    "memory), with as many sequences as most systems were run with. Middle: the share of a "
    "token's time that waits for selections and packs. Right: tokens per second by the number of "
    "sequences."
)
ACCURACY_CAPTION = (
    "Right answers of texts that are decoded token by token, against budget, with 95% intervals. "
    "Points of different systems are shifted a little, so that none hides another. At 100% every "
    "token attends to everything."
)


def draw_speed(figure: Any, result: dict[str, Any]) -> None:
    """Tokens per second and the share that waits, by system; then by how many sequences."""
    rows, usual = result["rows"], _usual(result["rows"])
    shown = [row for row in rows if row["sequences"] == usual and row["place"] == "ssd"]
    names = [row["system"] for row in shown]
    colors = [COLORS.get(name, FAINT) for name in names]
    left, middle, right = figure.subplots(1, 3)
    speeds = left.barh(names, [row["tokens_s"] for row in shown], color=colors)
    left.bar_label(speeds, fmt="%.1f", padding=3)
    memory = [row for row in rows if row["sequences"] == usual and row["place"] == "host"
              and row["system"] in names]  # fmt: skip
    left.scatter([row["tokens_s"] for row in memory], [row["system"] for row in memory],
                 marker="|", s=140, color="black", zorder=3)  # fmt: skip
    left.set(xlabel="tokens per second", title=f"{usual} sequences", xlim=(0, None))
    shares = [row["exposed_share"] for row in shown]
    waits = middle.barh(names, [100 * (share or 0) for share in shares], color=colors)
    said = ["not recorded" if share is None else f"{share:.0%}" for share in shares]
    middle.bar_label(waits, said, padding=3)
    middle.set(
        xlabel="share of a token's time that waits for selections and packs, %", xlim=(0, 115)
    )
    middle.set_yticks(range(len(names)), [])
    for axis in (left, middle):
        axis.grid(visible=False, axis="y")
    for name in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == name and row["place"] == "ssd"]
        mine.sort(key=lambda row: int(row["sequences"]))
        if len(mine) > 1:
            counts = [row["sequences"] for row in mine]
            look = {"marker": MARKS.get(name, "o"), "color": COLORS.get(name, FAINT)}
            right.plot(counts, [row["tokens_s"] for row in mine], label=name, **look)
    counts = sorted({row["sequences"] for row in rows})
    right.set_xscale("log", base=2)
    right.set_xticks(counts, [str(count) for count in counts])
    right.set(xlabel="sequences", title="tokens per second", ylim=(0, None))
    if right.lines:
        right.legend()


def _usual(rows: Sequence[dict[str, Any]]) -> int:
    """The number of sequences that most rows have, the larger of equals."""
    counts = Counter(row["sequences"] for row in rows)
    return int(max(counts, key=lambda n: (counts[n], n)))


def conclude_speed(result: dict[str, Any]) -> str:
    """The fastest where most systems were run."""
    usual = _usual(result["rows"])
    best = max((row for row in result["rows"] if row["sequences"] == usual),
               key=lambda row: float(row["tokens_s"]))  # fmt: skip
    return (
        f"With {usual} sequences {best['system']} is fastest, {best['tokens_s']:.1f} tokens per "
        f"second from {best['place']}."
    )


def draw_accuracy(figure: Any, result: dict[str, Any]) -> None:
    """A panel for each kind of text, a line for each system."""
    rows = result["rows"]
    texts = list(dict.fromkeys(row["trace"] for row in rows))
    budgets = sorted({row["budget"] for row in rows})
    panels = figure.subplots(1, len(texts), sharey=True, squeeze=False)[0]
    systems = systems_of(rows)
    for panel, text in zip(panels, texts, strict=True):
        panel.set(xlim=(-0.3, len(budgets) - 0.6), ylim=(0, 103), title=text, xlabel="budget")
        panel.set_xticks(range(len(budgets)), [percent(budget) for budget in budgets])
        for order, system in enumerate(systems):
            mine = [row for row in rows if (row["trace"], row["system"]) == (text, system)]
            mine.sort(key=lambda row: float(row["budget"]))
            shift = 0.045 * (order - (len(systems) - 1) / 2)
            at = [budgets.index(row["budget"]) + shift for row in mine]
            right = [100 * row["accuracy"] for row in mine]
            low = [max(0.0, y - 100 * row["ci95"][0]) for y, row in zip(right, mine, strict=True)]
            high = [max(0.0, 100 * row["ci95"][1] - y) for y, row in zip(right, mine, strict=True)]
            line(panel, at, right, system, yerr=(low, high), elinewidth=0.7, label=system,
                 ms=5 if MARKS.get(system, "o") != "o" else 6)  # fmt: skip
    panels[0].set_ylabel("right answers, %")
    figure.suptitle(
        f"Answers decoded token by token, {result['documents']} ledgers of {result['tokens']:,} "
        f"tokens, {checkpoint_name(result['checkpoint'])}; whiskers: 95% intervals",
        fontsize=10,
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=len(systems))  # fmt: skip


def conclude_accuracy(result: dict[str, Any]) -> str:
    """Right answers at the smallest budget, the last kind of text."""
    rows = result["rows"]
    text, budget = rows[-1]["trace"], min(row["budget"] for row in rows)
    parts = [
        f"{row['system']} {100 * row['accuracy']:.0f}"
        for row in rows
        if row["trace"] == text and row["budget"] == budget
    ]
    return f"Right at {percent(budget)} over {text}, per cent: {', '.join(parts)}."
