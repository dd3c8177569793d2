"""Scores of the chunks of several texts under one softmax, each text with queries of its own.

A key that is to stand `offset` tokens further on is rotated by that offset; its product with a
query is that of the key as it is and the query rotated back. So queries move and probes stay as
they are, which is exact for every kind of probe, quantised ones and landmarks too. Each text's
exponentials are summed by chunk as in one block of `reference.score`, and joined as blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.kernels_pallas.score.landmarks import landmark_sums
from ckv_jax.kernels_pallas.score.probe import Landmarks, Probe, TurnedKeys
from ckv_jax.kernels_pallas.score.reference import block_sums

__all__ = ["score_together"]


def score_together(
    queries: Sequence[Float[Array, "1 S H D"]],
    probes: Sequence[Probe],
    *,
    num_tokens: Int32[Array, " n"],
    q_length: Int32[Array, ""],
    chunk_tokens: int,
) -> Float32[Array, "1 M"]:
    """Attention mass of each chunk, as `api.score` with all heads, but over all texts together.

    `queries[i]`: the same ones, with RoPE as at the place where `probes[i]` sees them. M is the
    sum of the probes' chunks, one text's after the other's; those past a text's end get 0. The sum
    over all is H * q_length.
    """
    _, count, heads, dim = queries[0].shape
    kv_heads = probes[0].shape[1]
    group = heads // kv_heads
    found, tops = [], []
    for index, (q, probe) in enumerate(zip(queries, probes, strict=True)):
        rows = q.reshape(count, kv_heads, group, dim).swapaxes(0, 1)
        rows = rows.reshape(kv_heads, count * group, dim)
        if isinstance(probe, Landmarks):
            part, top = landmark_sums(rows, probe, num_tokens[index], chunk_tokens)
        else:
            assert not isinstance(probe, TurnedKeys)  # those are for a coarse pass
            part, top = block_sums(rows, probe, num_tokens[index], chunk_tokens, rows.dtype)
        found.append(part)
        tops.append(top)
    top = jnp.max(jnp.stack(tops), axis=0)  # [K, rows]
    every = jnp.concatenate(
        [part * jnp.exp(own - top)[..., None] for part, own in zip(found, tops, strict=True)],
        axis=-1,
    )  # [K, rows, M]
    total = jnp.sum(every, axis=-1, keepdims=True)
    counted = jnp.repeat(jnp.arange(count, dtype=jnp.int32) < q_length, group)[None, :, None]
    share = jnp.where(counted & (total > 0), 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.sum(every * share, axis=(0, 1))[None]
