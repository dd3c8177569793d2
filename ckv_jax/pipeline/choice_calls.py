"""The jitted call of decode that scores, chooses and looks up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from ckv_jax.cache.window import Choice, Keep, Moves, advance
from ckv_jax.cache.window import Window as WindowArrays
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer
from ckv_jax.model.shardings import BY_NAME, WHOLE, Shardings
from ckv_jax.pipeline.layers import Layers, LayerState, probe_key
from ckv_jax.reads.resident import Resident
from ckv_jax.selection.base import Selection, before_others, choose
from ckv_jax.selection.sure import sure_chunks
from ckv_jax.selection.two_stages import Rule, Scored, rows_of, scored


class OfPrefix(NamedTuple):
    """A prefix, and what it is scored by."""

    resident: Resident
    probes: Sequence[Probe]
    """One for each layer that scores, of which the scores are summed."""
    rough: Sequence[Probe] = ()
    """See `two_stages`."""

    @property
    def shapes(self) -> tuple[object, ...]:
        """What a program is compiled for: prefixes of equal shapes may be asked in one call."""
        return tuple(map(probe_key, (*self.probes, *self.rough)))


class Chosen(NamedTuple):
    """What the R rows of one call chose, on the device; each KV head of a row is a row where heads
    choose for themselves."""

    selection: Selection
    near: Array
    """int32 [R, <= n]: what nearly was chosen, best first, -1 elsewhere."""
    moves: Moves
    own: Float32[Array, "R M"]
    """What the tokens themselves give every chunk."""
    window: WindowArrays
    """The windows [B, W] of all rows of the batch, [B*K, W] of their heads, after this choice."""


class ChoiceCalls:
    """The jitted call that scores, chooses and looks up, over the layers of one model."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        anew = layers.once(_choose_of, layers.layer_of, layers.target, layers.shardings)
        takes = (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME)
        self._choose = layers.programs.jit(
            layers.split(anew, takes, WHOLE),
            static=("rule", "keep"),
        )

    def choose(
        self,
        layers: Sequence[int],
        hidden: Array,
        rows: Int32[np.ndarray, " R"],
        start: Int32[np.ndarray, " R"],
        of: Sequence[OfPrefix],
        limits: Int32[np.ndarray, " R"],
        near: Int32[np.ndarray, " R"],
        window: WindowArrays,
        step: int,
        before: Float32[np.ndarray, "R M"],
        rule: Rule,
        keep: Keep,
    ) -> Chosen:
        """The `limits[i]` best chunks for each of `rows` of hidden [B, 1, E].

        As many of the rows, one after the other, stand on each of the prefixes `of`, which are of
        equal shapes. `start`: positions of the rows' tokens; a row whose limit is 0 chooses
        nothing, and its window stays. `near[i]` <= `rule.n`: how many of the best are chosen or
        near misses. `window`: [B, W], W >= `rule.n`; `before`: scores of earlier tokens, which
        count as well. Where every KV head selects for itself `window` is [B*K, W] and `before`
        [R*K, M], a row's heads one after the other.
        """
        slots = window.chunk.shape
        shapes = of[0].shapes
        key = (hidden.shape, len(rows), len(of), shapes, slots, rule, keep)
        found: Chosen = self._choose(
            key, tuple(self._layers.state(layer) for layer in layers), hidden, rows, start,
            tuple((tuple(one.probes), tuple(one.rough)) for one in of),
            np.array([one.resident.prefix.num_tokens for one in of], np.int32),
            np.array([one.resident.num_chunks for one in of], np.int32),
            limits, near, window, np.int32(step), before, rule=rule, keep=keep,
        )  # fmt: skip
        return found


_Probes = tuple[tuple[Probe, ...], tuple[Probe, ...]]
"""What a prefix is scored by, and what its coarse pass scores."""


def _choose_of(
    layer_of: Callable[[LayerState], Layer], target: Target, shardings: Shardings
) -> Callable[..., Chosen]:
    def choose_anew(
        states: tuple[LayerState, ...], hidden: Array, rows: Array, start: Array,
        probes: tuple[_Probes, ...], num_tokens: Array, num_chunks: Array,
        limits: Array, near: Array, window: WindowArrays, step: Array, before: Array, *,
        rule: Rule, keep: Keep,
    ) -> Chosen:  # fmt: skip
        queries = [layer_of(state).query(hidden[rows], start[:, None]) for state in states]
        size = len(rows) // len(probes)  # of each prefix

        def scorer(prefix: int) -> Callable[[], Scored]:
            mine = slice(prefix * size, (prefix + 1) * size)
            return lambda: scored(
                [q[mine] for q in queries], probes[prefix][0], rule,
                num_tokens=num_tokens[prefix], num_chunks=num_chunks[prefix],
                q_lengths=jnp.ones((size,), jnp.int32), limits=limits[mine], target=target,
                whole=shardings.sum, before=before[mine], rough=probes[prefix][1],
                sure=lambda scores: sure_chunks(
                    rule.zones, scores, probes[prefix][0][:1], num_tokens[prefix],
                    num_chunks[prefix], rule.chunk_tokens,
                ),
            )  # fmt: skip

        own, left, mass = _each_prefix([scorer(prefix) for prefix in range(len(probes))], target)
        scores = own + before
        count = rows_of(num_chunks, scores)  # [R]
        heads = len(scores) // len(rows)
        batch = hidden.shape[0] * heads
        rows = (rows[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, :]).reshape(-1)
        limits, near = rows_of(limits, scores), rows_of(near, scores)
        chunks = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
        allowed = jnp.where(chunks < count[:, None], scores, -jnp.inf)
        of_layer = [mine[0][0] for mine in probes]
        of_row = rows_of(num_tokens, scores)
        sure = sure_chunks(rule.zones, scores, of_layer, of_row, count, rule.chunk_tokens)
        selection = choose(allowed, rule.n, limits, among=left, sure=sure, mass=mass)
        if mass is None:
            selection = selection._replace(scores=scores)
        mine = WindowArrays(*(part[rows] for part in window))
        after, moves = advance(mine, Choice(selection.ids, scores), step, keep)
        chose = jnp.where(limits > 0, rows, batch)  # the others' stay
        window = WindowArrays(
            *(part.at[chose].set(new, mode="drop") for part, new in zip(window, after, strict=True))
        )
        ranked = allowed if left is None else jnp.where(left, allowed, -jnp.inf)
        missed = _near_misses(before_others(ranked, sure), rule.n, limits, near)
        return Chosen(selection, missed, moves, own, window)

    return choose_anew


def _each_prefix(scorers: Sequence[Callable[[], Scored]], target: Target) -> Scored:
    """What each prefix's rows say of its chunks, one prefix's after the other's."""
    if len(scorers) == 1:
        return scorers[0]()
    if target.in_host_memory:
        # In a loop, what one needs is let go before the next, and a CPU takes less than half the
        # time. A GPU would ask the host at every turn of it which prefix is next.
        places = jnp.arange(len(scorers), dtype=jnp.int32)
        found = jax.lax.map(lambda place: jax.lax.switch(place, scorers), places)
        return jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), found)  # type: ignore[no-any-return]
    parts = [scorer() for scorer in scorers]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)  # type: ignore[no-any-return]


def _near_misses(ranked: Array, n: int, limits: Array, near: Array) -> Array:
    """The chunks of ranks `limits[b]` to `near[b]` of each row, -1 elsewhere: int32 [B, <= n]."""
    values, best = jax.lax.top_k(ranked, min(n, ranked.shape[1]))
    rank = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :]
    missed = (rank >= limits[:, None]) & (rank < near[:, None]) & (values > -jnp.inf)
    return jnp.where(missed, best.astype(jnp.int32), -1)
