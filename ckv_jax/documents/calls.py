"""The jitted calls over several documents: select, bring in, advance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from ckv_jax.kernels_pallas.attend.reference import attend_upto
from ckv_jax.kernels_pallas.score.probe import Landmarks, Probe
from ckv_jax.kernels_pallas.score.reference import score_together
from ckv_jax.model.decoder import Layer
from ckv_jax.model.rope import apply_rope
from ckv_jax.model.shardings import BY_NAME, HEADS, PAGES, WHOLE, Shardings
from ckv_jax.pipeline.layers import LayerKv, Layers, LayerState, Pages, probe_key
from ckv_jax.prefix.pools import as_bits, as_rows, positions
from ckv_jax.selection.base import Selection, Share, choose
from ckv_jax.selection.chunks import last_queries


class DocumentCalls:
    """Over the layers of one model; all engines over it share what is compiled."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        jit, split, once = layers.programs.jit, layers.split, layers.once
        selected = once(_select_of, layers.layer_of, layers.shardings)
        self._select = jit(
            split(selected, (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME), WHOLE),
            static=("n", "window", "chunk_tokens"),
        )
        bring = once(_bring_of, layers.dtype, layers.config.head_dim)
        self._bring = jit(split(bring, (HEADS, PAGES), HEADS), donate=("buffers",))
        advance = once(_advance_of, layers.layer_of)
        self._advance = jit(
            split(advance, (BY_NAME, WHOLE, WHOLE, WHOLE, HEADS), (WHOLE, HEADS)),
            static=("context",), donate=("buffers",),
        )  # fmt: skip

    def buffers(self, layers: range, rows: int) -> LayerKv:
        """Zeros for each layer's (K, V) [1, R, K*D] of several documents."""
        config = self._layers.config
        shape = (1, rows, config.num_kv_heads * config.head_dim)

        def zeros() -> Array:
            made: Array = self._layers.shardings.put(jnp.zeros(shape, self._layers.kv_dtype), HEADS)
            return made

        return tuple((zeros(), zeros()) for _ in layers)

    def select(
        self,
        layers: Sequence[int],
        hidden: Float[Array, "1 S E"],
        start: int,
        length: int,
        offsets: np.ndarray,
        probes: Sequence[Sequence[Probe]],
        num_tokens: Sequence[int],
        num_chunks: Sequence[int],
        limit: int,
        share: Share,
        *,
        n: int,
        window: int | None,
        chunk_tokens: int,
    ) -> Selection:
        """The best chunks of all documents for a question of `length` tokens at position `start`.

        `probes[i]`: of document i, one for each layer, whose scores are summed. Chunks are numbered
        document after document as the probes are long.
        """
        shapes = tuple(probe_key(p) for one in probes for p in one)
        key = (len(layers), hidden.shape, shapes, n, window, chunk_tokens)
        found: Selection = self._select(
            key, tuple(self._layers.state(layer) for layer in layers), hidden,
            np.array([start], np.int32), np.array([length], np.int32),
            tuple(map(tuple, probes)), offsets.astype(np.int32),
            np.array(num_tokens, np.int32), np.array(num_chunks, np.int32),
            np.array([limit], np.int32), share, n=n, window=window, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return found

    def bring(
        self,
        buffers: LayerKv,
        pages: Pages,
        slots: Int32[np.ndarray, "P R"],
        within: Int32[np.ndarray, " R"],
        tables: tuple[Float32[np.ndarray, "n D"], Float32[np.ndarray, "n D"]],
        document: Int32[np.ndarray, " R"],
    ) -> LayerKv:
        """(Donated) buffers with tokens out of the pool, keys rotated to their places.

        Row r gets the token `within[r]` of the packs in `slots[:, r]`, rotated by row
        `document[r]` of `tables`; where the slot is -1 it stays as it is.
        """
        key = (len(buffers), buffers[0][0].shape, pages.shape, slots.shape, tables[0].shape)
        out: LayerKv = self._bring(key, buffers, pages, slots, within, tables, document)
        return out

    def advance(
        self,
        layers: range,
        hidden: Float[Array, "1 S E"],
        at: Int32[np.ndarray, " S"],
        rows: Int32[np.ndarray, " S"],
        buffers: LayerKv,
        *,
        context: int,
    ) -> tuple[Float[Array, "1 S E"], LayerKv]:
        """`layers` over tokens at positions `at`, which get `rows` of the (donated) buffers.

        A token attends to the rows up to its own, of the first `context`, so rows are in order of
        position; a row past the buffers' end is no token's.
        """
        key = (len(layers), hidden.shape, buffers[0][0].shape, context)
        states = tuple(self._layers.state(layer) for layer in layers)
        out, kept = self._advance(key, states, hidden, at, rows, buffers, context=context)
        return out, kept


def _select_of(
    layer_of: Callable[[LayerState], Layer], shardings: Shardings
) -> Callable[..., Selection]:
    def select_together(
        states: tuple[LayerState, ...], hidden: Array, start: Array, length: Array,
        probes: tuple[tuple[Probe, ...], ...], offsets: Array, num_tokens: Array,
        num_chunks: Array, limits: Array, share: Share, *, n: int, window: int | None,
        chunk_tokens: int,
    ) -> Selection:  # fmt: skip
        hidden, at, lengths = last_queries(
            hidden, positions(start, hidden.shape[1]), length, window
        )
        scores: Array = jnp.zeros((), jnp.float32)
        for index, state in enumerate(states):
            layer = layer_of(state)
            scores = scores + score_together(
                [layer.query(hidden, at - offsets[document]) for document in range(len(probes))],
                [mine[index] for mine in probes],
                num_tokens=num_tokens, q_length=lengths[0], chunk_tokens=chunk_tokens,
            )  # fmt: skip
        scores = shardings.sum(scores)
        held = []
        for document, mine in enumerate(probes):
            units = _chunks(mine[0], chunk_tokens)
            held.append(jnp.arange(units, dtype=jnp.int32) < num_chunks[document])
        scores = jnp.where(jnp.concatenate(held)[None], scores, -jnp.inf)
        return choose(scores, n, limits, share=share)

    return select_together


def _chunks(probe: Probe, chunk_tokens: int) -> int:
    return probe.shape[0] // (1 if isinstance(probe, Landmarks) else chunk_tokens)


def _bring_of(dtype: jnp.dtype, dim: int) -> Callable[..., LayerKv]:
    def bring(
        buffers: LayerKv, pages: Array, slots: Array, within: Array,
        tables: tuple[Array, Array], document: Array,
    ) -> LayerKv:  # fmt: skip
        _, pack, _, chunk, width = pages.shape
        flat = pages.reshape(-1, width)
        cos, sin = (table[document][None] for table in tables)  # [1, R, D]
        out = []
        for index, (keys, values) in enumerate(buffers):
            slot = slots[index // pack]
            row = ((slot * pack + index % pack) * 2) * chunk + within
            there = (slot >= 0)[None, :, None]
            stored = as_bits(jnp.take(flat, row, axis=0, mode="clip"), dtype)
            wide = stored.reshape(1, len(row), -1, dim).astype(jnp.float32)
            moved = as_bits(as_rows(apply_rope(wide, cos, sin).astype(dtype)), keys.dtype)
            other = jnp.take(flat, row + chunk, axis=0, mode="clip")[None]
            other = as_bits(other, values.dtype)
            out.append((jnp.where(there, moved, keys), jnp.where(there, other, values)))
        return tuple(out)

    return bring


def _advance_of(
    layer_of: Callable[[LayerState], Layer],
) -> Callable[..., tuple[Array, LayerKv]]:
    def advance(
        states: tuple[LayerState, ...], hidden: Array, at: Array, rows: Array, buffers: LayerKv,
        *, context: int,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        after: list[tuple[Array, Array]] = []
        for index, state in enumerate(states):

            def over_rows(q: Array, k: Array, v: Array, index: int = index) -> Array:
                keys, values = (
                    buffer[0].at[rows].set(as_bits(as_rows(new)[0], buffer.dtype), mode="drop")
                    for buffer, new in zip(buffers[index], (k, v), strict=True)
                )
                after.append((keys[None], values[None]))
                keys, values = (as_bits(x[:context], q.dtype) for x in (keys, values))
                return attend_upto(q[0], keys, values, rows)[None]

            hidden = layer_of(state)(hidden, at[None], over_rows)
        return hidden, tuple(after)

    return advance
