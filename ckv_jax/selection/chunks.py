"""The chunk selectors: what a chunk is worth to a question, by the attention of its queries.

Adding one is a function of this form and `Select(score=...)`; limits, top-k and mass are
`selection.base`'s.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target


class ChunkScore(Protocol):
    """Worth of every chunk to the queries of one layer; higher is better, float32 [B, M]."""

    def __call__(
        self,
        q: Float[Array, "B S H D"],
        probe: Probe,
        *,
        num_tokens: Int32[Array, ""],
        q_lengths: Int32[Array, " B"],
        chunk_tokens: int,
        target: Target,
    ) -> Float32[Array, "B M"]:
        """`q` with RoPE; `probe` has T >= num_tokens keys, or landmarks of so many; query i counts
        if i < q_lengths[b]; `target`: what the call is compiled for."""
        ...


def last_queries(
    hidden: Float[Array, "B S E"],
    positions: Int32[Array, "B S"],
    q_lengths: Int32[Array, " B"],
    window: int | None,
) -> tuple[Float[Array, "B W E"], Int32[Array, "B W"], Int32[Array, " B"]]:
    """The last `window` real tokens of each row, with their positions and how many there are."""
    batch, length, _ = hidden.shape
    if window is None or window >= length:
        return hidden, positions, q_lengths
    steps = jnp.arange(window, dtype=jnp.int32)[None, :]
    rows = jnp.maximum(q_lengths - window, 0)[:, None] + jnp.broadcast_to(steps, (batch, window))
    hidden = jnp.take_along_axis(hidden, rows[:, :, None], axis=1)
    return hidden, jnp.take_along_axis(positions, rows, axis=1), jnp.minimum(q_lengths, window)
