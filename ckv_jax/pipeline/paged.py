"""Attention to packs in the pool and to a request's own rows, whether or not heads are apart.

A pack of one KV head is a page of one head: KV heads are folded into the batch then, each with a
table of its own. Inside a jitted call.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ckv_jax.kernels_pallas.attend.api import attend, attend_rows
from ckv_jax.kernels_pallas.attend.merge import merge
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.prefix.pools import layer_pages


def over_pages_and_rows(
    q: Array, pages: Array, slots: Array, lengths: Array, index: int, keys: Array, values: Array,
    at: Array, *, target: Target,
) -> Array:  # fmt: skip
    """What queries [B, S, H, D] of layer number `index` of a call attend to.

    `pages` [slots, pl, 2, C, K*D], or [..., D] with heads apart; `slots` [P, B, N] of the call's
    layer groups; `lengths` [B, N], or [K, B, N] where each head has chosen for itself: valid tokens
    of each chunk; `keys`, `values` [B, R, K*D], of which query i sees the first `at[b] + i + 1`.
    """
    pack, dim = pages.shape[1], q.shape[3]
    group, place = divmod(index, pack)
    parts = keys.shape[2] // pages.shape[4]  # K with heads apart, else 1
    if parts == 1:
        pool, tables = layer_pages(pages, slots[group], place)
        return attend(q, pool, *tables, lengths, keys, values, at, target=target)[0]
    batch, length, heads, _ = q.shape
    by_head = slots[group * parts : (group + 1) * parts]  # [K, B, N]
    lengths = jnp.broadcast_to(lengths, by_head.shape)
    folded = q.reshape(batch, length, parts, heads // parts, dim).transpose(2, 0, 1, 3, 4)
    out, lse = over_one_head(
        folded.reshape(parts * batch, length, heads // parts, dim), pages,
        by_head.reshape(parts * batch, -1), lengths.reshape(parts * batch, -1), place,
        dtype=keys.dtype, target=target,
    )  # fmt: skip
    out = out.reshape(parts, batch, length, heads // parts, dim).transpose(1, 2, 0, 3, 4)
    lse = lse.reshape(parts, batch, length, heads // parts).transpose(1, 2, 0, 3)
    own, own_lse = attend_rows(q, keys, values, at, target=target)
    return merge([out.reshape(q.shape), own], [lse.reshape(q.shape[:3]), own_lse])[0]


def over_one_head(
    q: Array, pages: Array, slots: Array, lengths: Array, index: Array | int, *,
    dtype: jnp.dtype, target: Target,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of q [R, S, G, D] to chunks of one KV head in packs [slots, pl, 2, C, D], and its
    log-sum-exp. `slots`, `lengths` [R, N]; `dtype`: of the elements in the packs."""
    pool, tables = layer_pages(pages, slots, index)
    none = jnp.zeros((q.shape[0], 0, pages.shape[4]), dtype)
    zero = jnp.zeros(q.shape[:1], jnp.int32)
    out: Array
    lse: Array
    out, lse = attend(q, pool, *tables, lengths, none, none, zero, target=target)
    return out, lse
