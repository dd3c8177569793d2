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

__all__ = ["balanced", "by_position", "kmeans"]

CHUNK = 4
"""Tokens side by side that stay together."""
SEGMENT = 8192
_ROUNDS = 10


def by_position(tokens: int, unit_tokens: int) -> np.ndarray:
    """Units of `unit_tokens` tokens side by side."""
    return (np.arange(tokens) // unit_tokens).astype(np.int32)


def balanced(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """Units of exactly `unit_tokens` alike tokens of `keys` [T, D].

    Each segment's chunk means are halved at the median of their first principal direction until
    `unit_tokens / 4` of them are left together. Raises ValueError where that does not come out
    even: T must be `unit_tokens` times a power of two, or a multiple of 8,192.
    """
    size = unit_tokens // CHUNK
    parts, base = [], 0
    for start in range(0, len(keys), SEGMENT):
        means = _chunk_means(keys[start : start + SEGMENT])
        leaves = [np.arange(len(means))]
        while len(leaves[0]) > size and len(leaves[0]) % 2 == 0:
            leaves = [half for leaf in leaves for half in _halves(means, leaf)]
        if len(leaves[0]) != size:
            raise ValueError(
                f"got {len(means) * CHUNK} tokens, expected {unit_tokens} x a power of two"
            )
        unit = np.empty(len(means), np.int32)
        for number, leaf in enumerate(leaves):
            unit[leaf] = base + number
        base += len(leaves)
        parts.append(np.repeat(unit, CHUNK))
    return np.concatenate(parts)


def kmeans(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """Clusters of alike tokens of `keys` [T, D], `T / unit_tokens` of them and of any size."""
    parts, base = [], 0
    for start in range(0, len(keys), SEGMENT):
        means = _chunk_means(keys[start : start + SEGMENT])
        count = max(1, len(means) * CHUNK // unit_tokens)
        owner = np.asarray(_lloyd(jnp.asarray(means), count))
        parts.append(np.repeat(base + owner.astype(np.int32), CHUNK))
        base += count
    return np.concatenate(parts)


def _chunk_means(keys: np.ndarray) -> np.ndarray:
    if len(keys) % CHUNK:
        raise ValueError(f"got {len(keys)} tokens, expected a multiple of {CHUNK}")
    means: np.ndarray = keys.reshape(-1, CHUNK, keys.shape[-1]).mean(1, dtype=np.float32)
    return means


def _halves(means: np.ndarray, leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A leaf's members below and above the median of its first principal direction."""
    centred = means[leaf] - means[leaf].mean(0)
    direction = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    order = np.argsort(centred @ direction, kind="stable")
    half = len(leaf) // 2
    return np.sort(leaf[order[:half]]), np.sort(leaf[order[half:]])


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
