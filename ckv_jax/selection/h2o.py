"""H2O's importance of a token: the sum of its column in the attention matrix (IMPRESS §4.1)."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32


def column_sums(
    q: Float[Array, "S H D"],
    keys: Float[Array, "T K D"],
    k_new: Float[Array, "S K D"],
    valid: Bool[Array, " T"],
    q_length: Int32[Array, ""],
) -> Float32[Array, "K T"]:
    """Attention that each prefix token gets from the suffix, for each KV head by itself.

    The softmax is the layer's own: over the valid prefix keys and, causally, the suffix keys.
    Summed over the G query heads of a KV head and the first `q_length` queries; tokens that are
    not valid get -inf. With fewer KV heads (a probe of the first ones), their query heads alone
    are to be given.
    """
    queries, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(dim)
    steps = jnp.arange(queries, dtype=jnp.int32)
    causal = jnp.repeat(steps[None, :] <= steps[:, None], group, axis=0)  # [S*G, S]
    counted = jnp.repeat(steps < q_length, group)  # [S*G]
    sums = []
    for head in range(kv_heads):  # one matmul a head: no [H, S, T] array, no transposed keys
        rows = q[:, head * group : (head + 1) * group].reshape(queries * group, dim)
        old = _logits(rows, keys[:, head]) * scale
        new = _logits(rows, k_new[:, head]) * scale
        old = jnp.where(valid[None, :], old, -jnp.inf)
        new = jnp.where(causal, new, -jnp.inf)
        top = jnp.maximum(jnp.max(old, axis=1), jnp.max(new, axis=1))[:, None]
        old, new = jnp.exp(old - top), jnp.exp(new - top)
        total = jnp.sum(old, axis=1) + jnp.sum(new, axis=1)
        weight = jnp.where(counted, 1.0 / total, 0.0)  # [S*G]
        sums.append(jnp.sum(old * weight[:, None], axis=0))
    return jnp.where(valid[None, :], jnp.stack(sums), -jnp.inf)


def _logits(rows: Array, keys: Array) -> Array:
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(rows, keys, contract, preferred_element_type=jnp.float32)
