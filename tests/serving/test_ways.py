"""What a call asks of each of its requests, and what each got of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax import Request, SamplingParams
from ckv_jax.config import Budget
from ckv_jax.serving.shares import share_of, shares_of
from ckv_jax.serving.ways import Way, sampled, several
from ckv_jax.trace import Trace

ONE = Request(prefix=[1], suffix=[2])
USUAL, OWN = SamplingParams(max_tokens=5), SamplingParams(max_tokens=6)


def test_one_sampling_is_for_all_and_a_list_for_each() -> None:
    assert sampled(ONE, None, USUAL, False) == ([ONE], [Way(sampling=USUAL)])
    asked, ways = sampled([ONE, ONE], OWN, USUAL, True)
    assert asked == [ONE, ONE] and ways == [Way(sampling=OWN, keep_kv=True)] * 2
    _, ways = sampled([ONE, ONE], [OWN, USUAL], USUAL, [True, False])
    assert [(way.sampling, way.keep_kv) for way in ways] == [(OWN, True), (USUAL, False)]


@pytest.mark.parametrize("count", [1, 3])
def test_lists_of_another_length_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"got {count} samplings, expected 2, one per request"):
        sampled([ONE, ONE], [OWN] * count, USUAL, False)
    with pytest.raises(ValueError, match="zip"):
        sampled([ONE, ONE], OWN, USUAL, [True] * count)


def test_an_empty_call_is_refused() -> None:
    with pytest.raises(ValueError, match="empty batch"):
        several([])
    with pytest.raises(TypeError, match="got Request, expected a list"):
        several(ONE)  # type: ignore[arg-type]
    assert several((ONE,)) == [ONE]


def test_who_names_no_share_of_attention_asks_for_all_of_it() -> None:
    budgets = [Budget.of(0.25), Budget.of("mass:0.9:0.1-1"), Budget.of(1.0)]
    share = share_of(budgets, [10, 40, 10])
    np.testing.assert_array_equal(share.mass, np.array([1, 0.9, 1], np.float32))
    np.testing.assert_array_equal(share.least, [budgets[0].floor(10), 4, budgets[2].floor(10)])
    assert (share.mass.dtype, share.least.dtype) == (np.float32, np.int32)
    with pytest.raises(ValueError, match="zip"):
        share_of(budgets, [10])


def test_each_row_is_told_its_own_selection() -> None:
    """Two choices of two rows, of which chunk 0 is one like others and -1 is none."""
    first: Any = SimpleNamespace(
        selections=[np.array([[0, 1, -1], [3, -1, -1]]), np.array([[0, 2, 4], [-1, -1, -1]])],
        attention_mass=np.array([[0.5, 0.25], [0.75, 1.0]], np.float32),
    )
    traces = shares_of(Trace(), first, [5, 6])
    assert [trace.period_chunks for trace in traces] == [[2, 3], [1, 0]]
    assert [trace.chunks["total"] for trace in traces] == [10, 12]
    assert [trace.period_attention_mass for trace in traces] == [[0.5, 0.75], [0.25, 1.0]]
