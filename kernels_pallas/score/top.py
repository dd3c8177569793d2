"""The best chunks of a row of scores."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["top"]


def top(scores: Array, n: int, num_chunks: Array) -> Array:
    """See `api.select`."""
    chunks = scores.shape[1]
    ids = jnp.arange(chunks, dtype=jnp.int32)
    masked = jnp.where((ids < num_chunks)[None, :], scores, -jnp.inf)
    _, best = lax.top_k(masked, min(n, chunks))
    best = jnp.sort(jnp.where(best < num_chunks, best.astype(jnp.int32), chunks), axis=1)
    best = jnp.where(best < chunks, best, -1)
    return jnp.pad(best, ((0, 0), (0, n - best.shape[1])), constant_values=-1)
