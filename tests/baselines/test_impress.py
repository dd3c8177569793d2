"""IMPRESS's threshold, similarity and vote, against the paper's formulas and its own example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.baselines.impress import (
    IMPRESS,
    importance_ratio,
    mean_jaccard,
    similarity_threshold,
    votes,
)
from ckv_jax.prefix.tiers import Tiers


@pytest.mark.parametrize("n, k", [(4, 1), (5008, 251), (7, 7)])
def test_threshold_formula(n: int, k: int) -> None:
    both, either = k * k / n, 2 * k - k * k / n  # expectations for two random sets (§4.3)
    assert similarity_threshold(k / n, 0.6) == pytest.approx((both / either) ** 0.6)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([{0, 2}, {0, 1}], 1 / 3),  # Figure 7(a)
        ([{3}], 1.0),
        ([{0, 1}, {0, 1}, {2, 3}], 1 / 3),
        ([{0, 1, 2, 3}, {0, 1}, {1, 4}], (2 / 4 + 1 / 5 + 1 / 3) / 3),
    ],
)
def test_mean_over_all_pairs(members: list[set[int]], expected: float) -> None:
    sets = np.array([[token in one for token in range(5)] for one in members])
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
    sets = jnp.asarray([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0]], bool)
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
    importance, frequency = tiers.history(np.arange(base, base + 2))
    assert frequency.tolist() == [20, 20]
    assert importance[0] < 0.1 and importance[1] > 0.9
    slots = tiers.take(2)
    tiers.admit(np.array([was, now]), slots)
    assert (tiers.lookup(np.array([was, now]))[0] >= 0).tolist() == [False, True]
