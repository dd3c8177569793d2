"""What is read for what is needed: amplification by system, and tokens loaded."""

from __future__ import annotations

from typing import Any

from bench.figures.style import (
    NEEDED,
    PROBED,
    SPARE,
    UNUSED,
    machine_line,
    model_name,
    percent,
    stack,
)

AMPLIFICATION_CAPTION = (
    "Bytes of keys and values read for each byte that takes part in attention, means over requests "
    "that used any of what they read: needed (always 1), demanded with it because a block is "
    "larger than a token, and read ahead but not used. The black line reaches to the 95th "
    "percentile of all. A system none of whose requests used any has no bar."
)
LOADED_CAPTION = (
    "Tokens' worth of keys and values loaded per request: those that take part in attention, those "
    "that came along in their blocks, the keys to choose by, and what was read ahead but not used."
)


def draw_amplification(figure: Any, result: dict[str, Any]) -> None:
    """A bar for each system, cold and warm."""
    reading = [row for row in result["rows"] if row["with_unused"] is not None]
    rows = sorted(reading, key=lambda row: (row["variant"], -row["with_unused"]["mean"]))
    axis = figure.subplots()
    widths = [
        [
            1.0,
            row["read_amplification"]["mean"] - 1,
            row["with_unused"]["mean"] - row["read_amplification"]["mean"],
        ]
        for row in rows
    ]
    parts = (
        ("needed", NEEDED),
        ("came along in its block", SPARE),
        ("read ahead, not used", UNUSED),
    )
    labels = [f"{row['system']}, {row['variant']}, {percent(row['budget'])}" for row in rows]
    stack(axis, widths, parts, labels)
    for at, row in enumerate(rows):
        mean, high = row["with_unused"]["mean"], row["with_unused"]["p95"]
        axis.plot([mean, max(mean, high)], [at + 0.27, at + 0.27], color="black", lw=1)
        axis.annotate(f"{mean:.2f} ×, P95 {high:.2f}", (max(mean, high), at), xytext=(5, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axis.set_xlim(0, 1.25 * max(row["with_unused"]["p95"] for row in rows))
    axis.set_xlabel("bytes read per byte needed")
    setting = result["setting"]
    axis.set_title(
        f"{model_name(setting['model'])}, {setting['prefix_tokens']:,}-token prefixes. "
        f"{machine_line(result['machine'])}"
    )
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def conclude_amplification(result: dict[str, Any]) -> str:
    """The whole, mean, of every row, and what the means leave out."""
    parts, vain = [], []
    for row in result["rows"]:
        name = f"{row['system']} {row['variant']} at {percent(row['budget'])}"
        found = row["with_unused"]
        parts.append(f"{name} nothing used" if found is None else f"{name} {found['mean']:.2f}")
        if row.get("requests_in_vain"):
            vain.append(f"{name} {row['requests_in_vain']} of {row['requests']}")
    left_out = f" Read only what they did not use, and are not in it: {', '.join(vain)}."
    return (
        f"Bytes read per byte needed, read ahead and not used included: {', '.join(parts)}."
        f"{left_out if vain else ''}"
    )


def draw_loaded(figure: Any, result: dict[str, Any]) -> None:
    """A bar for each system and budget, and its share of IMPRESS's."""
    rows = sorted(result["rows"], key=lambda row: float(row["budget"]))
    axis = figure.subplots()
    widths = []
    for row in rows:
        tokens = row["tokens"]
        least = min(
            one["tokens"]["critical"] for one in rows if one["budget"] == row["budget"]
        )  # whole chunks that all take part: nothing came along
        probe = tokens["with_probe"] - tokens["critical"]
        unused = tokens["with_unused"] - tokens["with_probe"]
        widths.append([least, tokens["critical"] - least, probe, unused])
    parts = (
        ("needed", NEEDED), ("came along in its block", SPARE), ("keys to choose by", PROBED),
        ("read ahead, not used", UNUSED),
    )  # fmt: skip
    stack(axis, widths, parts, [f"{row['system']}, {percent(row['budget'])}" for row in rows])
    for at, (row, found) in enumerate(zip(rows, widths, strict=True)):
        told = f"{row['share_of_impress']['with_unused']:.0%} of IMPRESS's"
        axis.annotate(told, (sum(found), at), xytext=(5, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axis.set_xlim(0, 1.24 * max(map(sum, widths)))
    axis.set_xlabel("tokens loaded per request (keys and values of all layers)")
    setting = result["setting"]
    axis.set_title(
        f"{model_name(setting['model'])}, {setting['prefix_tokens']:,}-token prefix, cold. "
        f"{machine_line(result['machine'])}"
    )
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(parts))


def conclude_loaded(result: dict[str, Any]) -> str:
    """What the bars show, as shares of IMPRESS's; keys and values demanded alone, which is what the
    paper's table has, beside its figures."""
    told, within = [], []
    paper = sorted(result["paper"].values())
    for row in sorted(result["rows"], key=lambda row: float(row["budget"])):
        if row["system"] == "impress":
            continue
        name, found = f"{row['system']} at {percent(row['budget'])}", row["share_of_impress"]
        told.append(f"{name} {found['with_unused']:.1%} ({found['critical']:.1%})")
        if paper[0] <= found["critical"] <= paper[-1]:
            within.append(name)
    return (
        "All that a request loads, as a share of what one of IMPRESS's does (in brackets demanded "
        f"keys and values alone): {'; '.join(told)}. The paper's Table 2 has {paper[0]:.1%} to "
        f"{paper[-1]:.1%} of the latter, its budget not given; within that: "
        f"{', '.join(within) or 'none'}."
    )
