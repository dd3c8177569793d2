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
from ckv_jax.model.shardings import BY_NAME, HEADS, WHOLE, Shardings
from ckv_jax.pipeline.layers import Layers, LayerState, probe_key
from ckv_jax.reads.residents import Resident
from ckv_jax.selection.base import Selection, choose, pooled
from ckv_jax.selection.chunks import ChunkScore
from ckv_jax.selection.coarse import Stages
from ckv_jax.selection.select import Pool
from ckv_jax.selection.two_stages import scored


class Chosen(NamedTuple):
    """What one call chose for the rows of one prefix, on the device."""

    selection: Selection
    near: Array
    """int32 [b, <= n]: what nearly was chosen, best first, -1 elsewhere."""
    moves: Moves
    window: WindowArrays
    own: Float32[Array, "b M"]
    """What the tokens themselves give every chunk."""

    def near_misses(self) -> np.ndarray:
        """What the rows nearly chose and none of them did, int64 [n]; waits for it."""
        return np.setdiff1d(chunks_of(np.asarray(self.near)), np.asarray(self.selection.ids))

    def guess(self) -> np.ndarray:
        """What the rows chose or nearly chose, int64 [n]; waits for it."""
        return chunks_of([np.asarray(self.selection.ids).ravel(), np.asarray(self.near).ravel()])


def chunks_of(rows: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """All chunk ids of some rows, each once, ascending, int64 [n]; -1 is none."""
    ids = np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))
    kept: np.ndarray = ids[ids >= 0]
    return kept


class ChoiceCalls:
    """The jitted call that scores, chooses and looks up, over the layers of one model."""

    def __init__(self, layers: Layers) -> None:
        self.peers = layers.peers
        self._layers = layers
        anew = layers.once(_choose_of, layers.layer_of, layers.target, layers.shardings)
        takes = (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME)
        self._choose = layers.programs.jit(
            layers.split(anew, takes, WHOLE),
            static=("score", "keep", "n", "chunk_tokens", "stages", "pool"),
        )
        asking = layers.once(_queries_of, layers.layer_of)
        self._queries = layers.programs.jit(layers.split(asking, (BY_NAME,), HEADS))

    def queries(
        self,
        layers: Sequence[int],
        hidden: Array,
        rows: Int32[np.ndarray, " b"],
        start: Int32[np.ndarray, " b"],
    ) -> Float32[np.ndarray, "b n H D"]:
        """What each of n layers would ask for `rows` of hidden [B, 1, E], at positions `start`."""
        states = tuple(self._layers.state(layer) for layer in layers)
        key = (len(layers), hidden.shape, len(rows))
        found = self._queries(key, states, hidden, rows, start)
        return np.asarray(self._layers.shardings.gathered(found))

    def choose(
        self,
        layers: Sequence[int],
        hidden: Array,
        rows: Int32[np.ndarray, " b"],
        start: Int32[np.ndarray, " b"],
        probes: Sequence[Probe],
        resident: Resident,
        limits: Int32[np.ndarray, " b"],
        near: Int32[np.ndarray, " b"],
        window: WindowArrays,
        step: int,
        before: Float32[np.ndarray, "b M"],
        *,
        score: ChunkScore,
        keep: Keep,
        n: int,
        stages: Stages | None = None,
        rough: Sequence[Probe] = (),
        pool: Pool = "none",
    ) -> Chosen:
        """The `limits[i]` <= n best chunks of one prefix for each of `rows` of hidden [B, 1, E].

        `start`: positions of their tokens; a row whose limit is 0 chooses nothing, and its window
        stays. `near[i]` <= n: how many of the best are chosen or near misses. `probes`: one a
        layer, whose scores are summed; `window`: [b, W], W >= n; `before`: scores of earlier
        tokens, which count as well; `stages`, `rough`: see `two_stages`; `pool`: see `base.pooled`.
        """
        shapes = tuple(map(probe_key, (*probes, *rough)))
        slots = window.chunk.shape[1]
        key = (hidden.shape, len(rows), shapes, slots, score, keep, n, stages, pool)
        found: Chosen = self._choose(
            key, tuple(self._layers.state(layer) for layer in layers), hidden, rows, start,
            (tuple(probes), tuple(rough)), np.int32(resident.prefix.num_tokens),
            np.int32(resident.num_chunks), limits, near, window, np.int32(step), before,
            score=score, keep=keep, n=n, chunk_tokens=resident.prefix.layout.chunk_tokens,
            stages=stages, pool=pool,
        )  # fmt: skip
        return found


def _choose_of(
    layer_of: Callable[[LayerState], Layer], target: Target, shardings: Shardings
) -> Callable[..., Chosen]:
    def choose_anew(
        states: tuple[LayerState, ...], hidden: Array, rows: Array, start: Array,
        probes: tuple[tuple[Probe, ...], tuple[Probe, ...]], num_tokens: Array, num_chunks: Array,
        limits: Array, near: Array, window: WindowArrays, step: Array, before: Array, *,
        score: ChunkScore, keep: Keep, n: int, chunk_tokens: int, stages: Stages | None, pool: Pool,
    ) -> Chosen:  # fmt: skip
        one = jnp.ones(rows.shape, jnp.int32)
        own, left = scored(
            [layer_of(state).query(hidden[rows], start[:, None]) for state in states], probes[0],
            score=score, stages=stages, num_tokens=num_tokens, num_chunks=num_chunks,
            q_lengths=one, limits=limits, chunk_tokens=chunk_tokens, target=target,
            whole=shardings.sum, before=before, rough=probes[1], pool=pool,
        )  # fmt: skip
        scores = own + before
        selection = choose(scores, n, limits, count=num_chunks, among=left, pool=pool)
        after, moves = advance(window, Choice(selection.ids, scores), step, keep)
        chunks = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
        ranked = pooled(jnp.where(chunks < num_chunks, scores, -jnp.inf), pool)
        ranked = ranked if left is None else jnp.where(left, ranked, -jnp.inf)
        missed = _near_misses(ranked, n, limits, near)
        return Chosen(selection, missed, moves, after, own)

    return choose_anew


def _queries_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., Array]:
    def queries(states: tuple[LayerState, ...], hidden: Array, rows: Array, start: Array) -> Array:
        mine = hidden[rows]
        asked = [layer_of(state).query(mine, start[:, None]) for state in states]
        found: Array = jnp.concatenate(asked, axis=1).astype(jnp.float32)
        return found

    return queries


def _near_misses(ranked: Array, n: int, limits: Array, near: Array) -> Array:
    """The chunks of ranks `limits[b]` to `near[b]` of each row, -1 elsewhere: int32 [B, <= n]."""
    values, best = jax.lax.top_k(ranked, min(n, ranked.shape[1]))
    rank = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :]
    missed = (rank >= limits[:, None]) & (rank < near[:, None]) & (values > -jnp.inf)
    return jnp.where(missed, best.astype(jnp.int32), -1)
