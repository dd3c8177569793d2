"""Throughput and bytes of many requests at once, beside what would be ideal."""

from __future__ import annotations

from typing import Any

from bench.figures.style import FAINT, SERIES, ends, machine_line, model_name, percent

CAPTION = (
    "Left, requests per second by how many are asked at once, both axes logarithmic; the dashed "
    "line is ideal: as many times the first point as there are requests. Right, bytes that one "
    "call reads for all its requests over one prefix; needed: the union of what each selects; one "
    "by one: as many times the first point as there are requests."
)


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Requests per second, and SSD bytes on one prefix."""
    rows = result["rows"]
    left, right = figure.subplots(1, 2)
    batches = sorted({row["batch"] for row in rows})
    for axis in (left, right):
        axis.set(xscale="log", yscale="log", xlabel="requests at once",
                 xlim=(batches[0] * 0.85, batches[-1] * 2.6))  # fmt: skip
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.minorticks_off()
    named = []
    kinds = list(dict.fromkeys((row["system"], row["load"]) for row in rows))
    for kind, color, mark in zip(kinds, SERIES, "osD^", strict=False):
        mine = [row for row in rows if (row["system"], row["load"]) == kind]
        ys = [row["requests_s"] for row in mine]
        left.plot([row["batch"] for row in mine], ys, color=color, marker=mark)
        named.append((f"{kind[0]},\n{kind[1]}", mine[-1]["batch"], ys[-1], color))
    first = rows[0]["requests_s"]
    ideal = [first * batch / batches[0] for batch in batches]
    left.plot(batches, ideal, "--", color=FAINT)
    left.set(ylabel="requests per second", title="Throughput")
    _plain(left, [row["requests_s"] for row in rows] + ideal)
    ends(left, [*named, ("ideal", batches[-1], ideal[-1], FAINT)])
    same = [row for row in rows if "union_bytes" in row and row["system"] == rows[0]["system"]]
    if same:
        at = [row["batch"] for row in same]
        lines = {
            "read": [row["ssd_bytes"] / 1e6 for row in same],
            "needed": [row["union_bytes"] / 1e6 for row in same],
            "one by one": [same[0]["ssd_bytes"] / 1e6 * batch / at[0] for batch in at],
        }
        for (name, ys), color, mark in zip(
            lines.items(), (SERIES[0], SERIES[1], FAINT), ("o", "s", ""), strict=True
        ):
            right.plot(at, ys, "--" if name == "one by one" else "-", color=color, marker=mark)
        _plain(right, [y for ys in lines.values() for y in ys])
        ends(right, [(name, at[-1], ys[-1], color) for (name, ys), color in
                     zip(lines.items(), (SERIES[0], SERIES[1], FAINT), strict=True)])  # fmt: skip
        right.set(ylabel="MB read from SSD per call", title="Bytes on one prefix")
    setting = result["setting"]
    figure.suptitle(
        f"{model_name(setting['model'])}, {setting['prefix_tokens']:,}-token prefixes, one prefix "
        f"at {percent(setting['budgets'][0])}, mixed at all budgets. "
        f"{machine_line(result['machine'])}",
        fontsize=10,
    )


def _plain(axis: Any, values: list[float]) -> None:
    """Round numbers as ticks of a logarithmic axis."""
    low, high = min(values) * 0.8, max(values) * 1.3
    steps = [n * 10**e for e in range(6) for n in (1, 2, 5)]
    inside = [step for step in steps if low <= step <= high]
    axis.set_ylim(low, high)
    axis.set_yticks(inside, [f"{step:,}" for step in inside])


def conclude(result: dict[str, Any]) -> str:
    """Eight on one prefix against one."""
    parts = [
        f"{system}: {found['requests_s_ratio']:.1f} times the requests per second and "
        f"{found['ssd_bytes_ratio']:.1f} times the bytes"
        for system, found in result["bars"].items()
    ]
    return f"Eight requests on one prefix against one: {'; '.join(parts)}." if parts else ""
