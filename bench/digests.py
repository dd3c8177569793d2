"""Keys compressed and given back, as a study sees them: what each digest forgets.

`int8` and `int4` scale every token's head by its largest value, as the store does; `int3`, the
means, the signs (beside the mean size of an element) and the product quantisers are the
alternatives that were tried.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["KINDS", "bytes_per_token", "compress"]

# probe -> bits for one element of a key, beside the float32 scale of a token and head
KINDS = {
    "keys": 16.0, "int8": 8.0, "int4": 4.0, "int3": 3.0, "pq8": 2.0, "pq16": 1.0, "signs": 1.0,
    "mean": 1.0,
}  # fmt: skip
_LEVELS = {"int8": 127, "int4": 7, "int3": 3}
_WIDTH = {"pq8": 4, "pq16": 8}  # dimensions that one byte stands for
_ROUNDS = 8


def bytes_per_token(kind: str, *, layers: int, kv_heads: int, dim: int) -> float:
    """Bytes of such a probe of so many layers for one prefix token, without codebooks."""
    scale = 4 if kind in _LEVELS or kind == "signs" else 0
    return layers * kv_heads * (dim * KINDS[kind] / 8 + scale)


def compress(keys: np.ndarray, kind: str, *, chunk_tokens: int = 16) -> np.ndarray:
    """`keys` [L, T, K, D] after compression and back, float32; a head's mean key is not kept.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"got digest {kind!r}, expected one of {sorted(KINDS)}")
    if kind == "keys":
        return keys
    centred = keys - keys.mean(axis=1, keepdims=True)
    if kind == "mean":
        layers, tokens = keys.shape[:2]
        parts = centred.reshape(layers, tokens // chunk_tokens, chunk_tokens, *keys.shape[2:])
        return np.repeat(parts.mean(axis=2), chunk_tokens, axis=1)
    if kind == "signs":
        size = np.abs(centred).mean(axis=-1, keepdims=True)
        return np.where(centred < 0, -size, size)
    if kind in _LEVELS:
        levels = _LEVELS[kind]
        scale = np.abs(centred).max(axis=-1, keepdims=True) / levels
        scale = np.maximum(scale, 1e-12)
        return np.clip(np.round(centred / scale), -levels, levels) * scale
    return np.asarray(_product(jnp.asarray(centred), _WIDTH[kind]))


@partial(jax.jit, static_argnums=1)
def _product(keys: jax.Array, width: int) -> jax.Array:
    """Each slice of `width` dimensions of each head replaced by the nearest of 256 centroids."""
    layers, tokens, heads, dim = keys.shape
    parts = keys.reshape(layers, tokens, heads * (dim // width), width)
    parts = jnp.moveaxis(parts, 1, 2).reshape(-1, tokens, width)
    out = jax.lax.map(_quantise, parts)
    out = jnp.moveaxis(out.reshape(layers, -1, tokens, width), 2, 1)
    return out.reshape(keys.shape)


def _quantise(points: jax.Array) -> jax.Array:
    """Lloyd's algorithm on [T, width] from 256 points spread evenly over the prefix."""
    start = points[jnp.linspace(0, points.shape[0] - 1, 256).astype(jnp.int32)]

    def nearest(centres: jax.Array) -> jax.Array:
        far = (centres * centres).sum(-1)[None, :] - 2 * points @ centres.T
        return far.argmin(-1)

    def move(_: int, centres: jax.Array) -> jax.Array:
        owner = nearest(centres)
        sums = jax.ops.segment_sum(points, owner, 256)
        sizes = jax.ops.segment_sum(jnp.ones(points.shape[0]), owner, 256)
        return jnp.where(sizes[:, None] > 0, sums / jnp.maximum(sizes, 1)[:, None], centres)

    centres = jax.lax.fori_loop(0, _ROUNDS, move, start)
    return centres[nearest(centres)]
