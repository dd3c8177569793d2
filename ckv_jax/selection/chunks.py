"""The chunk selectors: what a chunk is worth to a question, by the attention of its queries.

Adding one is a function of this form and `Select(score=...)`; limits, top-k and mass are
`selection.base`'s.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Int8Keys,
    Keys,
    MeanKeys,
    PqKeys,
    Probe,
    TurnedKeys,
)
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


def float_keys(probe: Probe, dtype: DTypeLike) -> Float32[Array, "T K D"]:
    """The keys that a probe knows, decoded: for a score of one's own, inside a jitted call.

    Keys of "int8" and "int4" come less their head's mean key, which no softmax over them sees.
    `dtype`: the queries', which bit patterns of exact keys are of. Raises `TypeError` for
    landmarks, which have one entry a chunk.
    """
    match probe:
        case Keys(keys):
            if jnp.issubdtype(keys.dtype, jnp.unsignedinteger):
                keys = lax.bitcast_convert_type(keys, dtype)
            return keys.astype(jnp.float32)
        case Int8Keys(codes, scale):
            return codes.astype(jnp.float32) * scale[..., None]
        case Int4Keys(codes, scale):
            nibbles = jnp.concatenate([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
            return (nibbles.astype(jnp.float32) - 8.0) * scale[..., None]
        case PqKeys(codes, books):
            heads, parts = (jnp.arange(size, dtype=jnp.int32) for size in books.shape[:2])
            values = books[heads[:, None], parts[None, :], codes.astype(jnp.int32)]
            return values.reshape(probe.shape).astype(jnp.float32)
        case TurnedKeys(codes, scale, basis):
            turned = codes.astype(jnp.float32) * scale[..., None]
            return jnp.einsum("ktr,kdr->tkd", turned, basis, precision=lax.Precision.HIGHEST)
        case MeanKeys() | BoundKeys():
            raise TypeError(
                f"got {type(probe).__name__}, which has one entry a chunk, expected a key for each "
                "token"
            )


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
