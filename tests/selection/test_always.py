"""What a selection always holds, outside of its budget."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.selection.base import Share, before_others, select_units
from ckv_jax.selection.select import NOTHING, Ends
from ckv_jax.storage.layout import Layout

NONE = -np.inf


def ends_of(ends: Ends, rows: int, chunks: int, tokens: object) -> np.ndarray:
    scores, limits = jnp.zeros((rows, chunks)), jnp.zeros(rows, jnp.int32)
    return np.asarray(ends.chunks(scores, (), jnp.asarray(tokens), limits, limits, 8))


def test_both_ends_of_a_prefix() -> None:
    """Every chunk that holds one of them, of each row's own length."""
    found = ends_of(Ends(), 4, 20, [160, 153, 8, 79])
    for row, tokens in zip(found, (160, 153, 8, 79), strict=True):
        wanted = {i // 8 for i in range(tokens) if i < 16 or i >= tokens - 64}
        if tokens < 16:
            wanted |= {0, 1}  # also a chunk that is not there, which no selection takes
        assert set(np.flatnonzero(row).tolist()) == wanted
    assert ends_of(Ends(), 2, 12, 90).sum(axis=1).tolist() == [11, 11]
    assert np.flatnonzero(ends_of(Ends(4, 8), 1, 12, 90)).tolist() == [0, 10, 11]


def test_what_is_always_selected_comes_before_all_others_where_it_may_be_selected() -> None:
    scores = jnp.asarray([[1.0, 9.0, NONE, 3.0], [4.0, 2.0, 1.0, 3.0]], jnp.float32)
    always = jnp.asarray([[1, 0, 1, 0], [0, 0, 1, 0]], bool)
    ranked = np.asarray(before_others(scores, always))
    np.testing.assert_array_equal(ranked, [[np.inf, 9, NONE, 3], [4, 2, np.inf, 3]])
    assert before_others(scores, None) is scores
    found = select_units(scores, 2, jnp.asarray([2, 2], jnp.int32), always=always)
    np.testing.assert_array_equal(found.ids, [[0, 1], [0, 2]])
    np.testing.assert_array_equal(found.attention, [[1, 9], [4, 1]])  # their own scores
    np.testing.assert_allclose(found.mass, [9 / 12, 4 / 9])  # of what is not always selected
    whole = select_units(scores[1:], 2, jnp.asarray([2]), always=jnp.ones((1, 4), bool))
    assert np.asarray(whole.mass).tolist() == [1.0]


def test_what_is_always_selected_is_selected_though_a_share_is_held_without_it() -> None:
    scores = jnp.asarray([[9.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 9.0]], jnp.float32)
    always = jnp.asarray([[0, 0, 1, 1], [1, 1, 0, 0]], bool)
    share = Share(np.full(2, 0.01, np.float32), np.zeros(2, np.int32))
    found = select_units(scores, 4, jnp.full(2, 4, jnp.int32), share=share, always=always)
    np.testing.assert_array_equal(found.ids, [[0, 2, 3, -1], [0, 1, 3, -1]])


def test_counts_are_those_of_the_chunks_that_are_taken() -> None:
    layout = Layout(num_layers=2, num_kv_heads=2, head_dim=8, chunk_tokens=8)
    for tokens in (1, 8, 15, 64, 79, 80, 81, 153, 160):
        for ends in (Ends(), Ends(4, 64), Ends(4, 8), Ends(1, 1)):
            chunks = layout.num_chunks(tokens)
            taken = int(ends_of(ends, 1, chunks, tokens).sum())
            assert taken <= ends.most(layout, tokens) <= chunks
            if tokens > 80:
                assert taken == ends.most(layout, tokens)
    assert NOTHING.most(layout, 4096) == 0


@pytest.mark.parametrize("wrong", [(0, 64), (16, 0), (1.5, 64)])
def test_what_cannot_be_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Ends(*wrong)
