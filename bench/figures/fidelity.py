"""Fidelity of each system's answers on a real model, against the bytes that it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.figures.style import COLORS, FAINT, MARKS, machine_line, percent, systems_of

CAPTION = (
    "Each dot is one system at one budget. Across: bytes that a cold request reads. Up: the "
    "divergence of its next token from full attention's (KL, means over texts). Both axes are "
    "logarithmic; lower and further left is better. Small numbers are the share of questions with "
    "full attention's token."
)


def points(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """Task -> system -> (MiB, KL, agreement, budget), by bytes; means weighted by questions."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "kl" in row and not isinstance(row["budget"], str):  # shares of a text alone
            groups[row["task"], row["system"], row["budget"]].append(row)
    found: dict[str, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for (task, system, budget), some in sorted(groups.items()):
        read, kl, agree = (mean(some, key) for key in ("bytes", "kl", "agree"))
        found[task][system].append((read / 2**20, kl, agree, budget))
    return found


def mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    """The mean of a figure over rows, weighted by their questions."""
    asked = sum(row["questions"] for row in rows)
    return float(sum(row[key] * row["questions"] for row in rows) / asked)


def draw(figure: Any, result: dict[str, Any]) -> None:
    """One panel a task."""
    from matplotlib.ticker import LogLocator, NullFormatter

    found = points(result["rows"])
    axes = figure.subplots(1, max(1, len(found)), squeeze=False)[0]
    for axis, (task, systems) in zip(axes, found.items(), strict=False):
        labels = []
        for name, dots in systems.items():
            dots.sort()
            mib, kl = [dot[0] for dot in dots], [max(dot[1], 1e-4) for dot in dots]
            axis.plot(mib, kl, color=COLORS.get(name, FAINT), marker=MARKS.get(name, "o"),
                      label=name)  # fmt: skip
            labels += [(x, y, dot[2], name) for x, y, dot in zip(mib, kl, dots, strict=True)]
        axis.set(xscale="log", yscale="log", xlabel="MiB read by a request", title=task)
        axis.autoscale_view()
        spots = axis.transData.transform([label[:2] for label in labels]) * 72 / figure.dpi
        for spot, (x, y, agree, name) in zip(spots, labels, strict=True):
            taken = np.hypot(*(spots - spot - (8, 7)).T).min() < 8  # by a marker
            axis.annotate(
                f"{100 * agree:.0f}", (x, y), xytext=(4, -10 if taken else 4),
                textcoords="offset points", fontsize=7, color=COLORS.get(name, FAINT),
            )  # fmt: skip
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_formatter(NullFormatter())
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("KL of the next token, nats\n(numbers: % with the same token)")
    names = systems_of([row for row in result["rows"] if "kl" in row])
    handles = [
        axes[0].plot([], [], color=COLORS.get(n, FAINT), marker=MARKS.get(n, "o"))[0] for n in names
    ]
    figure.legend(handles, names, loc="outside lower center", ncols=max(1, len(names)))


def conclude(result: dict[str, Any]) -> str:
    """Divergence of `ckv` and of the next best at the smallest budget of continuations."""
    systems = points(result["rows"])["continuation"]
    least = min(dot[3] for dot in systems["ckv"])
    said = [
        f"{name} {kl:.3f} nats reading {mib:.1f} MiB"
        for name, dots in systems.items()
        for mib, kl, _, budget in dots
        if budget == least
    ]
    return (
        f"Continuations at {percent(least)}, on {machine_line(result.get('machine'))}: "
        f"{', '.join(said)}."
    )
