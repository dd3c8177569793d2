"""The first chunks of a decode window: the best of what the prompt's last queries attend to."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ckv_jax.cache.warm import ranking, warmed
from ckv_jax.cache.window import CLOSED, FREE, KEEP, Choice, advance, empty_window

SCORES = np.array([[0.1, 0.5, 0.3, 0.5, 9.0], [4.0, 3.0, 2.0, 1.0, 0.0]], np.float32)


def test_best_first_ties_by_id_and_nothing_past_the_end() -> None:
    order = ranking(jnp.asarray(SCORES), jnp.asarray([4, 5], jnp.int32))
    assert order.tolist() == [[1, 3, 2, 0, -1], [0, 1, 2, 3, 4]]
    assert order.dtype == jnp.int32
    none = ranking(jnp.asarray(SCORES), jnp.zeros(2, jnp.int32))
    assert (none == -1).all()


def test_the_best_fill_each_rows_slots() -> None:
    order = ranking(jnp.asarray(SCORES), jnp.asarray([2, 5], jnp.int32))
    window = warmed(empty_window(np.array([3, 2]), np.array([1, 2]), slots=4), order)
    assert window.chunk.tolist() == [[1, 0, FREE, CLOSED], [0, 1, CLOSED, CLOSED]]
    assert (window.uses == 0).all() and window.last.tolist() == [[-1, -2, -1, -1]] * 2
    wide = warmed(empty_window(np.array([8, 8]), np.array([1, 1])), order)
    assert wide.chunk[1].tolist() == [0, 1, 2, 3, 4, FREE, FREE, FREE]


def test_a_warm_window_has_what_comes_next() -> None:
    order = ranking(jnp.asarray(SCORES), jnp.asarray([5, 5], jnp.int32))
    window = warmed(empty_window(np.array([3, 3]), np.array([2, 2])), order)
    choice = Choice(jnp.asarray([[1, 4], [2, 4]], jnp.int32), jnp.asarray(SCORES))
    for keep in KEEP.values():
        after, moves = advance(window, choice, jnp.int32(0), keep)
        assert moves.misses.tolist() == [[-1, -1], [-1, 4]]
        assert sorted(after.chunk[1].tolist()) == [0, 2, 4]  # 1 was the last of those not chosen
