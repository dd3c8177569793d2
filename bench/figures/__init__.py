"""Every figure as a function of a result's JSON, so that it can be drawn again without measuring.

`FIGURES` names them. A benchmark draws its own with `save`; `python -m bench.report --redraw` draws
all of those whose JSON lies in a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Json, read_json
from bench.figures import accuracy, decode, fidelity, memory, times
from bench.figures.style import RC


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One picture: what it is drawn from, and what is said beside it."""

    title: str
    draw: Callable[[Any, Json], None]
    """On an empty matplotlib figure, from a result."""
    size: tuple[float, float]
    """Inches."""
    caption: str
    """How to read it."""
    conclude: Callable[[Json], str]
    """What it shows, with the result's own numbers."""
    beside: tuple[str, ...] = ()
    """Other results that it shows as well, if they are there: keys of the result when drawn."""


FIGURES: dict[str, Figure] = {
    "ttft": Figure(
        title="Time to first token, nothing cached (ContiguousKV Figures 10, 11: warm caches)",
        draw=times.draw, size=(11, 5.6), caption=times.CAPTION, conclude=times.conclude,
    ),
    "accuracy": Figure(
        title="Accuracy (Figure 9)", draw=accuracy.draw, size=(11.5, 4.6),
        caption=accuracy.CAPTION, conclude=accuracy.conclude, beside=("ttft",),
    ),
    "fidelity": Figure(
        title="A real model: divergence from full attention against bytes read",
        draw=fidelity.draw, size=(13, 4.4), caption=fidelity.CAPTION, conclude=fidelity.conclude,
    ),
    "decode": Figure(
        title="Decode: tokens per second", draw=decode.draw_speed, size=(13, 4.0),
        caption=decode.SPEED_CAPTION, conclude=decode.conclude_speed,
    ),
    "decode_accuracy": Figure(
        title="Decode: right answers by budget", draw=decode.draw_accuracy, size=(11, 4.2),
        caption=decode.ACCURACY_CAPTION, conclude=decode.conclude_accuracy,
    ),
    "server_memory": Figure(
        title="Memory of a server", draw=memory.draw, size=(6.5, 3.4),
        caption=memory.CAPTION, conclude=memory.conclude,
    ),
}  # fmt: skip
"""By the name of the PNG."""


def save(name: str, result: Json, path: Path | None) -> None:
    """Draws the figure `name` from `result`, and the results that it shows as well where they lie
    beside the picture, and writes it as PNG; nothing without a path."""
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure as Canvas

    drawn = FIGURES[name]
    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=drawn.size, layout="constrained")
        drawn.draw(canvas, _beside(drawn, path.parent) | result)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path)
    print(f"wrote {path}")


def result_of(name: str, folder: Path) -> Json | None:
    """The JSON that a figure is drawn from, with those beside it; None where there is none."""
    drawn = FIGURES[name]
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    return read_json(path) | _beside(drawn, folder)


def _beside(drawn: Figure, folder: Path) -> Json:
    """The other results that a figure shows, of those that lie in `folder`."""
    paths = {other: folder / f"{other}.json" for other in drawn.beside}
    return {other: read_json(path) for other, path in paths.items() if path.is_file()}


def draw_again(folder: Path) -> None:
    """Draws every figure whose JSON lies in `folder` beside it."""
    for name in FIGURES:
        result = result_of(name, folder)
        if result is not None:
            save(name, result, folder / f"{name}.png")
