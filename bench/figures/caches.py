"""Cache policies as differences with intervals; what a window of decode keeps."""

from __future__ import annotations

from typing import Any

from bench.figures.style import FAINT, INK, SERIES, checkpoint_name, percent

POLICIES_CAPTION = (
    "Hit rate of a policy that attention guides less that of another, in points, with 95% "
    "intervals over the draws. Filled: hits on the device; open: on device and host together. To "
    "the right of zero, attention helps."
)
WINDOWS_CAPTION = (
    "Share of a token's chunks that the window still holds, against the size of the window, after "
    "its first steps. Belady's is told the future and bounds the others; the grey line is the goal."
)
_GUIDED = {"attention": (SERIES[0], "s"), "frequency-attention": (SERIES[1], "o")}
_KEEPS = {
    "lru": SERIES[6], "lfu": SERIES[3], "lookahead of 1.25": SERIES[2], "lookahead": SERIES[1],
    "belady": SERIES[0],
}  # fmt: skip
_WORDS = {
    "lookahead of 1.25": "scores, of the best 1.25 choices", "lookahead": "the token's scores",
    "belady": "Belady: told the future",
}  # fmt: skip
"""What a stranger reads for a way of keeping."""


def draw_policies(figure: Any, result: dict[str, Any]) -> None:
    """A panel for each set of selections, a row for each policy that is compared with."""
    rows = result["rows"]
    names = list(dict.fromkeys(row["selections"] for row in rows))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    others = [p for p in dict.fromkeys(row["policy"] for row in rows) if p not in _GUIDED]
    for panel, name in zip(panels, names, strict=True):
        mine = {row["policy"]: row for row in rows if row["selections"] == name}
        for order, (guided, (color, mark)) in enumerate(_GUIDED.items()):
            for at, other in enumerate(others):
                for tier, filled in (("device", True), ("memory", False)):
                    lead = mine[other]["lead"][guided][tier]
                    y = at + 0.26 * (order - 0.5) + (0 if filled else 0.1)
                    panel.errorbar(100 * lead["mean"], y, xerr=100 * lead["half_width"],
                                   color=color, marker=mark, mfc=color if filled else "white",
                                   label=guided if filled and at == 0 else None)  # fmt: skip
        panel.axvline(0, color=INK, lw=1)
        hits = mine["frequency-attention"]["hit_rate"]
        what = name.replace("structured", "synthetic selections")
        panel.set(title=f"{what}\n({hits['device']:.0%} of uses hit the device)",
                  xlabel="points of hit rate ahead of that policy")  # fmt: skip
        panel.set_yticks(range(len(others)), [f"over {other}" for other in others])
        panel.set_ylim(len(others) - 0.5, -0.5)
        panel.grid(visible=False, axis="y")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    said = result["settings"]
    figure.suptitle(
        f"{said['draws']} draws of {said['requests']} requests; caches of {said['device']:.0%} "
        f"(device) and {said['host']:.0%} (host) of the packs. Filled: device; open: both together",
        fontsize=10,
    )


def conclude_policies(result: dict[str, Any]) -> str:
    """Frequency-attention against LRU and LFU on the device."""
    parts = []
    for row in result["rows"]:
        if row["policy"] in ("lru", "lfu"):
            lead = row["lead"]["frequency-attention"]["device"]
            found = f"{100 * lead['mean']:+.1f} ± {100 * lead['half_width']:.1f}"
            parts.append(f"{row['selections']}: {found} over {row['policy'].upper()}")
    return f"Device hits of frequency-attention, points: {'; '.join(parts)}."


def draw_windows(figure: Any, result: dict[str, Any]) -> None:
    """A row for each way of choosing, a column for each budget and kind of text."""
    parts = result["parts"]
    budgets = sorted({part["budget"] for part in parts})
    choosers = list(dict.fromkeys(part["choosing"] for part in parts))
    texts = list(dict.fromkeys(part["trace"] for part in parts))
    axes = figure.subplots(len(choosers), len(budgets), sharex=True, sharey=True, squeeze=False)
    for part in parts:
        axis = axes[choosers.index(part["choosing"])][budgets.index(part["budget"])]
        dashed = texts.index(part["trace"])
        for keep, color in _KEEPS.items():
            mine = [(0, 0.0)] + [(row["times"], 100 * row["hits"]) for row in part["rows"]
                                 if row["keep"] in (keep, "any")]  # fmt: skip
            axis.plot(*zip(*mine, strict=True), "--" if dashed else "-", marker="o", ms=3, lw=1.3,
                      color=color, label=None if dashed else keep)  # fmt: skip
        choosing = part["choosing"].replace("pooled", "of all heads")
        axis.set_title(f"{choosing}, budget {percent(part['budget'])}", fontsize=8.5)
    goal = next((bar["bar"] for bar in result["bars"] if 0.5 < bar["bar"] < 1), None)
    for axis in axes.flat:
        if goal is not None:
            axis.axhline(100 * goal, color=FAINT, lw=1, zorder=0)
    for axis in axes[-1]:
        axis.set(xlabel="window, times one choice", xticks=range(5), ylim=(0, 102))
    for row in axes:
        row[0].set_ylabel("hits, %")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, [_WORDS.get(name, name) for name in names], loc="outside lower center",
                  ncols=len(_KEEPS), title=f"solid: {texts[0]}; dashed: {texts[-1]}")  # fmt: skip
    bar = "" if goal is None else f"; grey: the goal, {percent(goal)}"
    figure.suptitle(
        f"Share of the chunks that a token chooses which a window still holds: "
        f"{checkpoint_name(result['checkpoint'])},\n{result['prefix_tokens']:,} tokens; rows: how "
        f"chunks are chosen{bar}",
        fontsize=10,
    )


def conclude_windows(result: dict[str, Any]) -> str:
    """How many bars are met."""
    met = sum(bar["met"] for bar in result["bars"])
    return f"{met} of {len(result['bars'])} goals are met; the JSON names each."
