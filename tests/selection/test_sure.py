"""What a choice has beside its budget: how many chunks, which, and what systems have it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.kernels_pallas.score.probe import MeanKeys
from ckv_jax.selection.base import Share, before_others, choose, steady_chunks
from ckv_jax.selection.sure import sure_chunks
from ckv_jax.selection.zones import Zones
from ckv_jax.storage.layout import Layout
from ckv_jax.systems import SYSTEMS

NONE = -np.inf


def test_a_texts_first_16_and_last_64_tokens_are_steady() -> None:
    """Every chunk that holds one of them, of each row's own length."""
    found = steady_chunks(jnp.zeros((4, 20)), jnp.asarray([160, 153, 8, 79]), 8)
    for row, tokens in zip(np.asarray(found), (160, 153, 8, 79), strict=True):
        wanted = {i // 8 for i in range(tokens) if i < 16 or i >= tokens - 64}
        if tokens < 16:
            wanted |= {0, 1}  # also a chunk that is not there, which no choice takes
        assert set(np.flatnonzero(row).tolist()) == wanted
    one = steady_chunks(jnp.zeros((2, 12)), jnp.int32(90), 8)
    assert one.sum(axis=1).tolist() == [11, 11]


def test_what_is_sure_comes_before_all_others_where_it_may_be_chosen() -> None:
    scores = jnp.asarray([[1.0, 9.0, NONE, 3.0], [4.0, 2.0, 1.0, 3.0]], jnp.float32)
    sure = jnp.asarray([[1, 0, 1, 0], [0, 0, 1, 0]], bool)
    ranked = np.asarray(before_others(scores, sure))
    np.testing.assert_array_equal(ranked, [[np.inf, 9, NONE, 3], [4, 2, np.inf, 3]])
    assert before_others(scores, None) is scores
    found = choose(scores, 2, jnp.asarray([2, 2], jnp.int32), sure=sure)
    np.testing.assert_array_equal(found.ids, [[0, 1], [0, 2]])
    np.testing.assert_array_equal(found.attention, [[1, 9], [4, 1]])  # their own scores
    np.testing.assert_allclose(found.mass, [9 / 12, 4 / 9])  # of what is not always selected
    always = choose(scores[1:], 2, jnp.asarray([2]), sure=jnp.ones((1, 4), bool))
    assert np.asarray(always.mass).tolist() == [1.0]


def test_what_is_sure_is_chosen_though_a_share_is_held_without_it() -> None:
    scores = jnp.asarray([[9.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 9.0]], jnp.float32)
    sure = jnp.asarray([[0, 0, 1, 1], [1, 1, 0, 0]], bool)
    share = Share(np.full(2, 0.01, np.float32), np.zeros(2, np.int32))
    found = choose(scores, 4, jnp.full(2, 4, jnp.int32), share=share, sure=sure)
    np.testing.assert_array_equal(found.ids, [[0, 2, 3, -1], [0, 1, 3, -1]])


def probe(oddity: np.ndarray) -> MeanKeys:
    """Means of chunks [M] for each head, whose places by oddity are `oddity` int [M, K]."""
    mean = np.zeros((*oddity.shape, 2), np.float32)
    return MeanKeys(mean, np.zeros(oddity.shape, np.float32), oddity=oddity)


def test_outliers_are_each_heads_own_chunks_of_the_rows_own_prefix() -> None:
    odd = [np.array([[0, 3], [1, 2], [2, 1], [3, 0]]), np.array([[3, 0], [2, 3], [1, 2], [0, 1]])]
    zones, count = Zones(outliers=0.25), jnp.asarray([4, 4, 4, 4, 8, 8, 8, 8], jnp.int32)
    scores = jnp.zeros((8, 4))  # two queries of two heads, on each of two prefixes
    found = sure_chunks(zones, scores, [probe(one) for one in odd], jnp.int32(99), count, 8)
    first, second = [[1, 0, 0, 0], [0, 0, 0, 1]], [[0, 0, 1, 1], [1, 0, 0, 1]]
    np.testing.assert_array_equal(found, np.array([*first, *first, *second, *second], bool))


def test_zones_add_up_and_without_one_nothing_is_sure() -> None:
    scores, odd = jnp.zeros((1, 20)), np.roll(np.arange(20), 10)[:, None]
    args = ([probe(odd)], jnp.int32(160), jnp.int32(20), 8)
    assert sure_chunks(Zones(), scores, *args) is None
    steady = sure_chunks(Zones(steady=True), scores, *args)
    outliers = sure_chunks(Zones(outliers=0.05), scores, *args)
    both = sure_chunks(Zones(steady=True, outliers=0.05), scores, *args)
    assert np.flatnonzero(outliers).tolist() == [10]
    assert np.flatnonzero(steady).tolist() == [0, 1, *range(12, 20)]
    np.testing.assert_array_equal(both, np.asarray(steady) | np.asarray(outliers))


def test_counts_are_whole_and_of_what_there_is() -> None:
    layout = Layout(num_layers=2, num_kv_heads=2, head_dim=8, chunk_tokens=8)
    zones = SYSTEMS["shadowkv"].zones
    assert [zones.always(layout, 8 * n) for n in (16_384, 4096, 512, 1)] == [48, 12, 2, 1]
    assert Zones().always(layout, 4096) == 0 == Zones().outliers_of(512)
    assert Zones(outliers=0.232).outliers_of(1000) == 232
    assert Zones(outliers=1.0).outliers_of(7) == 7


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"outliers": -0.1}, r"outliers=-0.1, expected a share of the chunks in \[0, 1\]"),
        ({"outliers": 1.01}, r"outliers=1.01, expected a share"),
        ({"outliers": "48"}, r"outliers='48', expected a number"),
        ({"digest": "means"}, r"expected digest='means\+cosines', with which texts have to be"),
        ({"period": 2, "subperiod": 2}, "each head of every layer"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SYSTEMS["shadowkv"], **wrong)  # type: ignore[arg-type]
