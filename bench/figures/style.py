"""One look for every figure: colours, marks, labels beside what they name.

Colours are of Okabe and Ito's set, which people with any kind of colour blindness can tell apart;
every system has a mark of its own as well, so that a figure also reads in grey. A unit stands on
each axis, a budget in each title that has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLORS = {
    "ckv": "#D55E00", "contiguous-kv": "#0072B2", "impress": "#009E73", "as-h2o-lfu": "#CC79A7",
    "as-h2o-lru": "#56B4E9", "as-lru": "#222222", "recompute": "#8A8A8A",
    "kvdrive": "#0072B2", "quest": "#009E73", "shadowkv": "#CC79A7", "pqcache": "#E69F00",
}  # fmt: skip
MARKS = {
    "ckv": "o", "contiguous-kv": "s", "impress": "^", "as-h2o-lfu": "D", "as-h2o-lru": "v",
    "as-lru": "P", "recompute": "X", "kvdrive": "s", "quest": "^", "shadowkv": "D", "pqcache": "P",
}  # fmt: skip
"""A colour and a mark for each system, in every figure; those of decode take those of prefill."""

BLUE = "#0072B2"
"""Of what is not a system."""
INK, FAINT = "#222222", "#8A8A8A"

RC = {
    "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 8,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#E6E6E6", "grid.linewidth": 0.8, "axes.axisbelow": True, "lines.linewidth": 1.6,
    "lines.markersize": 5, "legend.frameon": False, "errorbar.capsize": 2.5, "savefig.dpi": 130,
    "figure.facecolor": "white",
}  # fmt: skip
"""What matplotlib is told while a figure is drawn and written."""


def percent(budget: float | str) -> str:
    """`5%`, `1.6%`, `mass:0.8`: a budget as it is read."""
    return budget if isinstance(budget, str) else f"{100 * budget:.3g}%"


def machine_line(found: Mapping[str, Any] | None) -> str:
    """The machine of a result, in one line; what is not recorded is said so."""
    if not found:
        return "machine not recorded"
    device = str(found["device"])
    beside = "" if device.startswith("cpu") else f", {device}"
    cpu = str(found["cpu"]).replace("(R)", "").removesuffix(" Processor")
    return f"{cpu}, {found['cores']} cores{beside}"


def model_name(name: str) -> str:
    """A model of a result, with what it is where its name does not tell a stranger."""
    return "thin model with the KV of Qwen2.5-7B (kv7b-thin)" if name == "kv7b-thin" else name


def checkpoint_name(name: str) -> str:
    """A checkpoint of a result, as a stranger knows it."""
    return "the checkpoint that ships with the package" if name == "reference" else name


def line(axis: Any, xs: Sequence[float], ys: Sequence[float], system: str, **more: Any) -> None:
    """One system's points, joined, in its colour and with its mark."""
    look = {
        "color": COLORS.get(system, FAINT),
        "marker": MARKS.get(system, "o"),
        "mec": "white",
        "mew": 0.6,
    }
    axis.errorbar(xs, ys, **look | more)


def systems_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The systems of rows, in the order in which figures show them."""
    there = {row["system"] for row in rows}
    return [name for name in COLORS if name in there] + sorted(there - COLORS.keys())
