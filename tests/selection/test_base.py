"""The one top-k: best first within the limit, in order of position, ties to the earlier."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.selection.base import Share, last_queries, select_units


def test_the_best_in_order_up_to_each_rows_limit() -> None:
    scores = np.random.default_rng(0).random((3, 50)).astype(np.float32)
    limits = np.array([7, 3, 0], np.int32)
    found = select_units(jnp.asarray(scores), 7, jnp.asarray(limits), count=jnp.int32(40))
    for row, limit in enumerate(limits.tolist()):
        best = np.sort(np.argsort(-scores[row, :40], kind="stable")[:limit])
        ids = np.asarray(found.ids)[row]
        assert ids.tolist() == best.tolist() + [-1] * (7 - limit)
        held = scores[row, best]
        np.testing.assert_allclose(np.asarray(found.attention)[row, :limit], held)
        assert not np.asarray(found.attention)[row, limit:].any()
        mass = held.sum() / scores[row].sum()
        np.testing.assert_allclose(np.asarray(found.mass)[row], mass, rtol=1e-6)
    assert np.asarray(found.ids).dtype == np.int32


@pytest.mark.parametrize(
    ("n", "count", "wanted"),
    [
        (3, 2, [0, 1, -1]),
        (6, 4, [0, 1, 2, 3, -1, -1]),
        (2, 0, [-1, -1]),
        (0, 4, []),
        (2, 4, [0, 1]),
    ],
)
def test_rows_are_padded_and_ties_go_to_the_earlier(n: int, count: int, wanted: list[int]) -> None:
    limits = jnp.full((1,), n, jnp.int32)
    found = select_units(jnp.full((1, 4), 0.5), n, limits, count=jnp.int32(count))
    assert np.asarray(found.ids)[0].tolist() == wanted


def test_what_may_not_be_selected_holds_nothing_of_a_share() -> None:
    """Of four chunks of a prefix, and two that are none."""
    scores = jnp.asarray([[4.0, 3.0, 2.0, 1.0, 99.0, 99.0]], jnp.float32)
    for mass, wanted in ((0.39, [0]), (0.41, [0, 1]), (0.71, [0, 1, 2])):
        share = Share(np.array([mass], np.float32), np.array([1], np.int32))
        none = jnp.asarray([[False] * 4 + [True] * 2])
        given = jnp.where(none, -jnp.inf, scores)
        for count, of in ((jnp.int32(4), scores), (None, given)):
            found = select_units(of, 6, jnp.full(1, 6, jnp.int32), count=count, share=share)
            assert np.asarray(found.ids)[0].tolist() == wanted + [-1] * (6 - len(wanted))


def test_a_share_is_of_the_mass_where_scores_rank_by_something_else() -> None:
    scores = jnp.asarray([[4.0, 3.0, 2.0, 1.0]], jnp.float32)
    mass = jnp.asarray([[1.0, 2.0, 3.0, 4.0]], jnp.float32)
    limit = jnp.full(1, 4, jnp.int32)
    for asked, wanted in ((0.09, [0]), (0.11, [0, 1]), (0.31, [0, 1, 2])):
        share = Share(np.array([asked], np.float32), np.array([1], np.int32))
        found = select_units(scores, 4, limit, share=share, mass=mass)
        assert np.asarray(found.ids)[0].tolist() == wanted + [-1] * (4 - len(wanted))
        np.testing.assert_allclose(found.mass, [sum(range(1, len(wanted) + 1)) / 10], rtol=1e-6)
    np.testing.assert_array_equal(found.scores, mass)


@pytest.mark.parametrize("window", [2, 3, None, 9])
def test_the_last_tokens_of_each_row_ask(window: int | None) -> None:
    """Of a row with fewer its own, wherever in the call they stand."""
    hidden = np.arange(15.0, dtype=np.float32).reshape(3, 5, 1)
    at, lengths = np.arange(15).reshape(3, 5) + 100, np.array([5, 3, 1])
    found = last_queries(*map(jnp.asarray, (hidden, at, lengths)), window)
    states, positions, counts = map(np.asarray, found)
    for row, length in enumerate(lengths.tolist()):
        count = min(length, window or 5)
        assert counts[row] == count
        wanted = np.arange(length - count, length)
        np.testing.assert_array_equal(states[row, :count, 0], hidden[row, wanted, 0])
        np.testing.assert_array_equal(positions[row, :count], at[row, wanted])
    assert states.shape[1] == positions.shape[1] == min(window or 5, 5)
