"""The jitted calls of a request: embed, select, run layers over pages, extend, head.

One `Compute` belongs to one model. Layers are split once into a graph definition, which all
layers share, and their arrays, which are arguments: one executable serves every subperiod.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.kernels_pallas.attend.api import attend
from ckv_jax.kernels_pallas.score.api import score, select
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.model.qwen2 import Layer, Qwen2

if TYPE_CHECKING:
    from ckv_jax.rivals.layers import LayerCompute

LayerState = Any  # a pure pytree of one layer's arrays
Pages = Array  # [slots, pl, 2, C, K, D], elements or their bit patterns


class Selection(NamedTuple):
    """What a selection found, on the device."""

    ids: Int32[Array, "B n"]
    """Chosen chunks, ascending, -1 past a row's limit."""
    attention: Float32[Array, "B n"]
    """Their A_j (Equation 1, summed over the layers), 0 past the limit."""
    mass: Float32[Array, " B"]
    """The share of all attention mass that they hold."""
    scores: Float32[Array, "B M"]
    """A_j of every chunk."""


def compiled(*calls: Callable[..., Any]) -> int:
    """How many programs these jitted calls have compiled so far."""
    return sum(call._cache_size() for call in calls)  # type: ignore[attr-defined]


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The element type of KV that is updated in place on this backend.

    XLA's CPU backend widens 16-bit floats around every update, which copies the whole array:
    a pool of bit patterns stays in place. Measured: 0.06 ms against 166 ms for 16 packs.
    """
    if jax.default_backend() == "cpu" and dtype.itemsize == 2:
        return np.dtype(np.uint16)
    return dtype


def _as_bits(x: Array, dtype: jnp.dtype) -> Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


class Compute:
    """Jitted calls over one model's layers. Shapes are bucketed by the caller."""

    def __init__(self, model: Qwen2) -> None:
        self.config = model.config
        self.dtype = jnp.dtype(model.dtype)
        self.kv_dtype = storage_dtype(self.dtype)
        graph, _ = nnx.split(model.layers[0])
        self._layers: list[LayerState] = [
            nnx.to_pure_dict(nnx.state(layer)) for layer in model.layers
        ]
        ends = copy.copy(model)  # embedding and head alone
        ends.layers = nnx.List([])
        rest_graph, rest_state = nnx.split(ends)
        self._rest: LayerState = nnx.to_pure_dict(rest_state)

        def layer_of(state: LayerState) -> Layer:
            return nnx.merge(graph, state)

        self.layer_of = layer_of

        def rest_of(state: LayerState) -> Qwen2:
            return nnx.merge(rest_graph, state)

        self._embed = jax.jit(lambda rest, tokens: rest_of(rest).embed(tokens))
        self._head = jax.jit(_head_of(rest_of))
        self._select = jax.jit(
            _select_of(layer_of), static_argnames=("n", "window", "chunk_tokens")
        )
        self._run = jax.jit(_run_of(layer_of))
        self._extend = jax.jit(
            _extend_of(layer_of), static_argnames=("context",), donate_argnames=("buffers",)
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @cached_property
    def layerwise(self) -> LayerCompute:
        """The calls of the layer-by-layer systems, compiled once for all engines of this model."""
        from ckv_jax.rivals.layers import LayerCompute

        return LayerCompute(self)

    def layer_state(self, layer: int) -> LayerState:
        """The arrays of one layer, as `layer_of` takes them inside a jitted call."""
        return self._layers[layer]

    def executables(self) -> int:
        """How many programs have been compiled so far; constant once warm."""
        return compiled(self._embed, self._head, self._select, self._run, self._extend)

    def embed(self, tokens: Int32[ArrayLike, "B S"]) -> Float[Array, "B S E"]:
        """Hidden states before the first layer."""
        out: Array = self._embed(self._rest, tokens)
        return out

    def head(
        self, hidden: Float[Array, "B S E"], last: Int32[ArrayLike, " B"]
    ) -> tuple[Float32[Array, "B V"], Int32[Array, " B"]]:
        """Logits of token `last` of each row, and their argmax."""
        logits, token = self._head(self._rest, hidden, last)
        return logits, token

    def select(
        self,
        layers: Sequence[int],
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, ""],
        q_lengths: Int32[ArrayLike, " B"],
        probes: Sequence[Probe],
        num_tokens: Int32[ArrayLike, ""],
        num_chunks: Int32[ArrayLike, ""],
        limits: Int32[ArrayLike, " B"],
        *,
        n: int,
        window: int | None,
        chunk_tokens: int,
    ) -> Selection:
        """The top `limits[b]` <= n chunks for the queries of these layers (Equation 1, summed).

        `probes`: one a layer; `start`: position of the first suffix token; `window`: only so many
        last queries score.
        """
        states = tuple(self._layers[layer] for layer in layers)
        found = self._select(
            states, hidden, start, q_lengths, tuple(probes), num_tokens, num_chunks,
            limits, n=n, window=window, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return Selection(*found)

    def run(
        self,
        layers: range,
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, ""],
        pages: Pages,
        slots: Int32[ArrayLike, "P B N"],
        lengths: Int32[ArrayLike, "B N"],
    ) -> tuple[Float[Array, "B S E"], tuple[tuple[Array, Array], ...]]:
        """`layers` over the selected pages and the suffix itself (causal).

        `slots[g]` is where the packs of the call's g-th layer group sit, `lengths` how many
        tokens of each chunk are valid. Also returns each layer's suffix (K, V) [B, S, K, D].
        """
        states = tuple(self._layers[layer] for layer in layers)
        out, kv = self._run(states, hidden, start, pages, slots, lengths)
        return out, kv

    def extend(
        self,
        layers: range,
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, " B"],
        buffers: tuple[tuple[Array, Array], ...],
        at: Int32[ArrayLike, " B"],
        pages: Pages,
        slots: Int32[ArrayLike, "P B N"],
        lengths: Int32[ArrayLike, "B N"],
        *,
        context: int,
    ) -> tuple[Float[Array, "B S E"], tuple[tuple[Array, Array], ...]]:
        """`layers` over pages and over `buffers`, each layer's (K, V) [B, R, K, D] so far.

        The new tokens' keys and values go into the (donated) buffers at row `at`; only the
        first `context` rows are attended, so at + S <= context <= R. Dense prefill and decode
        are this call: `start` is the position of the first new token.
        """
        states = tuple(self._layers[layer] for layer in layers)
        out, buffers = self._extend(
            states, hidden, start, buffers, at, pages, slots, lengths, context=context
        )
        return out, buffers


def _positions(start: Array, batch: int, length: int) -> Int32[Array, "B S"]:
    steps = jnp.arange(length, dtype=jnp.int32)[None, :]
    first = jnp.broadcast_to(start, (batch,))[:, None]
    return jnp.broadcast_to(first, (batch, length)) + jnp.broadcast_to(steps, (batch, length))


def _head_of(rest_of: Callable[[LayerState], Qwen2]) -> Callable[..., tuple[Array, Array]]:
    def head(rest: LayerState, hidden: Array, last: Array) -> tuple[Array, Array]:
        row = jnp.take_along_axis(hidden, last[:, None, None], axis=1)  # [B, 1, E]
        logits = rest_of(rest).logits(row)[:, 0]
        return logits, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return head


def _select_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., tuple[Array, ...]]:
    def choose(
        states: tuple[LayerState, ...], hidden: Array, start: Array, q_lengths: Array,
        probes: tuple[Probe, ...], num_tokens: Array, num_chunks: Array, limits: Array, *, n: int,
        window: int | None, chunk_tokens: int,
    ) -> tuple[Array, ...]:  # fmt: skip
        batch, length, _ = hidden.shape
        positions = _positions(start, batch, length)
        if window is not None and window < length:
            first = jnp.maximum(q_lengths - window, 0)  # [B]
            rows = _positions(first, batch, window)
            hidden = jnp.take_along_axis(hidden, rows[:, :, None], axis=1)
            positions = jnp.take_along_axis(positions, rows, axis=1)
            q_lengths = jnp.minimum(q_lengths, window)
        scores: Array = jnp.zeros((), jnp.float32)
        for state, probe in zip(states, probes, strict=True):
            layer = layer_of(state)
            q = layer.attention.query(layer.input_norm(hidden), positions)
            scores = scores + score(
                q, probe, num_tokens=num_tokens, q_lengths=q_lengths, chunk_tokens=chunk_tokens
            )  # [B, M]
        ids = select(scores, n, num_chunks=num_chunks)
        attention = jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=1)
        attention = jnp.where(ids >= 0, attention, -1.0)
        rank = jnp.argsort(jnp.argsort(attention, axis=1, descending=True), axis=1)
        inside = (rank < limits[:, None]) & (ids >= 0)
        ids, attention = jnp.where(inside, ids, -1), jnp.where(inside, attention, 0.0)
        total = jnp.maximum(scores.sum(axis=1), jnp.finfo(jnp.float32).tiny)
        return ids, attention, attention.sum(axis=1) / total, scores

    return choose


def _run_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., Any]:
    def run(
        states: tuple[LayerState, ...], hidden: Array, start: Array, pages: Array, slots: Array,
        lengths: Array,
    ) -> tuple[Array, tuple[tuple[Array, Array], ...]]:  # fmt: skip
        batch, length, _ = hidden.shape
        positions = _positions(start, batch, length)
        pool, tables = _page_tables(pages, slots)
        zero = jnp.zeros((batch,), jnp.int32)
        kv = []
        for index, state in enumerate(states):
            layer = layer_of(state)
            q, k, v = layer.attention.project(layer.input_norm(hidden), positions)
            out, _ = attend(q, pool, *tables(index), lengths, k, v, zero)
            hidden = _after_attention(layer, hidden, out)
            kv.append((k, v))
        return hidden, tuple(kv)

    return run


def _extend_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., Any]:
    def extend(
        states: tuple[LayerState, ...], hidden: Array, start: Array,
        buffers: tuple[tuple[Array, Array], ...], at: Array, pages: Array, slots: Array,
        lengths: Array, *, context: int,
    ) -> tuple[Array, tuple[tuple[Array, Array], ...]]:  # fmt: skip
        batch, length, _ = hidden.shape
        positions = _positions(start, batch, length)
        pool, tables = _page_tables(pages, slots)
        insert = jax.vmap(_insert)
        after = []
        for index, (state, (keys, values)) in enumerate(zip(states, buffers, strict=True)):
            layer = layer_of(state)
            q, k, v = layer.attention.project(layer.input_norm(hidden), positions)
            keys = insert(keys, _as_bits(k, keys.dtype), at)
            values = insert(values, _as_bits(v, values.dtype), at)
            out, _ = attend(
                q, pool, *tables(index), lengths,
                _as_bits(keys[:, :context], k.dtype), _as_bits(values[:, :context], v.dtype), at,
            )  # fmt: skip
            hidden = _after_attention(layer, hidden, out)
            after.append((keys, values))
        return hidden, tuple(after)

    return extend


def _insert(buffer: Array, new: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, row, axis=0)


def _page_tables(pages: Array, slots: Array) -> tuple[Array, Callable[[int], tuple[Array, Array]]]:
    """The pool as pages of one layer's K or V, and each layer's two tables into it."""
    pack = pages.shape[1]
    pool = pages.reshape(-1, *pages.shape[3:])  # [slots * pl * 2, C, K, D]

    def tables(index: int) -> tuple[Array, Array]:
        slot = slots[index // pack]  # [B, N]
        keys = jnp.where(slot >= 0, (slot * pack + index % pack) * 2, -1)
        return keys, jnp.where(slot >= 0, keys + 1, -1)

    return pool, tables


def _after_attention(layer: Layer, hidden: Array, heads: Array) -> Array:
    hidden = hidden + layer.attention.output(heads)
    return hidden + layer.mlp(layer.post_norm(hidden))
