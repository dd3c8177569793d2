"""What each mended point moved: how it is put back, and how that is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.common import Setting
from bench.figures import FIGURES, save
from bench.lab import WARM_UP, Lab
from bench.measure import Sample
from bench.mended import FULL, ask, by_turns, found_shares, mean_ratio, order, written
from bench.mended_points import GROUPS, NOT_PUT_BACK, POINTS, memory_of, sides
from bench.put_back import all_rows_fall_back, keys_speculated, probes_from_disk
from bench.turns import DEVICE_SHARE, HOST_SHARE
from ckv_jax.systems import system_named

CACHES = {"device_cache_bytes": 8 << 20, "host_cache_bytes": 8 << 20}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(
        Setting(model="tiny", dtype="float32", prefix_tokens=256, suffix_tokens=8, prefixes=1)
    ) as made:
        written(made, system_named("contiguous-kv"))
        written(made, system_named("as-h2o-lru"))
        written(made, system_named("impress"))
        yield made


def test_every_point_is_in_rows_or_said_not_to_be() -> None:
    said = {point for group in GROUPS for point in group.points}
    assert said == set(POINTS) and said | {one["point"] for one in NOT_PUT_BACK} == set(range(1, 8))
    assert {group.system for group in GROUPS} == set(FULL.systems)
    for group in GROUPS:
        whole, *put_back = sides(group).values()
        assert whole.system == system_named(group.system)
        assert all(side != whole for side in put_back)  # one thing differs, at least


def test_probes_are_read_again_where_they_leave_the_caches(lab: Lab) -> None:
    system = system_named("contiguous-kv")
    with lab.engine(system, memory=CACHES) as after, probes_from_disk(lab, system, CACHES) as old:
        read = {
            name: [ask(lab, engine, 0, [n], 0.2).sample.probe_bytes for n in range(3)]
            for name, engine in (("after", after), ("before", old))
        }
    assert read["after"][0] > 0 and read["after"][1:] == [0, 0]
    assert read["before"] == [read["after"][0]] * 3


def test_keys_are_speculation_where_they_were(lab: Lab) -> None:
    """What was speculated and then demanded counts as covered, what is sure to be does not."""
    system, covered = system_named("as-h2o-lru"), {}
    with lab.engine(system) as after, keys_speculated(lab, system, {}) as old:
        for name, engine in (("after", after), ("before", old)):
            result = lab.ask(engine, 0, 1, 0.2)[1]
            covered[name] = result.trace.counters.get("covered", 0)
    assert covered["after"] == 0 < covered["before"]


def test_a_question_falls_back_with_another_of_its_batch_where_it_did(lab: Lab) -> None:
    """Of nearly all tokens, heads do not agree as far as they should (j^0.6) in some layer."""
    system = dataclasses.replace(system_named("impress"), reorder_every=0)
    with lab.engine(system) as after, all_rows_fall_back(lab, system, {}) as old:
        few, most = (lab.request(after, 0, n, budget) for n, budget in ((1, 0.1), (2, 0.98)))
        alone = after.reprefill([few])[0]
        batches = [engine.reprefill([few, most])[0] for engine in (after, old)]
    assert "layers_fell_back" not in alone.trace.counters
    for result in batches:
        assert result.trace.counters["layers_fell_back"] > 0
    far = [float(np.abs(result.logits - alone.logits).max()) for result in batches]
    assert 10 * far[0] < far[1]


def test_memory_beside_the_caches_is_more_than_within(lab: Lab) -> None:
    [group] = [g for g in GROUPS if (g.system, g.temperature) == ("contiguous-kv", "warm")]
    whole, *_, beside = (memory_of(lab, side, "warm") for side in sides(group).values())
    total = lab.kv_bytes
    assert beside == {
        "device_cache_bytes": int(DEVICE_SHARE * total),
        "host_cache_bytes": int(HOST_SHARE * total),
    }
    assert sum(whole.values()) == sum(beside.values())
    assert memory_of(lab, sides(group)[0], "cold") == {}


def test_all_sides_are_asked_the_same_and_begin_in_turn() -> None:
    assert list(by_turns([0, 1, 3], 4)) == [0, 1, 3] and list(by_turns([0, 1, 3], 5)) == [3, 1, 0]
    cold, warm = GROUPS[0], GROUPS[-1]
    setting = dataclasses.replace(FULL, prefixes=2, repeats=4)
    prefixes, first = order(cold, setting)
    assert first == 2 * WARM_UP and prefixes[first:] == [0, 1, 0, 1]
    prefixes, first = order(warm, setting)
    assert (len(prefixes), first) == (8, 4) and set(prefixes) <= {0, 1}


def test_ratio_is_of_means_and_its_interval_of_pairs() -> None:
    after = np.array([10.0, 20.0, 40.0, 80.0])
    ratio, (low, high) = mean_ratio(2 * after, after)  # the same pair by pair, however far apart
    assert (ratio, low, high) == (2, 2, 2)
    ratio, (low, high) = mean_ratio([30.0, 10.0, 20.0], [10.0, 20.0, 30.0])
    assert ratio == 1 and low < 1 < high
    assert mean_ratio([3.0], [2.0]) == (1.5, [1.5, 1.5])


def test_bytes_are_found_in_memory_or_read() -> None:
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(Sample)), 0)
    sample = Sample(**nothing | {"pack_bytes": 60, "unused_bytes": 20, "probe_bytes": 10,
                                 "device_bytes": 40, "host_bytes": 10})  # type: ignore[arg-type]  # fmt: skip
    assert found_shares([sample]) == {"device": 0.4, "host": 0.1, "ssd": 0.5}
    assert found_shares([]) == {"device": 0, "host": 0, "ssd": 0}


def test_figure_of_rows_says_what_can_be_told_from_nothing(tmp_path: Path) -> None:
    rows = [
        {"point": 2, "variant": "", "system": "impress", "temperature": "warm", "ratio": ratio,
         "ratio_interval": [ratio - 0.2, ratio + 0.2], "before": {"ssd_bytes": 2e6},
         "after": {"ssd_bytes": 1e6}}
        for ratio in (1.5, 1.1)
    ]  # fmt: skip
    setting = FULL.to_json()
    result = {"rows": rows, "setting": setting, "warm_setting": setting, "machine": None}
    save("mended", result, tmp_path / "mended.png")
    assert (tmp_path / "mended.png").read_bytes().startswith(b"\x89PNG")
    assert FIGURES["mended"].conclude(result).startswith("1 of 2 ratios can be told from 1: 2. ")
