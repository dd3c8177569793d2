"""Every figure is drawn from the committed results, and says what they say."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from bench.figures import FIGURES, breakdown, result_of, save
from bench.figures.pieces import differences
from bench.figures.style import COLORS, RC, half_width, machine_line
from bench.json_file import read_json
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

    rows = [row("ckv", "warm", 50.0), row("ckv", "w/o P", 53.0), row("impress", "warm", 150.0)]
    [found] = differences({"rows": rows})
    assert found["ms"] == pytest.approx(3.0) and found["whole_ms"] == 50.0
    assert found["half"] == pytest.approx(1.96 * 2**0.5)


def test_what_is_said_of_tokens_loaded_is_what_the_bars_have() -> None:
    def row(system: str, all_of_it: float, demanded: float) -> dict[str, object]:
        shares = {"critical": demanded, "with_probe": demanded, "with_unused": all_of_it}
        return {"system": system, "budget": 0.05, "share_of_impress": shares}

    rows = [row("ckv", 0.2, 0.06), row("contiguous-kv", 0.3, 0.09), row("impress", 1.0, 1.0)]
    said = FIGURES["io_reduction"].conclude({"rows": rows, "paper": {"a": 0.05, "b": 0.07}})
    assert "ckv at 5% 20.0% (6.0%); contiguous-kv at 5% 30.0% (9.0%)." in said
    assert said.endswith("within that: ckv at 5%.")


def test_parts_that_cost_time_are_told_from_those_worth_having() -> None:
    def row(variant: str, mean: float) -> dict[str, object]:
        times = {"mean": mean, "p50": mean, "p95": mean, "n": 9}
        return {"system": "ckv", "variant": variant, "budget": 0.25, "ttft_ms": times}

    rows = [row("warm", 50.0), row("w/o P", 45.0), row("w/o AC", 53.0)]
    said = FIGURES["ablation"].conclude({"rows": rows})
    assert "slower without in 1 (ckv w/o AC +3.0" in said
    assert "faster without in 1 (ckv w/o P -5.0" in said


def test_what_there_is_no_data_for_is_not_drawn(tmp_path: Path) -> None:
    found = result_of("read_amplification", RESULTS)
    assert found is not None
    rows = [row | {"requests_in_vain": 3} for row in found["rows"][:2]]
    rows[0] |= {"with_unused": None, "read_amplification": None}
    canvas = Figure()
    FIGURES["read_amplification"].draw(canvas, found | {"rows": rows})
    assert len(canvas.axes[0].get_yticklabels()) == 1
    said = FIGURES["read_amplification"].conclude(found | {"rows": rows})
    assert "nothing used" in said and "are not in it" in said and "3 of 24" in said

    alike = result_of("similarity", RESULTS)
    assert alike is not None
    small = dict(alike["rows"][0])
    for covered in ({"2": 0.5, "4": None, "8": None}, dict.fromkeys(("2", "4", "8"))):
        part = alike | {"rows": [small | {"coverage": covered}]}
        canvas = Figure()
        FIGURES["similarity"].draw(canvas, part)
        drawn = [list(line.get_xdata()) for line in canvas.axes[1].lines]
        assert drawn == ([[2]] if covered["2"] else [])
        assert "no two of them" in FIGURES["similarity"].conclude(part)
    other = alike | {"setting": alike["setting"] | {"checkpoint": "some"}}
    assert "no finding" in FIGURES["similarity"].conclude(alike)
    assert "no finding" not in FIGURES["similarity"].conclude(other)


def test_a_run_draws_what_is_drawn_again(tmp_path: Path) -> None:
    for name in ("accuracy", "ttft"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    own = read_json(tmp_path / "accuracy.json")  # as the run has it, without what lies beside
    save("accuracy", own, tmp_path / "accuracy.png")
    first = (tmp_path / "accuracy.png").read_bytes()
    save("accuracy", result_of("accuracy", tmp_path), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == first
    (tmp_path / "ttft.json").unlink()
    save("accuracy", own, tmp_path / "alone.png")
    assert (tmp_path / "alone.png").read_bytes() != first


def test_a_result_without_a_machine_says_so() -> None:
    assert machine_line(None) == "machine not recorded"
    assert machine_line({"cpu": "X", "cores": 2, "device": "gpu: H"}) == "X, 2 cores, gpu: H"
