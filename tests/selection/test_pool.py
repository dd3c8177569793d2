"""What ranks a chunk: its own score, or the largest or the mean of its own and its neighbours'."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.selection.base import Share, choose, pooled
from ckv_jax.selection.select import Select

NONE = -np.inf


def ranks(scores: list[float], pool: Literal["none", "max", "mean"]) -> np.ndarray:
    return np.asarray(pooled(jnp.asarray([scores], jnp.float32), pool))[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([NONE, 0.0, 0.25, 0.5, 1.0, -2.0]), min_size=9, max_size=9),
    st.sampled_from(["max", "mean"]),
)
def test_neighbours_are_those_that_there_are(
    scores: list[float], pool: Literal["max", "mean"]
) -> None:
    found = ranks(scores, pool)
    for at, score in enumerate(scores):
        three = [one for one in scores[max(0, at - 1) : at + 2] if one != NONE]
        if score == NONE:
            assert found[at] == NONE
        elif pool == "mean":
            np.testing.assert_allclose(found[at], np.mean(three), rtol=1e-6)
        else:
            np.testing.assert_allclose(found[at], max(three) + score / 1024, rtol=1e-6)


def test_without_pooling_a_score_is_a_rank() -> None:
    scores = [3.0, NONE, -1.0]
    assert ranks(scores, "none").tolist() == scores


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [("none", [[5], [2, 5], [2, 4, 5]]), ("max", [[5], [4, 5], [4, 5, 6]]),
     ("mean", [[5], [4, 5], [4, 5, 6]])],
)  # fmt: skip
def test_a_peak_comes_first_then_what_is_beside_it(
    pool: Literal["none", "max", "mean"], wanted: list[list[int]]
) -> None:
    """And what is told of them is their own."""
    scores = np.array([[0, 0, 4, 0, 3, 8, 2, 0, 100]], np.float32)  # the last is no chunk
    for count, ids in enumerate(wanted, 1):
        found = choose(
            jnp.asarray(scores), count, jnp.full((1,), count, jnp.int32), count=jnp.int32(8),
            pool=pool,
        )  # fmt: skip
        assert np.asarray(found.ids)[0].tolist() == ids
        assert np.asarray(found.attention)[0].tolist() == scores[0, ids].tolist()
        np.testing.assert_allclose(found.mass[0], scores[0, ids].sum() / scores.sum(), rtol=1e-6)


def test_a_share_of_attention_is_of_scores_not_of_ranks() -> None:
    scores = jnp.asarray([[0, 0, 4, 0, 3, 8, 2, 0]], jnp.float32)  # ranked 5, 4, 6, 2, 1 or 3
    for mass, count in ((8 / 17, 1), (11 / 17, 2), (13 / 17, 3), (1.0, 8)):
        share = Share(np.array([mass - 1e-3], np.float32), np.array([1], np.int32))
        if mass == 1:
            share = Share(np.array([1.0], np.float32), np.array([1], np.int32))
        found = choose(scores, 8, jnp.full((1,), 8, jnp.int32), share=share, pool="max")
        assert (np.asarray(found.ids)[0] >= 0).sum() == count


def test_what_is_no_way_to_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="pool='median', expected one of none, max, mean"):
        Select(pool="median")  # type: ignore[arg-type]
    for drift in (-1.1, 2, float("nan")):
        with pytest.raises(ValueError, match="drift"):
            Select(drift=drift)
