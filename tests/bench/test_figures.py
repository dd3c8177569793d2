"""Every figure is drawn from the committed results, and says what they say."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from bench.figures import FIGURES, breakdown, result_of, save
from bench.figures.pieces import differences
from bench.figures.style import COLORS, RC, half_width, machine_line
from ckv_jax.trace import STAGES

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
    shapes = [{"requests": n, "programs": 10 + n, "mappings": 100 * n} for n in (1, 20)]
    for name, rows in (("decode", speeds), ("shapes", shapes)):
        save(name, {"rows": rows}, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "ckv is fastest, 9.5 tokens per second" in FIGURES["decode"].conclude({"rows": speeds})
    assert "30 programs" in FIGURES["shapes"].conclude({"rows": shapes})


def test_intervals_of_times_are_drawn_where_a_result_has_them() -> None:
    whole = result_of("ttft", RESULTS)
    assert whole is not None
    bars = []
    for share in (None, 0.1):
        rows = [dict(row) for row in whole["rows"]]
        for row in rows:
            times, median = dict(row["ttft_ms"]), row["ttft_ms"]["p50"]
            times.pop("p50_interval", None)
            if share is not None:
                times["p50_interval"] = [(1 - share) * median, (1 + share) * median]
            row["ttft_ms"] = times
        canvas = Figure(figsize=FIGURES["ttft"].size, layout="constrained")
        FIGURES["ttft"].draw(canvas, whole | {"rows": rows})
        bars.append(sum(line.get_linewidth()[0] == 5 for line in canvas.axes[0].collections))
    first = [row for row in whole["rows"] if (row["system"], row["variant"]) == ("ckv", "default")]
    assert bars == [0, len(first)]


def test_every_committed_picture_has_a_figure() -> None:
    assert {path.stem for path in RESULTS.glob("*.png")} == set(DRAWN)


def test_systems_of_one_figure_differ_in_lightness_or_hue() -> None:
    paper = ("ckv", "contiguous-kv", "impress", "as-h2o-lfu", "as-h2o-lru", "as-lru", "recompute")
    for one, other in itertools.combinations(paper, 2):
        apart = sum(
            abs(a - b) for a, b in zip(*map(to_rgb, (COLORS[one], COLORS[other])), strict=True)
        )
        assert apart > 0.4, (one, other)


def test_every_stage_of_a_trace_has_a_colour_of_its_own() -> None:
    assert {*STAGES, "other"} == set(breakdown.STAGES)
    assert len(set(breakdown.STAGES.values())) == len(breakdown.STAGES)


def test_an_interval_comes_from_the_median_and_the_95th_percentile() -> None:
    assert half_width({"p50": 100.0, "p95": 116.45, "n": 4}) == pytest.approx(1.96 * 10 / 2)
    assert half_width({"p50": 100.0, "p95": 99.0, "n": 4}) == 0.0


def test_an_interval_comes_from_the_standard_deviation_where_it_is_known() -> None:
    times = {"p50": 100.0, "p95": 500.0, "std": 10.0}  # one slow request says nothing by itself
    assert half_width(times | {"n": 4}) == pytest.approx(3.182 * 10 / 2, abs=1e-2)
    assert half_width(times | {"n": 100}) == pytest.approx(1.984 * 10 / 10, abs=1e-3)
    assert math.isnan(half_width(times | {"n": 1}))


def test_differences_are_against_the_whole_of_the_same_system_and_budget() -> None:
    def row(system: str, variant: str, mean: float) -> dict[str, object]:
        times = {"mean": mean, "p50": mean, "p95": mean + 1.645, "n": 1}
        return {"system": system, "variant": variant, "budget": 0.25, "ttft_ms": times}

    rows = [row("ckv", "full", 50.0), row("ckv", "w/o P", 53.0), row("impress", "full", 150.0)]
    [found] = differences({"rows": rows})
    assert found["ms"] == pytest.approx(3.0) and found["whole_ms"] == 50.0
    assert found["half"] == pytest.approx(1.96 * 2**0.5)


def test_a_result_without_a_machine_says_so() -> None:
    assert machine_line(None) == "machine not recorded"
    assert machine_line({"cpu": "X", "cores": 2, "device": "gpu: H"}) == "X, 2 cores, gpu: H"
