"""IMPRESS's threshold, similarity and vote, against the paper's formulas and its own example."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.baselines.impress import (
    IMPRESS,
    importance_ratio,
    mean_jaccard,
    probe_sets,
    similarity_threshold,
    votes,
)
from ckv_jax.prefix.tiers import Tiers


@pytest.mark.parametrize("n, k", [(4, 1), (5008, 251), (5008, 1252), (1000, 500), (7, 7)])
def test_threshold_formula(n: int, k: int) -> None:
    both, either = k * k / n, 2 * k - k * k / n  # expectations for two random sets (§4.3)
    assert similarity_threshold(k / n, 0.6) == pytest.approx((both / either) ** 0.6)


def test_threshold_is_above_chance_and_one_for_everything() -> None:
    shares = np.linspace(0.01, 1.0, 50)
    chance = shares / (2 - shares)
    thresholds = similarity_threshold(shares, 0.6)
    assert (thresholds >= chance).all()
    assert (np.diff(thresholds) > 0).all()
    assert thresholds[-1] == 1.0


def test_the_papers_jaccard_example() -> None:
    sets = jnp.asarray([[1, 0, 1, 0], [1, 1, 0, 0]], bool)  # Figure 7(a)
    assert float(mean_jaccard(sets)) == pytest.approx(1 / 3)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=4))
def test_mean_over_all_pairs(members: list[set[int]]) -> None:
    sets = np.zeros((len(members), 10), bool)
    for row, selected in zip(sets, members, strict=True):
        row[list(selected)] = True
    pairs = list(itertools.combinations(members, 2))
    expected = np.mean([len(a & b) / len(a | b) for a, b in pairs]) if pairs else 1.0
    assert float(mean_jaccard(jnp.asarray(sets))) == pytest.approx(expected, rel=1e-5)


def test_votes_come_before_sums() -> None:
    sums = jnp.asarray(
        [
            [9.0, 5.0, 4.0, 1.0, -jnp.inf],
            [0.5, 5.0, 4.5, 1.0, -jnp.inf],
            [0.1, 1.0, 4.0, 2.0, -jnp.inf],
        ],
        jnp.float32,
    )
    sets = probe_sets(sums, 2, jnp.int32(2))
    np.testing.assert_array_equal(
        sets, np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0]], bool)
    )
    ballots = np.asarray(votes(sums, sets))
    # Tokens 1 and 2 have two votes each, 2 the larger sum; of those with one, token 0 has more.
    assert list(np.argsort(-ballots)) == [2, 1, 0, 3, 4]
    assert ballots[4] == -np.inf


def test_no_sums_outweigh_a_vote() -> None:
    """However many tokens there are that are none, and however little the sums are."""
    sums = jnp.asarray([[0.3, 0.1, 0.1] + [-jnp.inf] * 9] * 2, jnp.float32)
    sets = jnp.asarray([[0, 1, 0] + [0] * 9, [0, 1, 1] + [0] * 9], bool)
    found = np.asarray(votes(sums, sets))
    np.testing.assert_allclose(found[:3], [0.6 / 2, 2 + 0.2 / 2, 1 + 0.2 / 2])
    assert (found[3:] == -np.inf).all()


def test_importance_ratio_prefers_the_papers_second_chunk() -> None:
    # IMPRESS, Figure 14: 15 uses at one important key of two against 10 uses at two of two
    first, second = importance_ratio(
        np.array([0.5, 1.0]), np.array([15, 10], np.uint32), np.array([25, 24], np.uint64)
    )
    assert (first, second) == (7.5, 10.0)


def test_importance_ratio_follows_what_changes() -> None:
    """A chunk that used to be all important and is not any more gives way (IMPRESS §4.4.2)."""
    tiers = Tiers(1, 0, 2, IMPRESS.policy)
    base = tiers.register(2)
    was, now = base, base + 1
    for _ in range(10):
        tiers.record(np.array([was]), np.array([1.0]))
        tiers.record(np.array([now]), np.array([0.0]))
    for _ in range(10):
        tiers.record(np.array([was]), np.array([0.0]))
        tiers.record(np.array([now]), np.array([1.0]))
    importance, frequency = tiers.scores(base, 2)
    assert frequency.tolist() == [20, 20]
    assert importance[0] < 0.1 and importance[1] > 0.9
    slots = tiers.take(2)
    tiers.admit(np.array([was, now]), slots)
    assert (tiers.lookup(np.array([was, now]))[0] >= 0).tolist() == [False, True]
