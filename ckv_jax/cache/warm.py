"""What a decode begins with: the chunks that the prompt's last queries attend to (KVDrive §7.1).

The scores are those of any probe for the last `OBSERVED` queries of a suffix, summed over the
layers that share a window: the best fill the window, the next ones host memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ckv_jax.cache.window import CLOSED, FREE, Window

__all__ = ["OBSERVED", "ranking", "warmed"]

OBSERVED = 32
"""Queries at a suffix's end that tell what its continuation will want; the paper has 16 to 64."""


@jax.jit
def ranking(scores: Float32[Array, "R M"], num_chunks: Int32[Array, " R"]) -> Int32[Array, "R M"]:
    """The first `num_chunks[r]` chunks of each row, best first, then -1; ties by id."""
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
    held = ids < num_chunks[:, None]
    order = jnp.argsort(jnp.where(held, -scores, jnp.inf), axis=1).astype(jnp.int32)
    return jnp.where(held, order, -1)


@jax.jit
def warmed(window: Window, order: Int32[Array, "R M"]) -> Window:
    """An empty window filled with the first of `order`, slot by slot; all of them are to be
    fetched. To LRU and LFU they are of less worth than anything chosen since, the last of `order`
    of the least.

    A row's ranks from its width on (`ranking`) are what host memory gets.
    """
    count = min(window.chunk.shape[1], order.shape[1])
    first = jnp.where(order[:, :count] < 0, FREE, order[:, :count])
    chunk = window.chunk.at[:, :count].set(first)
    chunk = jnp.where(window.chunk == CLOSED, CLOSED, chunk)
    slot = jnp.arange(chunk.shape[1], dtype=jnp.int32)[None, :]
    return window._replace(chunk=chunk, last=jnp.where(chunk < 0, -1, -1 - slot))
