"""Scores of all chunks in one stage, or in two: a coarse pass, then what it left, with care.

Inside a jitted call, on each device's own heads. What a coarse pass left is a shorter probe: the
rows of its chunks gathered, which the kernels score like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32

from ckv_jax.kernels_pallas.score import score as kernel
from ckv_jax.kernels_pallas.score.probe import Probe, of_chunks, weights_of
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.selection.base import ChunkScore, choose
from ckv_jax.selection.select import NOTHING, Always, Stages


class Rule(NamedTuple):
    """How chunks are selected: the static part of a jitted call."""

    n: int
    """Chunks that a row selects at most."""
    chunk_tokens: int
    window: int | None = None
    """Only so many last queries score; None: all."""
    peaks: bool = False
    """See `Select.peaks`."""
    score: ChunkScore | None = None
    """A selector's own; None: attention mass, or its peaks."""
    stages: Stages | None = None
    """A coarse pass first; None: one stage."""
    each: bool = False
    """Every KV head selects by its own queries: K rows in place of one, one after the other."""
    always: Always = NOTHING
    """Chunks that are selected in any case."""


class Scored(NamedTuple):
    """Scores of every chunk of a prefix by some queries."""

    scores: Float32[Array, "B M"]
    """What ranks chunks, K rows for each query row where every head has its own; of chunks that a
    coarse pass left out an estimate, by that pass."""
    left: Bool[Array, "B M"] | None
    """Which may be chosen; None: all."""
    mass: Float32[Array, "B M"] | None = None
    """The attention mass of every chunk; None: the scores are it."""


def scored(
    queries: Sequence[Float[Array, "B S H D"]],
    probes: Sequence[Probe],
    rule: Rule,
    *,
    num_tokens: Int32[Array, ""],
    num_chunks: Int32[Array, ""],
    q_lengths: Int32[Array, " B"],
    limits: Int32[Array, " B"],
    target: Target,
    whole: Callable[[Array], Array],
    before: Float32[Array, "B M"] | None = None,
    rough: Probe | None = None,
    always: Callable[[Array, Array], Array | None] = lambda scores, limits: None,
) -> Scored:
    """The sum of what layers say of chunks, whose `queries` and `probes` come one a layer.

    `whole` makes one of sums over each device's heads. `always`: which chunks a coarse pass
    leaves in any case, given scores [B, M] and limits [B]. `before`: scores that count as well for
    what a coarse pass leaves, and are not in the result. `rough`: what a coarse pass scores; None:
    the probe of the middle layer.

    In two stages Equation 1's softmax runs over the chunks that are left. Each KV head's part is
    weighed by the share of its attention that the coarse pass saw on them, and what it saw of the
    others, scaled to as many queries and layers, is their estimate: all masses together are what
    they are in one stage, and shares of them are of all attention.
    """
    peaks, chunk_tokens, stages = rule.peaks, rule.chunk_tokens, rule.stages

    def by_head(
        queries: Sequence[Array], probes: Sequence[Probe], lengths: Array, tokens: Array
    ) -> Array:
        found: Array = jnp.zeros((), jnp.float32)
        for q, probe in zip(queries, probes, strict=True):
            given = kernel(
                q, probe, num_tokens=tokens, q_lengths=lengths, chunk_tokens=chunk_tokens,
                target=target, heads="each", peaks=peaks,
            )  # fmt: skip
            found = found + (given if peaks else given[None])  # [1 or 2, B, K, M]
        return found

    def everything() -> Array:
        """Masses [1, B, M], or with peaks [2, B, M]."""
        return whole(jnp.sum(by_head(queries, probes, q_lengths, num_tokens), axis=2))

    if rule.score is not None:
        own = sum(
            rule.score(
                q, probe, num_tokens=num_tokens, q_lengths=q_lengths, chunk_tokens=chunk_tokens,
                target=target,
            )
            for q, probe in zip(queries, probes, strict=True)
        )  # fmt: skip
        return Scored(whole(jnp.asarray(own)), None, everything()[0])
    if rule.each:
        found = by_head(queries, probes, q_lengths, num_tokens)[0]
        return Scored(found.reshape(-1, found.shape[2]), None)
    if stages is None:
        return _ranked(everything(), None)
    coarse = stages.coarse
    middle = len(probes) // 2
    one = jnp.minimum(q_lengths, 1)
    latest = _latest(queries[middle], q_lengths)
    first = by_head([latest], [probes[middle] if rough is None else rough], one, num_tokens)
    size = max(q.shape[1] for q in queries)
    weight = jnp.sum(weights_of(q_lengths, size, peaks), axis=1)
    first = first * (weight * len(probes))[None, :, None, None]
    estimate = whole(jnp.sum(first, axis=2))  # [1 or 2, B, M]

    left = coarse.left(limits, num_chunks)
    ranked = estimate[-1] if before is None else estimate[-1] + before
    ids = choose(
        ranked, stages.room, left, count=num_chunks, always=always(ranked, limits)
    ).ids  # [B, room], or -1
    real = ids >= 0

    def of_row(ids: Array, count: Array, *queries: Array) -> Array:
        held = jnp.clip(num_tokens - ids * chunk_tokens, 0, chunk_tokens)
        tokens = jnp.sum(jnp.where(ids >= 0, held, 0))
        gathered = [of_chunks(probe, ids, chunk_tokens) for probe in probes]
        found: Array
        found = by_head([q[None] for q in queries], gathered, count[None], tokens)
        return found[:, 0]  # [1 or 2, K, room]

    fine = _each(of_row, ids, q_lengths, *queries)  # [B, 1 or 2, K, room]
    mass = first[0]
    on_them = jnp.take_along_axis(mass, ids[:, None, :], axis=2)
    on_them = jnp.sum(jnp.where(real[:, None, :], on_them, 0.0), axis=2)
    share = on_them / jnp.maximum(jnp.sum(mass, axis=2), jnp.finfo(jnp.float32).tiny)  # [B, K]
    share = jnp.stack([share, jnp.square(share)][: 1 + peaks])  # of a mass, of its square
    decided = whole(jnp.sum(fine.swapaxes(0, 1) * share[..., None], axis=2))  # [1 or 2, B, room]

    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    at = jnp.where(real, ids, estimate.shape[2])
    found = estimate.at[:, rows, at].set(decided, mode="drop")
    decides = jnp.zeros(estimate.shape[1:], bool).at[rows, at].set(True, mode="drop")
    if stages.some_whole:
        one_stage = (left == 0)[:, None]
        found = jnp.where(one_stage[None], everything(), found)
        decides = decides | one_stage
    return _ranked(found, decides)


def _ranked(found: Float32[Array, "P B M"], left: Array | None) -> Scored:
    """Masses alone, or peaks, which rank, behind masses."""
    return Scored(found[-1], left, found[0] if len(found) > 1 else None)


def rows_of(of_row: Array, scores: Float32[Array, "B M"]) -> Array:
    """What belongs to the rows of some queries, [b, ...], for each row of their `scores`."""
    return jnp.repeat(of_row, scores.shape[0] // of_row.shape[0], axis=0)


def _latest(q: Array, q_lengths: Array) -> Array:
    """The last real query of each row of [B, S, H, D]: [B, 1, H, D]."""
    at = jnp.maximum(q_lengths - 1, 0)
    return jnp.take_along_axis(q, at[:, None, None, None], axis=1)


def _each(function: Callable[..., Array], ids: Array, *rows: Array) -> Array:
    """`function` of each row; of several one after the other in a loop, so that it is compiled
    once and every row's gathered probe is in memory alone."""
    if len(ids) == 1:
        return function(*(jnp.squeeze(row, 0) for row in (ids, *rows)))[None]
    out: Array = lax.map(lambda row: function(*row), (ids, *rows))
    return out
