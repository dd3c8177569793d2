"""Attention estimated from means, against float64, and against attention to all tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from kernel_targets import CPU

from ckv_jax.kernels_pallas.attend.api import attend_rows
from ckv_jax.kernels_pallas.attend.means import attend_means
from ckv_jax.kernels_pallas.attend.merge import merge

BATCH, QUERIES, HEADS, KV_HEADS, DIM, CHUNKS = 3, 2, 6, 2, 16, 11
GROUP = HEADS // KV_HEADS


def arrays(seed: int = 0) -> tuple[np.ndarray, ...]:
    """q [B, S, H, D], mean and value [M, K, D], size [M, K], seen [B, K, M]."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((2, CHUNKS, KV_HEADS, DIM)).astype(np.float32)
    size = rng.integers(1, 9, (CHUNKS, KV_HEADS)).astype(np.float32)
    seen = rng.random((BATCH, KV_HEADS, CHUNKS)) < 0.5
    seen[1, 0] = False  # one head of one sequence sees nothing
    q = 2 * rng.standard_normal((BATCH, QUERIES, HEADS, DIM)).astype(np.float32)
    return q, means[0], means[1], size, seen


def test_every_chunk_weighs_as_so_many_tokens_of_its_means() -> None:
    q, mean, value, size, seen = arrays()
    out, lse = attend_means(*map(jnp.asarray, (q, mean, np.log(size), value, seen)))
    for b, s, h in np.ndindex(BATCH, QUERIES, HEADS):
        k = h // GROUP
        mine = seen[b, k]
        if not mine.any():
            assert not np.asarray(out[b, s, h]).any() and lse[b, s, h] == -np.inf
            continue
        logits = mean[mine, k].astype(np.float64) @ q[b, s, h] / np.sqrt(DIM)
        weights = size[mine, k] * np.exp(logits)
        np.testing.assert_allclose(lse[b, s, h], np.log(weights.sum()), rtol=1e-5, atol=1e-5)
        wanted = weights @ value[mine, k] / weights.sum()
        np.testing.assert_allclose(out[b, s, h], wanted, rtol=1e-4, atol=1e-5)


def test_means_of_single_tokens_are_dense_attention() -> None:
    """Merged with exact attention to the other tokens, too: one softmax over all."""
    q, keys, values, _, seen = arrays(1)
    ones = np.zeros((CHUNKS, KV_HEADS), np.float32)
    everything = np.ones_like(seen)
    rows = [jnp.broadcast_to(x.reshape(1, CHUNKS, -1), (BATCH, CHUNKS, KV_HEADS * DIM))
            for x in (keys, values)]  # fmt: skip
    last = jnp.full(BATCH, CHUNKS, jnp.int32)
    wanted = attend_rows(jnp.asarray(q), *rows, last, target=CPU)
    whole = attend_means(*map(jnp.asarray, (q, keys, ones, values, everything)))
    parts = [attend_means(*map(jnp.asarray, (q, keys, ones, values, some)))
             for some in (seen, ~seen)]  # fmt: skip
    for found in (whole, merge(*zip(*parts, strict=True))):
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_what_nobody_sees_says_nothing() -> None:
    q, mean, value, size, seen = arrays(2)
    before = attend_means(*map(jnp.asarray, (q, mean, np.log(size), value, seen)))
    hidden = ~seen.any(axis=0).T  # [M, K]
    assert hidden.any()
    mean[hidden], value[hidden] = 50.0, -3e4
    after = attend_means(*map(jnp.asarray, (q, mean, np.log(size), value, seen)))
    for mine, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_products_of_bfloat16_are_near() -> None:
    q, mean, value, size, seen = arrays(3)
    wanted, _ = attend_means(*map(jnp.asarray, (q, mean, np.log(size), value, seen)))
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, mean, value)]
    for widen in (False, True):
        out, _ = attend_means(low[0], low[1], jnp.log(size), low[2], jnp.asarray(seen), widen=widen)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, wanted, atol=0.06)
