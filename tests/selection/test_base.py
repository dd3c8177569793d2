"""The one top-k: best first within the limit, in order of position, ties to the earlier."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.selection.base import choose


def test_the_best_in_order_up_to_each_rows_limit() -> None:
    scores = np.random.default_rng(0).random((3, 50)).astype(np.float32)
    limits = np.array([7, 3, 0], np.int32)
    found = choose(jnp.asarray(scores), 7, jnp.asarray(limits), count=jnp.int32(40))
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
    found = choose(jnp.full((1, 4), 0.5), n, limits, count=jnp.int32(count))
    assert np.asarray(found.ids)[0].tolist() == wanted
