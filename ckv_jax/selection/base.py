"""What a chunk is worth to a question, and from scores to a selection: the only top-k, the only
place for limits and for attention mass.

A selector scores units (chunks or tokens); adding one is a function of the form `ChunkScore` and
`Select(score=...)`. Everything after that is here and the same for all. Units that may not be
selected carry -inf; of equal scores the earlier unit wins.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Keys,
    MeanKeys,
    PqKeys,
    Probe,
    TurnedKeys,
)
from ckv_jax.kernels_pallas.target import Target

# -- chunk scores ----------------------------------------------------------------------------------


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

    Keys of "int4" come less their head's mean key, which no softmax over them sees.
    `dtype`: the queries', which bit patterns of exact keys are of. Raises `TypeError` for
    landmarks, which have one entry a chunk.
    """
    match probe:
        case Keys(keys):
            if jnp.issubdtype(keys.dtype, jnp.unsignedinteger):
                keys = lax.bitcast_convert_type(keys, dtype)
            return keys.astype(jnp.float32)
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


# -- selections ------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """What was chosen, on the device."""

    ids: Int32[Array, "B n"]
    """Chosen units, ascending, -1 past a row's limit."""
    attention: Float32[Array, "B n"]
    """The attention mass of each, 0 past the limit."""
    mass: Float32[Array, " B"]
    """The share of the row's attention mass that they hold, of what is not always selected: the
    first chunk alone holds a third of all attention and would hide what is missed."""
    scores: Float32[Array, "B M"]
    """The attention mass of every unit, as given."""

    def parts(self, count: int) -> list[Selection]:
        """On the host, each of `count` choices of every row, which stand one after the other."""
        whole = [np.asarray(part) for part in self]
        return [
            Selection(*(part[i::count] for part in whole))  # type: ignore[arg-type]
            for i in range(count)
        ]


_MARGIN = 1e-5
"""What sums of float32 may be off, as a share: more is chosen rather than less than was asked."""


class Share(NamedTuple):
    """As many units as hold a share of a row's score, see `Budget`."""

    mass: Float32[Array | np.ndarray, " B"]
    """The share; 1 and above: all that the limit allows."""
    least: Int32[Array | np.ndarray, " B"]
    """Units that are chosen in any case."""


def choose(
    scores: Float32[Array, "B M"],
    n: int,
    limits: Int32[Array, " B"],
    *,
    count: Array | None = None,
    among: Bool[Array, "B M"] | None = None,
    share: Share | None = None,
    always: Bool[Array, "B M"] | None = None,
    mass: Float32[Array, "B M"] | None = None,
) -> Selection:
    """The `limits[b]` <= n best of the first `count` units of each row (None: of all), and `among`
    these.

    `mass`: the attention mass of each unit; None: the scores are it. With `share`, only the best of
    those that together hold that share of all mass. What is `always` selected comes before all
    others.
    """
    units = scores.shape[1]
    mass = scores if mass is None else mass
    masked = scores
    if count is not None:
        ids = jnp.arange(units, dtype=jnp.int32)
        masked = jnp.where((ids < count)[None, :], scores, -jnp.inf)
    allowed = masked if among is None else jnp.where(among, masked, -jnp.inf)
    allowed = before_others(allowed, always)
    _, best, chosen = _best(allowed, n, limits)
    held = jnp.where(masked > -jnp.inf, mass, 0.0)
    values = jnp.take_along_axis(held, best, axis=1)
    if share is not None:
        needed = _needed(values, held, share)
        if always is not None:
            needed |= jnp.take_along_axis(always, best, axis=1)
        chosen &= needed
    ids, attention = lax.sort((jnp.where(chosen, best, units), values), num_keys=1)
    taken = ids < units
    ids, attention = jnp.where(taken, ids, -1), jnp.where(taken, attention, 0.0)
    pad = ((0, 0), (0, n - ids.shape[1]))
    counted, covered = jnp.where(mass > -jnp.inf, mass, 0.0), attention
    if always is not None:
        counted = jnp.where(always, 0.0, counted)
        covered = jnp.where(
            jnp.take_along_axis(always, jnp.maximum(ids, 0), axis=1), 0.0, attention
        )
    total = jnp.sum(counted, axis=1)
    covered_share = jnp.sum(covered, axis=1) / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    if always is not None:  # nothing else has any: nothing is missed
        covered_share = jnp.where(total > 0, covered_share, 1.0)
    return Selection(
        ids=jnp.pad(ids, pad, constant_values=-1),
        attention=jnp.pad(attention, pad),
        mass=covered_share,
        scores=mass,
    )


def before_others(ranked: Float32[Array, "B M"], always: Array | None) -> Float32[Array, "B M"]:
    """What ranks units where some, of those that may be chosen, come before all others."""
    if always is None:
        return ranked
    return jnp.where(always & (ranked > -jnp.inf), jnp.inf, ranked)


def _needed(values: Array, mass: Array, share: Share) -> Array:
    """Of the `values` [B, n] of each row's best units, of `mass` [B, M], bool: whether the better
    ones hold less than the share."""
    before = jnp.cumsum(values, axis=1) - values
    total = jnp.sum(mass, axis=1)
    asked = share.mass + _MARGIN
    place = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    short = before < (asked * total)[:, None]
    return short | (asked >= 1)[:, None] | (place < share.least[:, None])


def top_mask(
    scores: Float32[Array, "B T"], n: int, limits: Int32[Array, " B"]
) -> Bool[Array, "B T"]:
    """Which units are among the `limits[b]` <= n best of their row."""
    _, best, chosen = _best(scores, n, limits)
    rows = jnp.broadcast_to(jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None], best.shape)
    return jnp.zeros(scores.shape, bool).at[rows, best].set(chosen)


def share_held(scores: Float32[Array, "B T"], ids: Int32[Array, "B n"]) -> Float32[Array, " B"]:
    """The share of each row's score (-inf counts for nothing) that the units `ids` hold."""
    scores = jnp.where(scores > -jnp.inf, scores, 0.0)
    held = jnp.take_along_axis(scores, ids, axis=1)
    held = jnp.sum(jnp.where(ids >= 0, held, 0.0), axis=1)
    return held / jnp.maximum(jnp.sum(scores, axis=1), jnp.finfo(jnp.float32).tiny)


def chunk_counts(
    ids: Int32[Array, "B n"], *, chunk_tokens: int, chunks: int
) -> Int32[Array, "B M"]:
    """How many of the tokens `ids` (-1: none) lie in each chunk."""

    def of_row(row: Array) -> Array:
        where = jnp.where(row >= 0, row // chunk_tokens, chunks)
        return jnp.zeros((chunks,), jnp.int32).at[where].add(1, mode="drop")

    return jax.vmap(of_row)(ids)


def _best(scores: Array, n: int, limits: Array) -> tuple[Array, Array, Array]:
    """(values, units, chosen) [B, min(n, M)], best first; `chosen` within the limit."""
    values, best = lax.top_k(scores, min(n, scores.shape[1]))
    place = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :]
    return values, best.astype(jnp.int32), (place < limits[:, None]) & (values > -jnp.inf)
