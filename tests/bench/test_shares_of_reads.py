"""Ratios of what was read: what has none is told as such, never a number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.io_reduction import rows_of
from bench.measure import Sample
from bench.read_amplification import row_of
from bench.similarity import beside, by_distance, of_requests, period_coverage
from bench.turns import Taken
from ckv_jax.fitting import layout_of
from ckv_jax.systems import SYSTEMS
from tests.engine_support import SMALL


def row(system: str, **more: float) -> dict[str, object]:
    found = {"system": system, "budget": 0.05, "tokens_loaded": 100.0, "ssd_probe_bytes": 0}
    amplified = {"read_amplification": 2.0, "read_amplification_with_unused": 3.0}
    return found | amplified | {"ssd_kv_bytes": 1000} | more


def test_tokens_are_shares_of_those_of_impress() -> None:
    rows = rows_of([row("impress"), row("ckv", tokens_loaded=25.0)])
    assert rows[1]["share_of_impress"] == {
        "critical": 0.25, "with_probe": 0.25, "with_unused": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no rows"),
        ([row("ckv")], "ckv at 5% has no row of impress"),
        ([row("impress"), row("ckv", budget=0.25)], "ckv at 25% has no row of impress"),
        ([row("impress", ssd_kv_bytes=0)], "impress at 5% read no keys and values"),
    ],
)
def test_rows_that_give_no_share_are_told(rows: list[dict[str, object]], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        rows_of(rows)


def test_a_request_that_used_nothing_of_what_it_read_is_counted_apart() -> None:
    useful = Sample(
        ttft_ms=1.0, breakdown_ms={}, pack_bytes=300, probe_bytes=0, unused_bytes=100,
        needed_bytes=100, device_bytes=0, host_bytes=0, coverage=1.0, guesses=0, fell_back=0,
        attention_mass=1.0, jobs=1, stage_ms=0.0,
    )  # fmt: skip
    vain = replace(useful, unused_bytes=300, needed_bytes=0)
    idle = replace(useful, pack_bytes=0, unused_bytes=0, needed_bytes=0)

    def of(*samples: Sample) -> dict[str, object]:
        taken = Taken(
            system=SYSTEMS["ckv"], variant="warm", budget=0.25, samples=list(samples),
            layout=layout_of(SYSTEMS["ckv"], SMALL, "float32"),
        )  # fmt: skip
        return row_of(taken)

    found = of(useful, vain, idle)
    assert [found[name] for name in ("requests", "requests_that_read", "requests_in_vain")] == [
        3, 2, 1,
    ]  # fmt: skip
    assert found["with_unused"]["mean"] == 3.0 and found["read_amplification"]["mean"] == 2.0
    assert found["of_all_bytes"] == 6.0
    none = of(vain, idle)
    assert none["with_unused"] is none["read_amplification"] is none["of_all_bytes"] is None


def test_layers_and_questions_that_are_not_there_share_nothing_and_not_a_number() -> None:
    matrix = np.full((3, 3), 0.5)
    assert (period_coverage(matrix, 2), period_coverage(matrix, 4)) == (0.5, None)
    assert (by_distance(matrix, 1), by_distance(matrix, 4)) == (0.5, None)

    class Asked:
        class setting:
            prefixes = 1

    chosen = [np.array([1, 2])]
    assert of_requests(Asked, [chosen]) is None  # type: ignore[arg-type]
    assert of_requests(Asked, [chosen, chosen]) == 1.0  # type: ignore[arg-type]
    scattered = {"saved": 1.1, "jaccard": 0.5, "amplification": 2.0}
    part = {"budget": 0.05, "coverage": {"8": None}, "scatter": scattered}
    lines = beside([part | {"loaded": {"share_of_impress": 0.06}}])
    assert [line[0] for line in lines] == [
        "share of IMPRESS's tokens",
        "chunks saved by reordering",
    ]
