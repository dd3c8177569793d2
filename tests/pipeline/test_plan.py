"""The plan covers every layer once, whatever the depth."""

from __future__ import annotations

import dataclasses

import pytest

from ckv_jax.pipeline.plan import Plan
from ckv_jax.selection.select import Select
from ckv_jax.systems import SYSTEMS

PAPER = SYSTEMS["contiguous-kv"]


@pytest.mark.parametrize("depth", [1, 3, 28])
@pytest.mark.parametrize(("pack", "period"), [(1, 4), (2, 16), (4, 8)])
def test_layers_and_groups_are_covered_once(depth: int, pack: int, period: int) -> None:
    system = dataclasses.replace(PAPER, pack_layers=pack, period=period)
    plan = Plan.of(depth, system)
    assert [layer for step in plan.steps for layer in step.layers] == list(range(depth))
    groups = [group for step in plan.steps for group in step.groups]
    assert groups == list(range(-(-depth // pack)))
    for step in plan.steps:
        held = range(step.groups[0] * pack, (step.groups[-1] + 1) * pack)
        assert set(step.layers) <= set(held)
    assert plan.periods == -(-depth // period)
    assert [step.layers[0] for step in plan.steps if step.selects] == [
        period.steps[0].layers[0] for period in plan.by_period
    ]
    assert [g for p in range(plan.periods) for g in plan.groups(p)] == groups


def test_scoring_layers_are_spread_over_the_period() -> None:
    ours = SYSTEMS["ckv-16"]

    def selected(count: int, depth: int = 6) -> list[list[int]]:
        plan = Plan.of(depth, dataclasses.replace(ours, reprefill=Select(score_layers=count)))
        return [period.scoring for period in plan.by_period]

    assert selected(1) == [[0], [4]]
    assert selected(2) == [[0, 2], [4, 5]]
    assert selected(3) == [[0, 1, 2], [4, 5]]
    assert selected(4) == selected(9) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("period", [4, 8])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("depth", [1, 6, 30])
def test_a_digest_is_stored_of_the_layers_that_select(depth: int, count: int, period: int) -> None:
    selects = {"reprefill": Select(score_layers=count), "decode": None}
    system = dataclasses.replace(SYSTEMS["ckv-16"], period=period, **selects)  # type: ignore[arg-type]
    plan = Plan.of(depth, system)
    layout = system.layout(
        num_layers=depth, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    select = [layer for period in plan.by_period for layer in period.scoring]
    assert layout.digest_layers == tuple(select)


@pytest.mark.parametrize("count", [0, 2])
def test_scoring_layers_need_a_digest(count: int) -> None:
    with pytest.raises(ValueError, match=r"score_layers=0|score_layers above 1 without a digest"):
        dataclasses.replace(PAPER, reprefill=Select(score_layers=count))


def test_packs_that_straddle_a_subperiod_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        dataclasses.replace(PAPER, pack_layers=4, subperiod=2, period=2)
