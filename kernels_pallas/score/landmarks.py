"""Scores by one landmark for each chunk: its mean key, or the bounds of its keys.

One product of queries and landmarks and a softmax over M = T / C logits a row: little enough for
XLA on every device, so that there is no kernel.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from ckv_jax.kernels_pallas.score.probe import Landmarks, MeanKeys
from ckv_jax.kernels_pallas.score.reference import over_queries
from ckv_jax.kernels_pallas.score.rows import weights_of

__all__ = ["landmark_sums", "score"]

_LOWEST = float(jnp.finfo(jnp.float32).min)


def score(
    q: Array,
    probe: Landmarks,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
    *,
    widen: bool = False,
) -> Array:
    """See `api.score`; float32 [*2, B, K, M]. `widen`: multiplies in float32, see `Target.widens`.

    A chunk's logit is q.mean + log(size), or the greatest that q.k can be for keys k within the
    chunk's bounds, sum over dims of max(q low, q high).
    """
    batch, queries, heads, dim = q.shape
    chunks, kv_heads, _ = probe.shape
    valid = jnp.arange(queries, dtype=jnp.int32)[None, :] < q_lengths[:, None]  # [B, S]
    q = jnp.where(valid[:, :, None, None], q, jnp.zeros((), q.dtype))
    rows = q.reshape(batch * queries, kv_heads, heads // kv_heads, dim).swapaxes(0, 1)
    rows = rows.reshape(kv_heads, -1, dim)  # [K, B*S*G, D]
    if widen:
        rows = rows.astype(jnp.float32)
    weights, _ = landmark_sums(rows, probe, num_tokens, chunk_tokens)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weight = jnp.repeat(weights_of(q_lengths, queries, peaks).reshape(-1), heads // kv_heads)
    share = jnp.where(total > 0, weight[None, :, None] / jnp.where(total > 0, total, 1.0), 0.0)
    by_sequence = (weights * share).reshape(kv_heads, batch, -1, chunks)
    out = over_queries(by_sequence, peaks, axis=2).swapaxes(1, 2)
    return out if peaks else out[0]


def landmark_sums(
    rows: Array, probe: Landmarks, num_tokens: Array, chunk_tokens: int
) -> tuple[Array, Array]:
    """rows [K, R, D] -> exponentials [K, R, M] of every chunk's logit, less the maxima [K, R]."""
    chunks, _, dim = probe.shape
    scale = 1.0 / math.sqrt(dim)
    if isinstance(probe, MeanKeys):
        logits = _dot(rows, probe.mean) * scale + probe.log_size.T[:, None, :]
    else:
        zero = jnp.zeros((), rows.dtype)
        above = _dot(jnp.maximum(rows, zero), probe.high)
        logits = (above + _dot(jnp.minimum(rows, zero), probe.low)) * scale
    held = jnp.arange(chunks, dtype=jnp.int32) * chunk_tokens < num_tokens
    logits = jnp.where(held[None, None, :], logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=-1), _LOWEST)
    return jnp.exp(logits - top[..., None]), top


def _dot(rows: Array, landmarks: Array) -> Array:
    """[K, R, D] and [M, K, D] to float32 [K, R, M]."""
    dims = (((2,), (2,)), ((0,), (1,)))
    landmarks = landmarks.astype(rows.dtype)
    return lax.dot_general(rows, landmarks, dims, preferred_element_type=jnp.float32)
