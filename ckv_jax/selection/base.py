"""Scores of chunks, and the selection from scores: the only top-k, and the only place for limits
and attention mass.

A selector scores units (chunks or tokens); adding one is a function of the form `ChunkScore` and
`Select(score=...)`. Everything after that is here and the same for all. Units that may not be
selected carry -inf; of equal scores the earlier unit wins.

The core scores chunks in one stage, or in two: a coarse pass over all of them, then all queries
over those that it left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from ckv_jax.kernels_pallas.score import best as best_of
from ckv_jax.kernels_pallas.score import score as kernel
from ckv_jax.kernels_pallas.score.probe import (
    Int4Keys,
    Keys,
    PqKeys,
    Probe,
    as_heads,
    of_chunks,
    weights_of,
)
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.selection.select import NOTHING, Always, Stages

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


def float_keys(probe: Probe, dtype: DTypeLike) -> Float32[Array, "T K D"]:
    """Decodes the keys of a probe, float32 [T, K, D], for your own score inside a jitted call.

    Keys of "int4" are relative to the mean key of their head, which does not change a softmax over
    them. `dtype`: the queries' element type, in which exact keys are stored as bit patterns. Raises
    `TypeError` for landmarks, which have one entry per chunk.
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
        case _:
            raise TypeError(
                f"got {type(probe).__name__}, which has one entry per chunk, expected one key per "
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
    """One selection, on the device."""

    ids: Int32[Array, "B n"]
    """Selected units, ascending, -1 past a row's limit."""
    attention: Float32[Array, "B n"]
    """The attention mass of each, 0 past the limit."""
    mass: Float32[Array, " B"]
    """The share of the row's attention mass that they hold, of what is not always selected: the
    first chunk alone holds a third of all attention and would hide what is missed."""
    scores: Float32[Array, "B M"]
    """The attention mass of every unit, as given."""


_MARGIN = 1e-5
"""Relative error of float32 sums: rather more is selected than requested, never less."""


class Share(NamedTuple):
    """As many units as hold a share of a row's attention mass, see `Budget`."""

    mass: Float32[Array | np.ndarray, " B"]
    """The share, of what is not always selected; 1 and above: all that the limit allows."""
    least: Int32[Array | np.ndarray, " B"]
    """The fewest units that are selected, those included that always are."""


def select_units(
    scores: Float32[Array, "B M"],
    n: int,
    limits: Int32[Array, " B"],
    *,
    count: Array | None = None,
    among: Bool[Array, "B M"] | None = None,
    share: Share | None = None,
    always: Bool[Array, "B M"] | None = None,
    mass: Float32[Array, "B M"] | None = None,
    target: Target | None = None,
) -> Selection:
    """The `limits[b]` <= n best of the first `count` units of each row, int32 [B] or [] (None: of
    all), and `among` these.

    `mass`: the attention mass of each unit; None: the scores are it. What is `always` selected
    comes before all others. With `share`, only the best of the others that together hold that
    share of the others' mass. `target`: what the call is compiled for; None: any device.
    """
    units = scores.shape[1]
    mass = scores if mass is None else mass
    masked = scores
    if count is not None:
        ids = jnp.arange(units, dtype=jnp.int32)[None, :]
        masked = jnp.where(ids < count.reshape(-1, 1), scores, -jnp.inf)
    allowed = masked if among is None else jnp.where(among, masked, -jnp.inf)
    allowed = before_others(allowed, always)
    best, selected = _best(allowed, n, limits, target)
    held = jnp.where(masked > -jnp.inf, mass, 0.0)
    values = jnp.take_along_axis(held, best, axis=1)
    if share is not None:
        if always is None:
            needed = _needed(values, held, share)
        else:
            kept = jnp.take_along_axis(always, best, axis=1)
            others = jnp.where(kept, 0.0, values), jnp.where(always, 0.0, held)
            needed = kept | _needed(*others, share)
        selected &= needed
    ids, attention = lax.sort((jnp.where(selected, best, units), values), num_keys=1)
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
    """Ranks units so that some of those that may be selected come before all others."""
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
    """Returns a mask of the units among the `limits[b]` <= n best of their row."""
    best, selected = _best(scores, n, limits)
    rows = jnp.broadcast_to(jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None], best.shape)
    return jnp.zeros(scores.shape, bool).at[rows, best].set(selected)


def chunk_counts(
    ids: Int32[Array, "B n"], *, chunk_tokens: int, chunks: int
) -> Int32[Array, "B M"]:
    """Counts the tokens `ids` (-1: none) of each chunk."""

    def of_row(row: Array) -> Array:
        where = jnp.where(row >= 0, row // chunk_tokens, chunks)
        return jnp.zeros((chunks,), jnp.int32).at[where].add(1, mode="drop")

    return jax.vmap(of_row)(ids)


def _best(
    scores: Array, n: int, limits: Array, target: Target | None = None
) -> tuple[Array, Array]:
    """(units, selected) [B, min(n, M)], best first; `selected` within the limit."""
    values, best = best_of(scores, min(n, scores.shape[1]), target=target)
    place = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :]
    return best.astype(jnp.int32), (place < limits[:, None]) & (values > -jnp.inf)


# -- scores in one stage, or in two ----------------------------------------------------------------


class Rule(NamedTuple):
    """Static arguments of a selection in a jitted call."""

    n: int
    """Chunks that a row selects at most."""
    chunk_tokens: int
    window: int | None = None
    """Number of last queries that score; None: all."""
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

    def always_kept(
        self, scores: Float32[Array, "R M"], probes: Sequence[Sequence[Probe]],
        num_tokens: Int32[Array, " prefixes"], num_chunks: Int32[Array, " prefixes"],
        limits: Int32[Array, " R"],
    ) -> Bool[Array, "R M"] | None:  # fmt: skip
        """Returns a mask of the chunks that rows select in any case, see `Always.chunks`."""
        return self.always.chunks(
            scores, [mine[0] for mine in probes], rows_of(num_tokens, scores),
            rows_of(num_chunks, scores), limits, self.chunk_tokens,
        )  # fmt: skip


class Scored(NamedTuple):
    """Scores of every chunk of a prefix by some queries."""

    scores: Float32[Array, "B M"]
    """What ranks chunks, K rows for each query row where every head has its own; of chunks that a
    coarse pass left out an estimate, by that pass."""
    left: Bool[Array, "B M"] | None
    """Mask of units that may be selected; None: all."""
    mass: Float32[Array, "B M"] | None = None
    """The attention mass of every chunk; None: the scores are it."""


def scored(
    queries: Sequence[Float[Array, "B S H D"]],
    probes: Sequence[Sequence[Probe]],
    rule: Rule,
    *,
    num_tokens: Int32[Array, " prefixes"],
    num_chunks: Int32[Array, " prefixes"],
    q_lengths: Int32[Array, " B"],
    limits: Int32[Array, " B"],
    target: Target,
    whole: Callable[[Array], Array],
    now: Bool[Array, " prefixes"] | None = None,
    before: Float32[Array, "B M"] | None = None,
) -> Scored:
    """The sum of what layers say of chunks, whose `queries` and `probes` come one a layer.

    `probes`: of each prefix; each has equally many rows, one prefix's after the other's. `whole`
    makes one of sums over each device's heads. `now`: prefixes that are scored, None: all; what is
    said of the others has no meaning. `limits`: chunks that each row selects. `before`: scores that
    count as well for what a coarse pass leaves, and are not in the result.

    In two stages Equation 1's softmax runs over the chunks that are left. Each KV head's part is
    weighed by the share of its attention that the coarse pass saw on them, and what it saw of the
    others, scaled to as many queries and layers, is their estimate: all masses together are what
    they are in one stage, and shares of them are of all attention.
    """
    peaks, chunk_tokens, stages = rule.peaks, rule.chunk_tokens, rule.stages
    size, rest = divmod(len(limits), len(probes))
    assert not rest
    if len(probes) == 1 or not target.in_host_memory:
        now = None  # a GPU would ask its host

    def of_each(function: Callable[[int, slice], Array], axis: int) -> Array:
        """What a function says of each prefix and its rows, which stand along `axis`."""
        found: list[Array] = []
        for prefix in range(len(probes)):
            run = partial(function, prefix, slice(prefix * size, (prefix + 1) * size))
            if now is None:
                found.append(run())
                continue
            like = found[0] if found else jax.eval_shape(run)
            nothing = partial(jnp.zeros, like.shape, like.dtype)
            found.append(lax.cond(now[prefix], run, nothing))
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis)

    def by_head(
        queries: Sequence[Array], probes: Sequence[Probe], lengths: Array, tokens: Array,
        ids: Array | None = None,
    ) -> Array:  # fmt: skip
        found: Array = jnp.zeros((), jnp.float32)
        layers = len(queries)
        if target.platform == "gpu" and layers > 1:
            if ids is not None:
                few = [of_chunks(probe, ids, chunk_tokens) for probe in probes]
                probes, ids = few, None
            if one := as_heads(probes):
                queries, probes = [jnp.concatenate(queries, axis=2)], [one]
        for q, probe in zip(queries, probes, strict=True):
            given = kernel(
                q, probe, num_tokens=tokens, q_lengths=lengths, chunk_tokens=chunk_tokens,
                target=target, peaks=peaks, chunk_ids=ids,
            )  # fmt: skip
            given = given if peaks else given[None]  # [1 or 2, B, K, M]
            if len(queries) < layers:
                given = given.reshape(*given.shape[:2], layers, -1, given.shape[3]).sum(axis=2)
            found = found + given
        return found

    def everything(prefix: int, mine: slice) -> Array:
        own = [q[mine] for q in queries]
        return by_head(own, probes[prefix], q_lengths[mine], num_tokens[prefix])

    def masses() -> Array:
        """[1, B, M], or with peaks [2, B, M]."""
        return whole(jnp.sum(of_each(everything, 1), axis=2))

    if (own_score := rule.score) is not None:

        def worth(prefix: int, mine: slice) -> Array:
            own = sum(
                own_score(
                    q[mine], probe, num_tokens=num_tokens[prefix], q_lengths=q_lengths[mine],
                    chunk_tokens=chunk_tokens, target=target,
                )
                for q, probe in zip(queries, probes[prefix], strict=True)
            )  # fmt: skip
            return jnp.asarray(own)

        return Scored(whole(of_each(worth, 0)), None, masses()[0])
    if rule.each:
        found = of_each(everything, 1)[0]
        return Scored(found.reshape(-1, found.shape[2]), None)
    if stages is None:
        return _ranked(masses(), None)
    coarse = stages.coarse
    middle = len(queries) // 2
    one = jnp.minimum(q_lengths, 1)
    latest = _latest(queries[middle], q_lengths)

    def roughly(prefix: int, mine: slice) -> Array:
        return by_head([latest[mine]], [probes[prefix][middle]], one[mine], num_tokens[prefix])

    first = of_each(roughly, 1)
    most = max(q.shape[1] for q in queries)
    weight = jnp.sum(weights_of(q_lengths, most, peaks), axis=1)
    first = first * (weight * len(queries))[None, :, None, None]
    estimate = whole(jnp.sum(first, axis=2))  # [1 or 2, B, M]

    ranked = estimate[-1] if before is None else estimate[-1] + before
    left = coarse.left(limits, rows_of(num_chunks, ranked))
    ids = select_units(
        ranked, stages.room, left, count=rows_of(num_chunks, ranked),
        always=rule.always_kept(ranked, probes, num_tokens, num_chunks, limits), target=target,
    ).ids  # [B, room], or -1  # fmt: skip
    real = ids >= 0
    held = jnp.clip(rows_of(num_tokens, ids)[:, None] - ids * chunk_tokens, 0, chunk_tokens)
    held = jnp.sum(jnp.where(real, held, 0), axis=1)  # tokens of them

    def exactly(prefix: int, mine: slice) -> Array:
        def of_row(ids: Array, tokens: Array, count: Array, *queries: Array) -> Array:
            own = [q[None] for q in queries]
            return by_head(own, probes[prefix], count[None], tokens, ids)[:, 0]

        rows = [part[mine] for part in (ids, held, q_lengths, *queries)]
        return _each(of_row, *rows)  # [b, 1 or 2, K, room]

    fine = of_each(exactly, 0)
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
        found = jnp.where(one_stage[None], masses(), found)
        decides = decides | one_stage
    return _ranked(found, decides)


def _ranked(found: Float32[Array, "P B M"], left: Array | None) -> Scored:
    """Masses alone, or peaks, which rank, behind masses."""
    return Scored(found[-1], left, found[0] if len(found) > 1 else None)


def rows_of(of_row: Array, scores: Shaped[Array, "B M"]) -> Array:
    """What belongs to the rows of some queries, or to prefixes with equally many, [b, ...], for
    each row of their `scores`."""
    return jnp.repeat(of_row, scores.shape[0] // of_row.shape[0], axis=0)


def _latest(q: Array, q_lengths: Array) -> Array:
    """The last real query of each row of [B, S, H, D]: [B, 1, H, D]."""
    at = jnp.maximum(q_lengths - 1, 0)
    return jnp.take_along_axis(q, at[:, None, None, None], axis=1)


def _each(function: Callable[..., Array], ids: Array, *rows: Array) -> Array:
    """`function` of each row; of several one after the other in a loop, so that it is compiled
    once and at most one row's copy of a probe is in memory."""
    if len(ids) == 1:
        return function(*(jnp.squeeze(row, 0) for row in (ids, *rows)))[None]
    out: Array = lax.map(lambda row: function(*row), (ids, *rows))
    return out
