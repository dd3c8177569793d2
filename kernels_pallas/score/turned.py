"""Keys turned into a basis of their own and cut short, for a coarse pass on a CPU.

The keys of a head differ along few directions (Loki, Singhania et al. 2024, arXiv 2406.02542): in
the basis of their principal components the first dimensions say nearly as much as all of them. A
CPU multiplies int8 as it lies in memory; the nibbles of int4 it decodes first, which takes longer
than all the rest.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ckv_jax.kernels_pallas.score.probe import Int4Keys, TurnedKeys
from ckv_jax.kernels_pallas.score.reference import over_queries
from ckv_jax.kernels_pallas.score.rows import weights_of

__all__ = ["score", "turn"]

_EVERY = 8  # one token in so many decides about the basis
_LEVELS = 127
_ROWS = 16  # query heads of a KV head at a time: products of int8 gain nothing from more
_LOWEST = float(jnp.finfo(jnp.float32).min)


@partial(jax.jit, static_argnames="dims")
def turn(probe: Int4Keys, *, dims: int) -> TurnedKeys:
    """The first `dims` principal components of a probe's keys, a KV head at a time."""

    def of_head(head: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        codes, scale = head  # [T, D/2], [T]
        low, high = codes & jnp.uint8(15), codes >> jnp.uint8(4)
        keys = jnp.concatenate([low, high], axis=1).astype(jnp.float32) - 8.0
        keys = keys * scale[:, None]
        some = keys[::_EVERY]
        _, basis = jnp.linalg.eigh(_dot(some, some, (0, 0)))  # ascending
        basis = basis[:, -dims:]
        return (*_whole(_dot(keys, basis, (1, 0))), basis)

    codes, unit, basis = lax.map(of_head, (probe.codes.swapaxes(0, 1), probe.scale.T))
    return TurnedKeys(codes, unit, basis)


def score(
    q: Array,
    probe: TurnedKeys,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
) -> Array:
    """See `api.score`; float32 [*2, B, K, M]. Queries are turned, too, and rounded to int8."""
    batch, queries, heads, dim = q.shape
    _, kv_heads, _ = probe.shape
    group = heads // kv_heads
    valid = jnp.arange(queries, dtype=jnp.int32)[None, :] < q_lengths[:, None]  # [B, S]
    q = jnp.where(valid[:, :, None, None], q, jnp.zeros((), q.dtype)).astype(jnp.float32)
    rows = q.reshape(batch * queries, kv_heads, group, dim).swapaxes(0, 1)
    rows = rows.reshape(kv_heads, -1, dim)  # [K, B*S*G, D]
    codes, unit = _whole(
        lax.dot_general(
            rows, probe.basis, (((2,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST
        )
    )
    blocks = -(-rows.shape[1] // _ROWS)
    more = blocks * _ROWS - rows.shape[1]
    if blocks > 1:
        codes = jnp.pad(codes, ((0, 0), (0, more), (0, 0)))
        unit = jnp.pad(unit, ((0, 0), (0, more)))
        shares = lax.map(
            lambda part: _shares(part[0], part[1], probe, num_tokens, chunk_tokens, dim),
            (
                codes.reshape(kv_heads, blocks, _ROWS, -1).swapaxes(0, 1),
                unit.reshape(kv_heads, blocks, _ROWS).swapaxes(0, 1),
            ),
        )  # [blocks, K, rows of a block, M]
        share = shares.swapaxes(0, 1).reshape(kv_heads, blocks * _ROWS, -1)[:, : rows.shape[1]]
    else:
        share = _shares(codes, unit, probe, num_tokens, chunk_tokens, dim)
    weight = jnp.repeat(weights_of(q_lengths, queries, peaks).reshape(-1), group)[None, :, None]
    share = jnp.where(weight > 0, share * weight, 0.0)
    by_sequence = share.reshape(kv_heads, batch, -1, share.shape[-1])
    out = over_queries(by_sequence, peaks, axis=2).swapaxes(1, 2)
    return out if peaks else out[0]


def _shares(
    codes: Array, unit: Array, probe: TurnedKeys, num_tokens: Array, chunk_tokens: int, dim: int
) -> Array:
    """The share of its attention that each row's query, int8 [K, r, R] worth `unit` [K, r] a one,
    gives each chunk: float32 [K, r, M]."""
    product = lax.dot_general(
        codes, probe.codes, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.int32
    )  # [K, r, T]
    logits = product.astype(jnp.float32) * (unit[:, :, None] * (1.0 / math.sqrt(dim)))
    real = jnp.arange(product.shape[2], dtype=jnp.int32)[None, None, :] < num_tokens
    logits = jnp.where(real, logits * probe.scale[:, None, :], -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), _LOWEST)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights.reshape(*weights.shape[:2], -1, chunk_tokens), axis=-1)
    total = jnp.sum(sums, axis=-1, keepdims=True)
    return jnp.where(total > 0, sums / jnp.where(total > 0, total, 1.0), 0.0)


def _dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    dims = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)


def _whole(values: Array) -> tuple[Array, Array]:
    """float32 [..., R] as int8, and what one is worth in each row, float32 [...]."""
    unit = jnp.max(jnp.abs(values), axis=-1) / _LEVELS
    inverse = jnp.where(unit > 0, 1.0 / jnp.where(unit > 0, unit, 1.0), 0.0)
    return jnp.rint(values * inverse[..., None]).astype(jnp.int8), unit
