"""Every figure is drawn from the committed results, and says what they say."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from bench.figures import FIGURES, result_of, save
from bench.figures.style import RC

RESULTS = Path(__file__).parents[2] / "bench" / "results"
DRAWN = [name for name in FIGURES if result_of(name, RESULTS) is not None]


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_result_can_be_drawn_again(name: str) -> None:
    result = result_of(name, RESULTS)
    assert result is not None
    with matplotlib.rc_context(RC):
        canvas = Figure(figsize=FIGURES[name].size, layout="constrained")
        FIGURES[name].draw(canvas, result)
        canvas.draw_without_rendering()
    labels = [axis.get_xlabel() or axis.get_ylabel() for axis in canvas.axes if axis.get_visible()]
    assert any(labels), "no axis says what it shows"
    assert FIGURES[name].conclude(result).endswith(".")
    assert (RESULTS / f"{name}.png").is_file()


def test_figures_without_a_committed_result_are_drawn_from_their_rows(tmp_path: Path) -> None:
    speeds = [
        {"system": name, "sequences": 8, "place": "ssd", "tokens_s": 9.5, "exposed_share": share}
        for name, share in (("ckv", 0.25), ("flexgen", None))
    ]
    save("decode", {"rows": speeds}, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert "ckv is fastest, 9.5 tokens per second" in FIGURES["decode"].conclude({"rows": speeds})


def test_every_committed_picture_has_a_figure() -> None:
    assert {path.stem for path in RESULTS.glob("*.png")} == set(DRAWN)
