"""Jitted operations on decode buffers: each layer's (K, V) [B, R, K*D], R a power of two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.memory.pages import as_bits
from ckv_jax.pipeline.layers import LayerKv, Layers

LEAST_ROWS = 64


def rows_bucket(tokens: int) -> int:
    """Rows of a buffer that holds `tokens`: powers of two from 64."""
    return max(LEAST_ROWS, 1 << (tokens - 1).bit_length())


class KvRows:
    """Makes, grows, joins, thins out and reads the decode buffers of one model."""

    def __init__(self, layers: Layers) -> None:
        self._dtype = layers.kv_dtype
        jit = layers.programs.jit
        self._resize = jit(_resize, static=("rows", "dtype"))
        self._pick = jit(_pick, static=("rows", "dtype"))
        self._put = jit(_put, donate=("buffers",))
        self._take = jit(_take)
        self._shift = jit(_shift, donate=("buffers",))
        self._read = jit(_pick_one)

    def resize(self, kv: LayerKv, rows: int) -> LayerKv:
        """A copy with `rows` rows in the pool's element type; rows past the old end are zero."""
        out: LayerKv = self._resize((_shape(kv), rows), kv, rows=rows, dtype=self._dtype)
        return out

    def pick(self, kv: LayerKv, batch_row: int, rows: int) -> LayerKv:
        """One row of the batch, [1, rows, K*D] each, in the pool's element type."""
        out: LayerKv = self._pick(
            (_shape(kv), rows), kv, np.int32(batch_row), rows=rows, dtype=self._dtype
        )
        return out

    def put(self, buffers: LayerKv, one: LayerKv, batch_row: int) -> LayerKv:
        """(Donated) `buffers` with a row from `pick` in place of row `batch_row`."""
        out: LayerKv = self._put(_shape(buffers), buffers, one, np.int32(batch_row))
        return out

    def take(self, kv: LayerKv, batch_rows: np.ndarray) -> LayerKv:
        """Only these rows of the batch (they may repeat)."""
        out: LayerKv = self._take((_shape(kv), len(batch_rows)), kv, batch_rows)
        return out

    def shift(self, buffers: LayerKv, batch_row: int, tokens: int) -> LayerKv:
        """(Donated) `buffers` in which one row of the batch begins `tokens` tokens later."""
        out: LayerKv = self._shift(_shape(buffers), buffers, np.int32(batch_row), np.int32(tokens))
        return out

    def read(self, kv: LayerKv, batch_row: int, first: int, stop: int) -> np.ndarray:
        """Host copy [layers, 2, stop - first, K*D] of one row of the batch."""
        out = np.asarray(self._read(_shape(kv), kv, np.int32(batch_row)))
        return out[:, :, first:stop].copy()


def _shape(kv: LayerKv) -> tuple[Any, ...]:
    return (len(kv), kv[0][0].shape, kv[0][0].dtype)


def _fitted(x: Array, rows: int, dtype: jnp.dtype) -> Array:
    x = as_bits(x, dtype)
    return jnp.pad(x[:, :rows], ((0, 0), (0, max(0, rows - x.shape[1])), (0, 0)))


def _resize(kv: LayerKv, *, rows: int, dtype: jnp.dtype) -> LayerKv:
    resized: LayerKv = jax.tree.map(lambda x: _fitted(x, rows, dtype), kv)
    return resized


def _pick(kv: LayerKv, batch_row: Array, *, rows: int, dtype: jnp.dtype) -> LayerKv:
    def one(x: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(x, batch_row, 1, axis=0)
        return _fitted(row, rows, dtype)

    picked: LayerKv = jax.tree.map(one, kv)
    return picked


def _put(buffers: LayerKv, one: LayerKv, batch_row: Array) -> LayerKv:
    def put(buffer: Array, row: Array) -> Array:
        kept: Array = jax.lax.dynamic_update_slice_in_dim(buffer, row, batch_row, axis=0)
        return kept

    joined: LayerKv = jax.tree.map(put, buffers, one)
    return joined


def _shift(buffers: LayerKv, batch_row: Array, tokens: Array) -> LayerKv:
    def shift(buffer: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(buffer, batch_row, 1, axis=0)
        later = jnp.roll(row, -tokens, axis=1)  # what comes round lies past the row's end
        kept: Array = jax.lax.dynamic_update_slice_in_dim(buffer, later, batch_row, axis=0)
        return kept

    shifted: LayerKv = jax.tree.map(shift, buffers)
    return shifted


def _take(kv: LayerKv, batch_rows: Array) -> LayerKv:
    taken: LayerKv = jax.tree.map(lambda x: jnp.take(x, batch_rows, axis=0), kv)
    return taken


def _pick_one(kv: LayerKv, batch_row: Array) -> Array:
    def row(x: Array) -> Array:
        kept: Array = jax.lax.dynamic_index_in_dim(x, batch_row, axis=0, keepdims=False)
        return kept

    return jnp.stack([jnp.stack([row(keys), row(values)]) for keys, values in kv])
