"""Piecewise computation of one layer, for contexts that do not fit at once, merged by log-sum-exp.

`open` makes the layer's queries; each `over_*` call attends to one part of the context and merges
it with what came before; `close` attends to the new tokens themselves and ends the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.buckets import chunk_bucket
from ckv_jax.kernels_pallas.attend import attend, attend_rows, merge
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer
from ckv_jax.model.shardings import BY_NAME, HEADS, PAGES, WHOLE
from ckv_jax.pipeline.layers import (
    LayerKv,
    Layers,
    LayerState,
    PoolPages,
    insert,
    over_one_head,
)
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits, as_rows, layer_pages, positions


class OpenLayer(NamedTuple):
    """A layer between `open` and `close`: queries, new keys and values, and attention so far."""

    q: Float[Array, "B S H D"]
    k: Float[Array, "B S KD"]
    v: Float[Array, "B S KD"]
    out: Float32[Array, "B S H D"]
    lse: Float32[Array, "B S H"]


class Pieces:
    """The jitted calls of the piecewise way, over the layers of one model."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        jit, split = layers.programs.jit, layers.split
        target, once = layers.target, layers.once
        opened = once(_open_of, layers.layer_of)
        self._open = jit(split(opened, (BY_NAME, WHOLE, WHOLE), HEADS))
        over_pages = once(_over_pages_of, target)
        self._pages = jit(split(over_pages, (HEADS, WHOLE, PAGES, WHOLE, WHOLE, WHOLE), HEADS))
        self._rows = jit(split(once(_over_rows_of, target), (HEADS, HEADS, HEADS), HEADS))
        self._join = jit(split(_join, (HEADS,), HEADS), static=("rows",))
        self._insert = jit(split(insert, (HEADS, HEADS, WHOLE), HEADS), donate=("buffers",))
        close = once(_close_of, layers.layer_of, target)
        self._close = jit(
            split(close, (BY_NAME, WHOLE, HEADS, HEADS, WHOLE), WHOLE), static=("context",)
        )

    def open(
        self, layer: int, hidden: Float[Array, "B S E"], start: Int32[np.ndarray, " B"]
    ) -> OpenLayer:
        """The layer before any attention; `start`: position of each row's first token."""
        part: OpenLayer = self._open(self._layers.state(layer), hidden, start)
        return part

    def over_pages(
        self,
        part: OpenLayer,
        index: int,
        pages: PoolPages,
        slots: Int32[np.ndarray, "B N"],
        lengths: Int32[np.ndarray, "B N"],
        head: int = 0,
    ) -> OpenLayer:
        """Attention to packs in the pool; `index`: the layer's place in its layer group; `head`:
        the KV head in the packs where heads are apart."""
        done: OpenLayer = self._pages(part, np.int32(index), pages, slots, lengths, np.int32(head))
        return done

    def over_rows(
        self, part: OpenLayer, keys: Array | np.ndarray, values: Array | np.ndarray
    ) -> OpenLayer:
        """Attention to all of keys and values [B, R, K*D], elements or their bit patterns."""
        done: OpenLayer = self._rows(part, keys, values)
        return done

    def join(self, parts: Sequence[Array], rows: int) -> Array:
        """The first `rows` rows of keys or values [B, R, K*D] that follow one another."""
        joined: Array = self._join(tuple(parts), rows=rows)
        return joined

    def insert(
        self, buffers: tuple[Array, Array], part: OpenLayer, at: Int32[np.ndarray, " B"]
    ) -> tuple[Array, Array]:
        """(Donated) decode buffers [B, R, K*D] with the layer's new rows at `at`."""
        kept: tuple[Array, Array] = self._insert(buffers, (part.k, part.v), at)
        return kept

    def close(
        self,
        layer: int,
        hidden: Float[Array, "B S E"],
        part: OpenLayer,
        own: tuple[Array, Array] | None = None,
        at: Int32[np.ndarray, " B"] | None = None,
    ) -> Float[Array, "B S E"]:
        """Ends the layer. `own`: buffers that hold the new tokens from row `at` on, and what was
        before them; None: the new tokens alone."""
        if own is None or at is None:
            own, at = (part.k, part.v), np.zeros(hidden.shape[0], np.int32)
        out: Array = self._close(
            self._layers.state(layer), hidden, part, own, at, context=own[0].shape[1]
        )
        return out


def _open_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., OpenLayer]:
    def begin(state: LayerState, hidden: Array, start: Array) -> OpenLayer:
        q, k, v = layer_of(state).project(hidden, positions(start, hidden.shape[1]))
        nothing = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        return OpenLayer(q, as_rows(k), as_rows(v), jnp.zeros(q.shape, jnp.float32), nothing)

    return begin


def _over_pages_of(target: Target) -> Callable[..., OpenLayer]:
    def over_pages(
        part: OpenLayer, index: Array, pages: Array, slots: Array, lengths: Array, head: Array
    ) -> OpenLayer:
        apart = part.k.shape[2] // pages.shape[4]  # K with heads apart, else 1
        if apart == 1:
            pool, tables = layer_pages(pages, slots, index)
            none = part.k[:, :0]
            zero = jnp.zeros(slots.shape[:1], jnp.int32)
            out, lse = attend(part.q, pool, *tables, lengths, none, none, zero, target=target)
            return _joined(part, out, lse)
        size = part.q.shape[2] // apart  # query heads of one KV head

        def mine(of_heads: Array) -> Array:
            return lax.dynamic_slice_in_dim(of_heads, head * size, size, axis=2)

        out, lse = over_one_head(
            mine(part.q), pages, slots, lengths, index, dtype=part.k.dtype, target=target
        )
        out, lse = merge((mine(part.out), out), (mine(part.lse), lse))
        return part._replace(
            out=lax.dynamic_update_slice_in_dim(part.out, out, head * size, axis=2),
            lse=lax.dynamic_update_slice_in_dim(part.lse, lse, head * size, axis=2),
        )

    return over_pages


def _over_rows_of(target: Target) -> Callable[..., OpenLayer]:
    def over_rows(part: OpenLayer, keys: Array, values: Array) -> OpenLayer:
        keys, values = as_bits(keys, part.k.dtype), as_bits(values, part.v.dtype)
        everything = jnp.full(keys.shape[:1], keys.shape[1], jnp.int32)
        out, lse = attend_rows(part.q, keys, values, everything, target=target)
        return _joined(part, out, lse)

    return over_rows


def _close_of(layer_of: Callable[[LayerState], Layer], target: Target) -> Callable[..., Array]:
    def close(
        state: LayerState, hidden: Array, part: OpenLayer, own: tuple[Array, Array], at: Array, *,
        context: int,
    ) -> Array:  # fmt: skip
        keys, values = (as_bits(x[:, :context], part.k.dtype) for x in own)
        out, lse = attend_rows(part.q, keys, values, at, target=target)
        heads = _joined(part, out, lse).out.astype(part.q.dtype)
        return layer_of(state).complete(hidden, heads)

    return close


def _join(parts: tuple[Array, ...], *, rows: int) -> Array:
    return jnp.concatenate(parts, axis=1)[:, :rows]


def _joined(part: OpenLayer, out: Array, lse: Array) -> OpenLayer:
    out, lse = merge((part.out, out), (part.lse, lse))
    return OpenLayer(part.q, part.k, part.v, out, lse)


class Piecewise:
    """Runs steps over more packs than the pool has room for. Engine thread only.

    A pack holds several layers, and each needs it at a time of its own: it is read once for each,
    unless the host pool keeps it. Slower than a step that fits, and the same answer to rounding.
    """

    def __init__(self, layers: Layers, memory: Memory) -> None:
        self._pieces = Pieces(layers)
        self._memory = memory

    def run(
        self,
        start: np.ndarray,
        packs: Packs,
        step: Step,
        selected: np.ndarray,
        lengths: np.ndarray,
        owners: np.ndarray,
        hidden: Array,
        *,
        buffers: LayerKv | None = None,
        at: np.ndarray | None = None,
    ) -> tuple[Array, LayerKv]:
        """`Layers.run`, or with decode `buffers` `Layers.extend`, in parts.

        Args:
            selected, lengths: int32 [J, B, N], chunk ids (-1: none) and their valid tokens, of each
                of a period's J selections.
            owners: int32 [B], the prefix of each row within `packs`, -1 for padding.
        """
        kv: list[tuple[Array, Array]] = []
        pack, count = self._memory.pool.pages.shape[1], len(selected)
        for layer in step.layers:
            groups = range(layer // pack * count, (layer // pack + 1) * count)
            if layer % pack == 0:  # so is a step's first: packs do not straddle steps
                for group in groups:
                    for which in np.unique(owners[owners >= 0]).tolist():
                        packs.start_over(which, group)
            part = self._pieces.open(layer, hidden, start)
            for head, group in enumerate(groups):
                part = self._over_packs(
                    part, layer % pack, head, packs, group, selected[head], lengths[head], owners
                )
            if buffers is None:
                kv.append((part.k, part.v))
                hidden = self._pieces.close(layer, hidden, part)
                continue
            assert at is not None
            own = self._pieces.insert(buffers[len(kv)], part, at)
            kv.append(own)
            hidden = self._pieces.close(layer, hidden, part, own, at)
        return hidden, tuple(kv)

    def _over_packs(
        self, part: OpenLayer, index: int, head: int, packs: Packs, group: int,
        selected: np.ndarray, lengths: np.ndarray, owners: np.ndarray,
    ) -> OpenLayer:  # fmt: skip
        """Attention to all selected packs of one layer, or of one KV head of it where these are
        apart, as many at a time as there are slots."""
        row, column = np.nonzero((selected >= 0) & (owners >= 0)[:, None])
        most = int(selected.max(initial=0)) + 1
        wanted, at = np.unique(owners[row] * most + selected[row, column], return_inverse=True)
        done = 0
        while done < len(wanted):
            stop = min(len(wanted), done + max(1, self._memory.step_slots))
            which, chunks = np.divmod(wanted[done:stop], most)
            packs.demand(which, group, chunks)
            found = packs.collect(which, group, chunks)
            mine = (done <= at) & (at < stop)
            counts = np.bincount(row[mine], minlength=len(selected))  # rows ascend
            place = np.arange(mine.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            shape = len(selected), chunk_bucket(int(counts.max()), selected.shape[1])
            slots, valid = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
            slots[row[mine], place] = found[at[mine] - done]
            valid[row[mine], place] = lengths[row[mine], column[mine]]
            part = self._pieces.over_pages(part, index, self._memory.pool.pages, slots, valid, head)
            for one in np.unique(which).tolist():
                packs.give_up(one, group, part.lse)
            done = stop
        return part
