"""Which chunks attention is estimated of, and whose estimate is whose."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from kernel_targets import CPU

from ckv_jax.kernels_pallas.score.probe import MeanKeys
from ckv_jax.pipeline.estimates import Estimate, estimators, next_best, no_estimate


def test_the_best_that_were_not_chosen_are_estimated() -> None:
    """As many as each row may; -1 is nobody's choice, and what may not be chosen is not seen."""
    ranked: Any = np.array([[5, 9, 1, 7], [4, 3, -np.inf, 8]], np.float32)
    ids: Any = np.array([[1, -1], [-1, -1]], np.int32)
    best = jax.jit(next_best, static_argnums=2)  # one program
    seen = best(ranked, ids, 3, np.array([2, 3], np.int32))
    assert seen.tolist() == [[True, False, False, True], [True, True, False, True]]
    seen = best(ranked, ids, 3, np.array([1, 0], np.int32))
    assert seen.tolist() == [[False, False, False, True], [False] * 4]


def test_rows_that_ask_get_their_estimate_and_no_others() -> None:
    nobodys = no_estimate(3, 2, 4)
    assert (nobodys.out.shape, nobodys.lse.shape) == ((3, 1, 2, 4), (3, 1, 2))
    assert np.isneginf(nobodys.lse).all() and not np.asarray(nobodys.out).any()
    new: Any = Estimate(
        np.arange(16, dtype=np.float32).reshape(2, 1, 2, 4),
        np.arange(4, dtype=np.float32).reshape(2, 1, 2),
    )
    put = jax.jit(Estimate.put)(
        nobodys, np.array([2, 3], np.int32), new
    )  # the other is past the batch
    np.testing.assert_array_equal(put.out[2], new.out[0])
    np.testing.assert_array_equal(put.lse[2], new.lse[0])
    assert np.isneginf(put.lse[:2]).all()


def test_each_prefix_estimates_by_its_own_means_for_its_own_queries() -> None:
    """One chunk a prefix, so that what is estimated is its value."""
    one: Any = np.ones((1, 1, 2), np.float32)
    nothing: Any = np.zeros((1, 1), np.float32)
    probes = [MeanKeys(one, nothing, one * n) for n in (3, 5)]
    q: Any = np.ones((4, 1, 1, 2), np.float32)
    seen: Any = np.array([[True], [False], [True], [True]])
    found = jax.jit(lambda: [one() for one in estimators(q, probes, seen, CPU)])()
    out = [np.asarray(one.out)[:, 0, 0, 0].tolist() for one in found]
    assert out == [[3.0, 0.0], [5.0, 5.0]]
    assert np.isneginf(np.asarray(found[0].lse)[1]).all()
    np.testing.assert_allclose(found[1].lse, np.sqrt(2), rtol=1e-6)
