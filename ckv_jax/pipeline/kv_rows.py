"""Jitted operations on decode buffers: each layer's (K, V) [B, R, K, D], R a power of two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.pipeline.layers import Compute, compiled

LEAST_ROWS = 64

LayerKv = tuple[tuple[Array, Array], ...]
"""(K, V) [B, R, K, D] of each layer of one step."""


def rows_bucket(tokens: int) -> int:
    """Rows of a buffer that holds `tokens`: powers of two from 64."""
    return max(LEAST_ROWS, 1 << (tokens - 1).bit_length())


class KvRows:
    """Makes, grows, thins out and reads decode buffers of one engine."""

    def __init__(self, compute: Compute) -> None:
        self._dtype = compute.kv_dtype
        self._resize = jax.jit(_resize, static_argnames=("rows", "dtype"))
        self._take = jax.jit(_take)
        self._read = jax.jit(_read)

    def resize(self, kv: LayerKv, rows: int) -> LayerKv:
        """A copy with `rows` rows in the pool's element type; rows past the old end are zero."""
        out: LayerKv = self._resize(kv, rows=rows, dtype=self._dtype)
        return out

    def take(self, tree: Any, batch_rows: np.ndarray) -> Any:
        """Only these rows of the batch, of every array of a pytree."""
        return self._take(tree, batch_rows)

    def read(self, kv: LayerKv, batch_row: int, first: int, stop: int) -> np.ndarray:
        """Host copy [layers, 2, stop - first, K, D] of one row of the batch."""
        out: np.ndarray = np.asarray(self._read(kv, np.int32(batch_row)))
        return out[:, :, first:stop].copy()

    def executables(self) -> int:
        """How many programs have been compiled so far."""
        return compiled(self._resize, self._take, self._read)


def _resize(kv: LayerKv, *, rows: int, dtype: jnp.dtype) -> LayerKv:
    def one(x: Array) -> Array:
        if x.dtype != dtype:
            x = jax.lax.bitcast_convert_type(x, dtype)
        return jnp.pad(x[:, :rows], ((0, 0), (0, max(0, rows - x.shape[1])), (0, 0), (0, 0)))

    resized: LayerKv = jax.tree.map(one, kv)
    return resized


def _take(tree: Any, batch_rows: Array) -> Any:
    return jax.tree.map(lambda x: jnp.take(x, batch_rows, axis=0), tree)


def _read(kv: LayerKv, batch_row: Array) -> Array:
    def row(x: Array) -> Array:
        kept: Array = jax.lax.dynamic_index_in_dim(x, batch_row, axis=0, keepdims=False)
        return kept

    return jnp.stack([jnp.stack([row(keys), row(values)]) for keys, values in kv])
