"""What is made of queries and probes before kernels run, and of what they gave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ckv_jax.kernels_pallas.score.probe import (
    Landmarks,
    PqKeys,
    Probe,
    TokenProbe,
)

__all__ = ["chunk_sums", "fold_queries", "of_chunks", "pad_tokens", "weights_of"]


def weights_of(q_lengths: Array, queries: int, peaks: bool) -> Array:
    """What each query counts, float32 [B, S]: 0 past its row's length, else 1, or with `peaks`
    1 / (1 + d) for the query d places before the last."""
    before_end = q_lengths[:, None] - jnp.arange(queries, dtype=jnp.int32)[None, :]  # 1 + d
    valid = before_end > 0
    if not peaks:
        return valid.astype(jnp.float32)
    return jnp.where(valid, 1.0 / jnp.maximum(before_end, 1).astype(jnp.float32), 0.0)


def fold_queries(q: Array, kv_heads: int, q_lengths: Array, multiple: int) -> tuple[Array, Array]:
    """q [B, S, H, D] -> rows [B, K, S*G, D], padded to a multiple, and valid bool [B, rows].

    Queries past their length become zeros, whatever they were.
    """
    batch, queries, heads, dim = q.shape
    group = heads // kv_heads
    valid = jnp.arange(queries, dtype=jnp.int32)[None, :] < q_lengths[:, None]  # [B, S]
    q = jnp.where(valid[:, :, None, None], q, jnp.zeros((), q.dtype))
    rows = q.reshape(batch, queries, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, queries * group, dim)
    pad = -(queries * group) % multiple
    return (
        jnp.pad(rows, ((0, 0), (0, 0), (0, pad), (0, 0))),
        jnp.pad(jnp.repeat(valid, group, axis=1), ((0, 0), (0, pad))),
    )


def pad_tokens(probe: TokenProbe, tokens: int) -> TokenProbe:
    """Zeros behind the keys, up to `tokens` of them."""
    pad = tokens - probe.shape[0]
    if pad <= 0:
        return probe

    def padded(array: Array) -> Array:
        return jnp.pad(array, ((0, pad),) + ((0, 0),) * (array.ndim - 1))

    if isinstance(probe, PqKeys):
        return PqKeys(padded(probe.codes), probe.codebooks)
    longer: TokenProbe = jax.tree.map(padded, probe)
    return longer


def of_chunks(probe: Probe, ids: Array, chunk_tokens: int) -> Probe:
    """What a probe has of the chunks `ids` int32 [n], one after the other; for -1, of some."""
    unit = 1 if isinstance(probe, Landmarks) else chunk_tokens

    def taken(array: Array) -> Array:
        rows = array.reshape(-1, unit, *array.shape[1:])
        found = jnp.take(rows, ids, axis=0, mode="clip")
        return found.reshape(-1, *array.shape[1:])

    if isinstance(probe, PqKeys):
        return PqKeys(taken(probe.codes), probe.codebooks)
    few: Probe = jax.tree.map(taken, probe)
    return few


def chunk_sums(weights: Array, chunk_tokens: int) -> Array:
    """Weights of keys [B, K, tiles, T] -> scores of chunks [B, K, M]."""
    batch, kv_heads, tiles, tokens = weights.shape
    by_chunk = weights.reshape(batch, kv_heads, tiles, tokens // chunk_tokens, chunk_tokens)
    return jnp.sum(by_chunk, axis=(2, 4))
