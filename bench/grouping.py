"""Units of decode's choice: tokens side by side, or tokens whose keys are alike.

A grouping is int32 `[T]`, the unit of each token. Alike tokens are grouped by the means of four
tokens side by side (KVDrive §4), each segment of 8,192 tokens apart, either into units of exactly
equal size or by k-means.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ckv_jax.storage.grouping import RUN, TOGETHER, alike

__all__ = ["balanced", "by_position", "kmeans"]

_ROUNDS = 10


def by_position(tokens: int, unit_tokens: int) -> np.ndarray:
    """Units of `unit_tokens` tokens side by side."""
    return (np.arange(tokens) // unit_tokens).astype(np.int32)


def balanced(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """Units of exactly `unit_tokens` alike tokens of `keys` [T, D].

    See `storage.grouping`, which groups what is stored. Raises ValueError where T is no multiple of
    `unit_tokens`.
    """
    parts, base = [], 0
    for start in range(0, len(keys), RUN):
        unit = alike(keys[start : start + RUN], unit_tokens)
        parts.append(base + unit)
        base += len(unit) // unit_tokens
    return np.concatenate(parts)


def kmeans(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """Clusters of alike tokens of `keys` [T, D], `T / unit_tokens` of them and of any size."""
    parts, base = [], 0
    for start in range(0, len(keys), RUN):
        means = _chunk_means(keys[start : start + RUN])
        count = max(1, len(means) * TOGETHER // unit_tokens)
        owner = np.asarray(_lloyd(jnp.asarray(means), count))
        parts.append(np.repeat(base + owner.astype(np.int32), TOGETHER))
        base += count
    return np.concatenate(parts)


def _chunk_means(keys: np.ndarray) -> np.ndarray:
    if len(keys) % TOGETHER:
        raise ValueError(f"got {len(keys)} tokens, expected a multiple of {TOGETHER}")
    means: np.ndarray = keys.reshape(-1, TOGETHER, keys.shape[-1]).mean(1, dtype=np.float32)
    return means


@partial(jax.jit, static_argnums=1)
def _lloyd(points: jax.Array, count: int) -> jax.Array:
    """The cluster of each of `points` [N, D] after a few rounds, from evenly spread ones."""
    start = points[jnp.linspace(0, len(points) - 1, count).astype(jnp.int32)]

    def nearest(centres: jax.Array) -> jax.Array:
        far = (centres * centres).sum(-1)[None, :] - 2 * points @ centres.T
        return far.argmin(-1)

    def move(_: int, centres: jax.Array) -> jax.Array:
        owner = nearest(centres)
        sums = jax.ops.segment_sum(points, owner, count)
        sizes = jax.ops.segment_sum(jnp.ones(len(points)), owner, count)
        return jnp.where(sizes[:, None] > 0, sums / jnp.maximum(sizes, 1)[:, None], centres)

    return nearest(jax.lax.fori_loop(0, _ROUNDS, move, start))
