"""The pool of packs as single pages, and the element types that KV is kept in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from ckv_jax.kernels_pallas.target import Target
from ckv_jax.storage.layout import Layout


def storage_dtype(dtype: jnp.dtype, target: Target) -> jnp.dtype:
    """The element type of KV that is updated in place on this target.

    XLA's CPU backend widens 16-bit floats around every update, which copies the whole array:
    a pool of bit patterns stays in place. Measured: 0.06 ms against 166 ms for 16 packs.
    """
    if target.platform == "cpu" and dtype.itemsize == 2:
        return np.dtype(np.uint16)
    return dtype


def slot_shape(layout: Layout) -> tuple[int, int, int, int]:
    """`(pl, 2, C, K*D)`: a pack as the pools keep it, the same bytes as `Layout.pack_shape`.

    With a token's heads in one row no accelerator pads or reorders a slot of few or narrow heads.
    """
    pack, kinds, chunk, heads, dim = layout.pack_shape
    return pack, kinds, chunk, heads * dim


def as_rows(x: Array) -> Array:
    """[..., K, D] to [..., K*D]: a token's heads side by side, as pools and buffers keep them."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def as_bits(x: Array, dtype: jnp.dtype) -> Array:
    """The same bits as elements of `dtype`."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def positions(start: Int32[Array, " B"], length: int) -> Int32[Array, "B S"]:
    """Positions of `length` tokens of each row, from `start[b]` on."""
    steps = jnp.arange(length, dtype=jnp.int32)[None, :]
    batch = start.shape[0]
    return jnp.broadcast_to(start[:, None], (batch, length)) + jnp.broadcast_to(
        steps, (batch, length)
    )


def layer_pages(
    pages: Array, slots: Array, index: Array | int
) -> tuple[Array, tuple[Array, Array]]:
    """The pool as pages of one layer's K or V, and the two tables into it of layer `index` of its
    packs.

    `pages` [slots, pl, 2, C, K*D]; `slots` [..., N], -1 where there is none.
    """
    pool = pages.reshape(-1, *pages.shape[3:])  # [slots * pl * 2, C, K*D]
    keys = jnp.where(slots >= 0, (slots * pages.shape[1] + index) * 2, -1)
    return pool, (keys, jnp.where(slots >= 0, keys + 1, -1))
