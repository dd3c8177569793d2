"""The running softmax of the TPU kernels: one block of keys after another.

Maxima are kept of the bare logits; their scale and the step from e to 2 are one factor inside the
exponential, so that a logit costs one multiplication. A row's maximum stands in every lane, and its
total is kept lane by lane: nothing moves between lanes but for the maximum of each block.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

__all__ = ["LANES", "LOWEST", "finish", "start", "update", "wide"]

LANES = 128
LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


def start(acc_ref: Any, top_ref: Any, total_ref: Any) -> None:
    """Nothing seen. acc: float32 [heads, rows, D]; top and total: [heads, rows, LANES]."""
    acc_ref[...] = jnp.zeros_like(acc_ref)
    top_ref[...] = jnp.full_like(top_ref, LOWEST)
    total_ref[...] = jnp.zeros_like(total_ref)


def update(
    x: Array,
    seen: Array,
    values: Array,
    acc_ref: Any,
    top_ref: Any,
    total_ref: Any,
    head: int,
    scale: float,
) -> None:
    """Takes in one head's bare logits float32 [rows, keys] and values [keys, D].

    seen: bool [rows, keys], keys a multiple of LANES.
    """
    keys = x.shape[1]
    factor = scale * math.log2(math.e)
    x = jnp.where(seen, x, LOWEST)
    old = top_ref[head]
    top = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
    # Where a row has seen nothing yet, a base of 0 makes its weights vanish: an operation for each
    # row and not for each logit.
    base = jnp.where(top > LOWEST, top, 0.0)
    p = jnp.exp2((x - wide(base, keys)) * factor)
    shrink = jnp.exp2((old - top) * factor)
    total = total_ref[head] * shrink
    for first in range(0, keys, LANES):
        total = total + p[:, first : first + LANES]
    part = jnp.dot(p.astype(values.dtype), values, preferred_element_type=jnp.float32)
    acc_ref[head] = acc_ref[head] * wide(shrink, values.shape[1]) + part
    total_ref[head] = total
    top_ref[head] = top


def wide(x: Array, width: int) -> Array:
    """[rows, LANES], the same in every lane, as [rows, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def finish(acc_ref: Any, top_ref: Any, total_ref: Any, scale: float) -> tuple[Array, Array]:
    """out float32 [heads, rows, D] and the natural log-sum-exp [heads, rows, 1], -inf where nothing
    was seen."""
    total = jnp.sum(total_ref[...], axis=2, keepdims=True)
    divisor = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top_ref[:, :, :1] * scale + jnp.log(divisor), -jnp.inf)
    return acc_ref[...] / divisor, lse
