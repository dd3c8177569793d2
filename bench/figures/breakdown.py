"""Where the time to the first token goes, in milliseconds."""

from __future__ import annotations

from typing import Any

from bench.figures.style import machine_line, model_name, percent, stack
from ckv_jax.trace import MEANING

CAPTION = (
    "Mean milliseconds of each stage as the engine's thread sees it; they add up to the time to "
    "the first token. `probe_io` waits for the keys that choose, `critical_io_wait` for the "
    "chosen KV, `other` is what is none of these."
)
STAGES = {
    "open": "#882255", "probe_io": "#56B4E9", "select": "#CC79A7", "submit": "#DDCC77",
    "critical_io_wait": "#E69F00", "dispatch": "#44AA99", "book": "#117733", "compute": "#0072B2",
    "other": "#BBBBBB",
}  # fmt: skip
"""Every stage that a trace may have; older results tell fewer apart."""


def draw(figure: Any, result: dict[str, Any]) -> None:
    """One bar for each system and budget."""
    rows = sorted(result["rows"], key=lambda row: float(row["budget"]))
    axis = figure.subplots()
    parts = [(name, color) for name, color in STAGES.items() if name in rows[0]["breakdown_ms"]]
    widths = [[row["breakdown_ms"][name] for name, _ in parts] for row in rows]
    stack(axis, widths, parts, [f"{row['system']}, {percent(row['budget'])}" for row in rows])
    for at, (row, found) in enumerate(zip(rows, widths, strict=True)):
        axis.annotate(f"{sum(found):.0f} ms, of which I/O {percent(round(row['io_share'], 2))}",
                      (sum(found), at), xytext=(5, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    axis.set_xlim(0, 1.33 * max(map(sum, widths)))
    axis.set_xlabel("ms of the mean time to first token")
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, [f"{name}: {MEANING[name]}" for name in names],
                  loc="outside lower center", ncols=3)  # fmt: skip
    setting = result["setting"]
    axis.set_title(
        f"{model_name(setting['model'])}, {setting['prefix_tokens']:,}-token prefix, cold, "
        f"{rows[0]['ttft_ms']['n']} requests each. {machine_line(result['machine'])}"
    )


def conclude(result: dict[str, Any]) -> str:
    """The share that waits for the disk, system by system."""
    parts = [
        f"{row['system']} at {percent(row['budget'])}: {row['io_share']:.0%}"
        for row in result["rows"]
    ]
    return f"Share of the time that waits for the disk: {'; '.join(parts)}."
