"""H2O's token scores are the column sums of the layer's attention matrix."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.baselines.layerwise import column_sums
from ckv_jax.selection.base import chunk_counts, top_mask

HEADS, KV_HEADS, DIM = 6, 3, 8


def attention(q: np.ndarray, keys: np.ndarray, k_new: np.ndarray) -> np.ndarray:
    """The whole causal attention matrix [H, S, T + S] in float64, written out plainly."""
    queries, heads, dim = q.shape
    group = heads // keys.shape[1]
    both = np.concatenate([keys, k_new]).astype(np.float64)
    out = np.zeros((heads, queries, len(both)))
    for head in range(heads):
        for i in range(queries):
            logits = both[:, head // group] @ q[i, head].astype(np.float64) / np.sqrt(dim)
            logits[len(keys) + i + 1 :] = -np.inf
            weights = np.exp(logits - logits.max())
            out[head, i] = weights / weights.sum()
    return out


@pytest.mark.parametrize("queries, length", [(1, 1), (5, 5), (5, 3)])
def test_column_sums(queries: int, length: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(queries, HEADS, DIM)).astype(np.float32)
    keys = rng.normal(size=(20, KV_HEADS, DIM)).astype(np.float32)
    k_new = rng.normal(size=(queries, KV_HEADS, DIM)).astype(np.float32)
    valid = np.arange(20) < 17
    got = column_sums(
        jnp.asarray(q), jnp.asarray(keys), jnp.asarray(k_new), jnp.asarray(valid), jnp.int32(length)
    )
    matrix = attention(q, keys[:17], k_new)[:, :length, :17].sum(axis=1)  # [H, T]
    expected = matrix.reshape(KV_HEADS, HEADS // KV_HEADS, 17).sum(axis=1)
    np.testing.assert_allclose(np.asarray(got)[:, :17], expected, rtol=1e-4)
    assert (np.asarray(got)[:, 17:] == -np.inf).all()


def test_the_best_tokens_up_to_each_rows_limit() -> None:
    scores = jnp.asarray([[1.0, 5.0, -jnp.inf, 5.0, 3.0], [2.0, 1.0, 0.0, 4.0, 3.0]], jnp.float32)
    limits = jnp.asarray([2, 4], jnp.int32)
    best = [[False, True, False, True, False], [True, True, False, True, True]]
    np.testing.assert_array_equal(top_mask(scores, 4, limits), best)
    ids = jnp.asarray([[1, 3, -1, -1], [0, 1, 3, 4]], jnp.int32)
    counts = chunk_counts(ids, chunk_tokens=2, chunks=3)
    np.testing.assert_array_equal(counts, [[1, 1, 0], [2, 1, 1]])
