"""The jitted scoring call of decode: scores a prefix's chunks, selects, looks up the window.

One call serves rows of one prefix, or of several prefixes of equal shapes with a row each. The host
reads one small array of what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import bitcast_convert_type
from jax.typing import ArrayLike
from jaxtyping import Float32, Int32

from ckv_jax.decode.window import Keep, StepSelection, WindowArrays, advance
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer
from ckv_jax.model.shardings import BY_NAME, WHOLE, Shardings
from ckv_jax.pipeline.layers import Layers, LayerState
from ckv_jax.selection.base import Rule, rows_of, scored, select_units


class Recent(NamedTuple):
    """Latest selections of a call's R rows, which pass from token to token on the device."""

    scores: Float32[Array, "Q R M"]
    """Scores of the latest Q selections, oldest first."""
    ids: Int32[Array, "R n"]
    """Chunks of the latest one, ascending, -1 past a row's end."""


class Found(NamedTuple):
    """What the R rows of one call selected, on the device; each KV head of a row is a row where
    heads select apart."""

    record: Int32[Array, "R X"]
    """See `Record`."""
    scores: Float32[Array, "R M"]
    """The attention mass of every chunk."""
    window: WindowArrays
    """The windows [B, W] of the batch's rows, [B*K, W] of their heads, after this selection."""
    recent: Recent
    """After this selection."""


class Record(NamedTuple):
    """The part of one call's results that the host reads: views of one array [R, 4n + 1]."""

    ids: Int32[np.ndarray, "R n"]
    """Selected chunks, ascending, -1 past a row's end."""
    slots: Int32[np.ndarray, "R n"]
    """The window slot of each, see `window.Moves`."""
    misses: Int32[np.ndarray, "R n"]
    """The chunk where the window lacked it, else -1."""
    attention: Float32[np.ndarray, "R n"]
    """The attention mass of each selected chunk."""
    mass: Float32[np.ndarray, " R"]
    """The share of the row's attention mass that they hold."""

    @classmethod
    def of(cls, record: Int32[np.ndarray, "R X"]) -> Record:
        """The parts of an array; those of some of its rows where it has only those."""
        n = record.shape[1] // 4
        ids, slots, misses, attention = (record[:, i * n : (i + 1) * n] for i in range(4))
        floats: Any = np.float32
        return cls(ids, slots, misses, attention.view(floats), record[:, -1].view(floats))


Probes = tuple[Probe, ...]
"""What rows score of one prefix, a probe a layer."""


class SelectCall(NamedTuple):
    """Arguments of one period's call that stay the same from token to token."""

    layers: tuple[int, ...]
    """Those that score."""
    states: tuple[LayerState, ...]
    """Of these."""
    rows: Int32[ArrayLike, " R"]
    """Places in the batch, as many of each prefix, one prefix's after the other's."""
    probes: tuple[Probes, ...]
    """Of each prefix."""
    num_tokens: Int32[ArrayLike, " prefixes"]
    num_chunks: Int32[ArrayLike, " prefixes"]
    limits: Int32[ArrayLike, " R"]
    """Chunks that each row selects; a row whose limit is 0 selects nothing, its window stays."""
    rule: Rule
    keep: Keep


class Scoring:
    """The call over the layers of one model."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        made = layers.once(_select_of, layers.layer_of, layers.target, layers.shardings)
        takes = (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME)
        self.function: Callable[..., Found] = layers.split(made, takes, WHOLE)
        """The function that `select` compiles, which other jitted calls trace."""
        self._select = layers.programs.jit(self.function, static=("rule", "keep"))

    def call(
        self,
        layers: Sequence[int],
        rows: np.ndarray,
        probes: Sequence[Probes],
        num_tokens: Sequence[int],
        num_chunks: Sequence[int],
        limits: np.ndarray,
        rule: Rule,
        keep: Keep,
    ) -> SelectCall:
        """A call of these rows by the queries of these layers, see `SelectCall`."""
        return SelectCall(
            layers=tuple(layers),
            states=tuple(self._layers.state(layer) for layer in layers),
            rows=rows,
            probes=tuple(probes),
            num_tokens=np.array(num_tokens, np.int32),
            num_chunks=np.array(num_chunks, np.int32),
            limits=limits,
            rule=rule,
            keep=keep,
        )

    def select(
        self,
        call: SelectCall,
        hidden: Array,
        starts: Int32[ArrayLike, " B"],
        window: WindowArrays,
        step: Int32[ArrayLike, " B"],
        recent: Recent,
    ) -> Found:
        """The best chunks for the rows of a call, given hidden states [B, 1, E] of a batch.

        `starts`: positions of the batch's tokens. `window`: [B, W], W >= `rule.n`, or [B*K, W]
        where heads select apart, a row's heads one after the other, as in `recent`, whose scores
        count as well. `step`: the number of the token for each row that selects now, below 0 for a
        row that keeps its latest selection.
        """
        found: Found = self._select(
            call.states, hidden, call.rows, starts, call.probes, call.num_tokens, call.num_chunks,
            call.limits, window, step, recent, rule=call.rule, keep=call.keep,
        )  # fmt: skip
        return found


def _select_of(
    layer_of: Callable[[LayerState], Layer], target: Target, shardings: Shardings
) -> Callable[..., Found]:
    def select_chunks(
        states: tuple[LayerState, ...], hidden: Array, rows: Array, start: Array,
        probes: tuple[Probes, ...], num_tokens: Array, num_chunks: Array,
        limits: Array, window: WindowArrays, step: Array, recent: Recent, *,
        rule: Rule, keep: Keep,
    ) -> Found:  # fmt: skip
        start, step = start[rows], step[rows]
        now = (step >= 0) & (limits > 0)
        queries = [layer_of(state).query(hidden[rows], start[:, None]) for state in states]
        before = jnp.zeros_like(recent.scores, shape=recent.scores.shape[1:])
        before = sum(recent.scores[1:], before)  # XLA's reduce takes a CPU ten times as long
        own, left, mass = scored(
            queries, probes, rule, num_tokens=num_tokens, num_chunks=num_chunks,
            q_lengths=jnp.ones(rows.shape, jnp.int32), limits=limits, target=target,
            whole=shardings.sum, now=now.reshape(len(probes), -1).any(axis=1), before=before,
        )  # fmt: skip
        scores = own + before
        heads = len(scores) // len(rows)
        batch = hidden.shape[0] * heads
        rows = (rows[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, :]).reshape(-1)
        limits, step, now = (rows_of(each, scores) for each in (limits, step, now))
        found = select_units(
            scores, rule.n, limits, count=rows_of(num_chunks, scores), among=left,
            always=rule.always_kept(scores, probes, num_tokens, num_chunks, limits), mass=mass,
            target=target,
        )  # fmt: skip
        ids = jnp.where(now[:, None], found.ids, recent.ids)
        mine = WindowArrays(*(part[rows] for part in window))
        after, moves = advance(mine, StepSelection(ids, scores), step[:, None], keep, target)
        selects = jnp.where(now, rows, batch)  # the others' stay
        window = WindowArrays(
            *(
                part.at[selects].set(new, mode="drop")
                for part, new in zip(window, after, strict=True)
            )
        )
        floats = jnp.concatenate([found.attention, found.mass[:, None]], axis=1)
        parts = (ids, moves.table, moves.misses)
        latest = jnp.concatenate([recent.scores[1:], own[None]])[: len(recent.scores)]
        return Found(
            record=jnp.concatenate([*parts, bitcast_convert_type(floats, jnp.int32)], axis=1),
            scores=scores if mass is None else mass,
            window=window,
            recent=Recent(jnp.where(now[None, :, None], latest, recent.scores), ids),
        )

    return select_chunks
