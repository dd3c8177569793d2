"""Attention to chunks estimated from their mean keys and values (RetroInfer's estimation zone).

Every key of a chunk is taken for the mean key, every value for the mean value: the chunk weighs
size * exp(q.mean_key / sqrt(D)), which is never more than what its keys weigh together (Jensen).
One product of queries and means and one of weights and values: little enough for XLA on every
device, so that there is no kernel.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32

__all__ = ["attend_means"]

_LOWEST = float(jnp.finfo(jnp.float32).min)


def attend_means(
    q: Float[Array, "B S H D"],
    mean: Float[Array, "M K D"],
    log_size: Float32[Array, "M K"],
    value: Float[Array, "M K D"],
    seen: Bool[Array, "B K M"],
    *,
    widen: bool = False,
) -> tuple[Float32[Array, "B S H D"], Float32[Array, "B S H"]]:
    """Softmax attention, scaled by 1/sqrt(D), over the chunks that each sequence's KV head has
    `seen`; query head h uses KV head h // (H // K).

    `log_size`: logarithm of how many tokens a mean stands for. What stands in chunks that nobody
    sees must be finite. `widen`: multiplies in float32, see `Target.widens`.

    Returns:
      out and the natural log-sum-exp of the scaled logits, to be merged with those of exact
      attention to other chunks (`merge`). Where a query sees nothing, out is 0 and lse is -inf.
      Accumulated in float32; weights are rounded to q's dtype for the second product, except where
      that `widen`s.
    """
    batch, length, heads, dim = q.shape
    kv_heads = mean.shape[1]
    group = heads // kv_heads
    product = jnp.dtype(jnp.float32) if widen else q.dtype
    rows = q.reshape(batch, length, kv_heads, group, dim).transpose(2, 0, 1, 3, 4)
    rows = rows.reshape(kv_heads, -1, dim)  # [K, B*S*G, D]
    logits = lax.dot_general(
        rows.astype(product), mean.astype(product), (((2,), (2,)), ((0,), (1,))),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    logits = logits * (1.0 / math.sqrt(dim)) + log_size.T[:, None, :]
    logits = logits.reshape(kv_heads, batch, length * group, -1)
    logits = jnp.where(seen.swapaxes(0, 1)[:, :, None, :], logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), _LOWEST)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = lax.dot_general(
        weights.astype(product).reshape(kv_heads, rows.shape[1], -1), value.astype(product),
        (((2,), (0,)), ((0,), (1,))), preferred_element_type=jnp.float32,
    )  # fmt: skip
    out = out.reshape(kv_heads, batch, length * group, dim) / jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    out = out.reshape(kv_heads, batch, length, group, dim).transpose(1, 2, 0, 3, 4)
    lse = lse.reshape(kv_heads, batch, length, group).transpose(1, 2, 0, 3)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
