"""The jitted calls of the layer-by-layer systems: score tokens, attend to tokens, attend to all.

Here keys and values lie in packs of their own, one layer each, so a pool page is one chunk's keys
or values. Attention over chosen tokens gathers those tokens alone, into one buffer with the suffix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from ckv_jax.kernels_pallas.attend.api import attend, attend_rows
from ckv_jax.kernels_pallas.gather.api import gather
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.memory.pages import as_bits, as_rows, positions
from ckv_jax.model.decoder import Layer
from ckv_jax.model.shardings import BY_NAME, HEADS, PAGES, WHOLE, Shardings
from ckv_jax.pipeline.layers import Layers, LayerState, insert_rows
from ckv_jax.selection.base import choose, chunk_counts, share_held
from ckv_jax.selection.h2o import column_sums
from ckv_jax.selection.impress import mean_jaccard, probe_sets, votes

Qkv = tuple[Array, Array, Array]


class Choice(NamedTuple):
    """The important tokens of one layer. `ids` stays on the device; the rest is small."""

    ids: Int32[Array, "B n"] | Int32[Array, "B K n"]
    """Stored positions, ascending, -1 where there is none; of each KV head, or of all alike."""
    counts: Int32[Array, "B M"] | Float32[Array, "B M"]
    """Important tokens in each chunk; the mean of the heads where each has its own."""
    mass: Float32[Array, " B"]
    """Share of the scoring heads' attention to the prefix that the tokens hold."""
    similarity: Float32[Array, " B"]
    """Mean Jaccard index of the probe heads' sets; 1 where all heads score together."""
    importance: Float32[Array, " T"]
    """Attention that each token got, summed over the batch, for reordering."""


class RivalLayers:
    """Jitted calls over single layers of one model. Shapes are bucketed by the caller."""

    def __init__(self, layers: Layers) -> None:
        self._state = layers.state
        jit, split = layers.programs.jit, layers.split
        target, once = layers.target, layers.once
        project = once(_project_of, layers.layer_of)
        self._project = jit(split(project, (BY_NAME, WHOLE, WHOLE), HEADS))
        by_keys = once(_by_keys_of, target, layers.shardings)
        self._by_keys = jit(
            split(by_keys, (HEADS, WHOLE, PAGES, WHOLE, WHOLE, WHOLE), WHOLE), static=("n",)
        )
        self._by_probe = jit(_by_probe, static=("n", "heads", "chunk_tokens"))
        by_heads = once(_by_heads_of, target)
        self._by_heads = jit(by_heads, static=("n",))
        attend_tokens = once(_attend_tokens_of, layers.layer_of, target)
        self._attend_tokens = jit(
            split(attend_tokens, (BY_NAME, WHOLE, HEADS, PAGES, WHOLE, WHOLE, WHOLE), WHOLE)
        )
        attend_all = once(_attend_all_of, layers.layer_of, target)
        self._attend_all = jit(
            split(attend_all, (BY_NAME, WHOLE, WHOLE, PAGES, WHOLE, WHOLE, WHOLE), WHOLE)
        )

    def project(self, layer: int, hidden: Float[Array, "B S E"], start: Int32[ArrayLike, B]) -> Qkv:
        """Queries [B, S, H, D], keys and values [B, S, K, D] of the suffix in this layer."""
        q, k, v = self._project(hidden.shape, self._state(layer), hidden, start)
        return q, k, v

    def choose_by_keys(
        self,
        qkv: Qkv,
        q_lengths: Int32[ArrayLike, B],
        pages: Array,
        key_slots: Int32[np.ndarray, " M"],
        num_tokens: Int32[ArrayLike, ""],
        limits: Int32[ArrayLike, B],
        *,
        n: int,
    ) -> Choice:
        """H2O: the `limits[b]` <= n tokens with the largest column sums over all heads.

        `pages` [slots, 1, 1, C, K*D]; `key_slots` say where every chunk's keys of the layer are.
        """
        key = (qkv[0].shape, pages.shape, key_slots.shape, n)
        return Choice(
            *self._by_keys(key, qkv, q_lengths, pages, key_slots, num_tokens, limits, n=n)
        )

    def choose_by_probe(
        self,
        qkv: Qkv,
        q_lengths: Int32[ArrayLike, B],
        probe: Float[Array, "T P D"],
        num_tokens: Int32[ArrayLike, ""],
        limits: Int32[ArrayLike, B],
        *,
        n: int,
        heads: int,
        chunk_tokens: int,
    ) -> Choice:
        """IMPRESS: the tokens that probe heads vote for, and how far those heads agree.

        The first `heads` query heads each have a vote.
        """
        key = (qkv[0].shape, probe.shape, n, heads)
        return Choice(
            *self._by_probe(
                key, qkv, q_lengths, probe, num_tokens, limits, n=n, heads=heads,
                chunk_tokens=chunk_tokens,
            )
        )  # fmt: skip

    def choose_by_heads(
        self,
        qkv: Qkv,
        q_lengths: Int32[ArrayLike, B],
        pages: Array,
        key_slots: Int32[np.ndarray, " M"],
        num_tokens: Int32[ArrayLike, ""],
        limits: Int32[ArrayLike, B],
        trusted: Choice,
        agreed: Bool[np.ndarray, B],
        *,
        n: int,
    ) -> Choice:
        """IMPRESS's fallback: every KV head's own tokens by all keys, in rows that are not
        `agreed`; the others keep what is `trusted`. Arguments as for `choose_by_keys`."""
        key = (qkv[0].shape, pages.shape, key_slots.shape, n)
        return Choice(
            *self._by_heads(
                key, qkv, q_lengths, pages, key_slots, num_tokens, limits, trusted, agreed, n=n
            )
        )

    def attend_tokens(
        self,
        layer: int,
        hidden: Float[Array, "B S E"],
        qkv: Qkv,
        pages: Array,
        key_slots: Int32[np.ndarray, " M"],
        value_slots: Int32[ArrayLike, " M"],
        ids: Int32[Array, "B n"] | Int32[Array, "B K n"],
    ) -> Float[Array, "B S E"]:
        """The rest of the layer: attention over the tokens `ids` and the suffix, then the MLP."""
        key = (hidden.shape, pages.shape, key_slots.shape, ids.shape)
        out: Array = self._attend_tokens(
            key, self._state(layer), hidden, qkv, pages, key_slots, value_slots, ids
        )
        return out

    def attend_all(
        self,
        layer: int,
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, B],
        pages: Array,
        key_slots: Int32[np.ndarray, " M"],
        value_slots: Int32[ArrayLike, " M"],
        lengths: Int32[ArrayLike, " M"],
    ) -> Float[Array, "B S E"]:
        """The whole layer over every chunk of the prefix and the suffix."""
        key = (hidden.shape, pages.shape, key_slots.shape)
        out: Array = self._attend_all(
            key, self._state(layer), hidden, start, pages, key_slots, value_slots, lengths
        )
        return out


def _project_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., Qkv]:
    def project(state: LayerState, hidden: Array, start: Array) -> Qkv:
        return layer_of(state).project(hidden, positions(start, hidden.shape[1]))

    return project


def _by_keys_of(target: Target, shardings: Shardings) -> Callable[..., tuple[Array, ...]]:
    def by_keys(
        qkv: Qkv, q_lengths: Array, pages: Array, key_slots: Array, num_tokens: Array,
        limits: Array, *, n: int,
    ) -> tuple[Array, ...]:  # fmt: skip
        q, k, _ = qkv
        chunk_tokens = pages.shape[3]
        keys = _keys(pages, key_slots, k, target)
        sums = _sums(q, keys, k, num_tokens, q_lengths)  # [B, K, T]
        scores = shardings.sum(jnp.sum(sums, axis=1))
        chosen = choose(scores, n, limits)
        counts = chunk_counts(chosen.ids, chunk_tokens=chunk_tokens, chunks=key_slots.shape[0])
        agreement = jnp.ones(scores.shape[:1], jnp.float32)
        return chosen.ids, counts, chosen.mass, agreement, _importance(scores)

    return by_keys


def _by_heads_of(target: Target) -> Callable[..., tuple[Array, ...]]:
    def by_heads(
        qkv: Qkv, q_lengths: Array, pages: Array, key_slots: Array, num_tokens: Array,
        limits: Array, trusted: Choice, agreed: Array, *, n: int,
    ) -> tuple[Array, ...]:  # fmt: skip
        q, k, _ = qkv
        rows, heads = k.shape[0], k.shape[2]
        sums = _sums(q, _keys(pages, key_slots, k, target), k, num_tokens, q_lengths)  # [B, K, T]
        flat = sums.reshape(rows * heads, -1)
        chosen = choose(flat, n, jnp.repeat(limits, heads))  # [B*K, n]
        counts = chunk_counts(chosen.ids, chunk_tokens=pages.shape[3], chunks=key_slots.shape[0])
        counts = jnp.mean(counts.reshape(rows, heads, -1).astype(jnp.float32), axis=1)
        held = jnp.sum(chosen.attention.reshape(rows, -1), axis=1)
        scores = jnp.sum(sums, axis=1)
        total = jnp.sum(jnp.where(scores > -jnp.inf, scores, 0.0), axis=1)
        mass = held / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return (
            jnp.where(
                agreed[:, None, None], trusted.ids[:, None], chosen.ids.reshape(rows, heads, n)
            ),
            jnp.where(agreed[:, None], trusted.counts.astype(jnp.float32), counts),
            jnp.where(agreed, trusted.mass, mass),
            trusted.similarity,
            _importance(scores),
        )

    return by_heads


def _by_probe(
    qkv: Qkv, q_lengths: Array, probe: Array, num_tokens: Array, limits: Array, *, n: int,
    heads: int, chunk_tokens: int,
) -> tuple[Array, ...]:  # fmt: skip
    q, k, _ = qkv
    tokens, heads, group = probe.shape[0], min(heads, q.shape[2]), q.shape[2] // k.shape[2]
    of = np.arange(heads) // group  # one KV head a query head, so that each has sums of its own
    sums = _sums(q[:, :, :heads], probe[:, of], k[:, :, of], num_tokens, q_lengths)
    sets = jax.vmap(lambda row, limit: probe_sets(row, n, limit))(sums, limits)  # [B, P, T]
    ids = choose(jax.vmap(votes)(sums, sets), n, limits).ids
    counts = chunk_counts(ids, chunk_tokens=chunk_tokens, chunks=tokens // chunk_tokens)
    scores = jnp.sum(sums, axis=1)
    return ids, counts, share_held(scores, ids), jax.vmap(mean_jaccard)(sets), _importance(scores)


def _attend_tokens_of(
    layer_of: Callable[[LayerState], Layer], target: Target
) -> Callable[..., Array]:
    def attend_tokens(
        state: LayerState, hidden: Array, qkv: Qkv, pages: Array, key_slots: Array,
        value_slots: Array, ids: Array,
    ) -> Array:  # fmt: skip
        q, k, v = qkv
        kv_heads = k.shape[2]
        apart = ids.ndim == 3  # each head has its own
        # Devices with memory of their own move whole rows: a TPU keeps them in tiles, so that seen
        # as a row a head the whole pool would be copied, and a GPU's want 128 elements.
        parts = kv_heads if apart and target.in_host_memory else 1
        heads = jnp.arange(parts, dtype=jnp.int32)[None, :, None] if apart else 0
        tokens = pages.reshape(-1, pages.shape[-1] // parts)  # [slots * C, K*D], or a row a head
        # The chosen ones come first, as many in every head.
        count = jnp.sum((ids[:, 0] if apart else ids) >= 0, axis=1, dtype=jnp.int32)

        def with_suffix(slots: Array, new: Array) -> Array:
            """The chosen tokens of each row, and right behind them those of its suffix."""
            chunk, place = jnp.divmod(jnp.maximum(ids, 0), pages.shape[3])
            where = jnp.take(slots, chunk, mode="clip") * pages.shape[3] + place
            where = jnp.where(ids >= 0, where * parts + heads, -1)
            if apart:
                where = jnp.swapaxes(where, 1, 2).reshape(ids.shape[0], -1)  # [B, n*K]
            chosen = gather(tokens, where, target=target)
            if apart and parts == 1:
                chosen = _own_parts(chosen, kv_heads)
            chosen = chosen.reshape(ids.shape[0], ids.shape[-1], -1)  # [B, n, K*D]
            room = jnp.pad(chosen, ((0, 0), (0, new.shape[1]), (0, 0)))
            return as_bits(insert_rows(room, as_rows(new), count), new.dtype)

        keys, values = with_suffix(key_slots, k), with_suffix(value_slots, v)
        attended, _ = attend_rows(q, keys, values, count, target=target)
        return layer_of(state).complete(hidden, attended)

    return attend_tokens


def _own_parts(rows: Array, kv_heads: int) -> Array:
    """Rows [B, n*K, K*D], the token of each head in turn -> of each its own head's part, [B, n, K,
    D]."""
    rows = rows.reshape(rows.shape[0], -1, kv_heads, kv_heads, rows.shape[2] // kv_heads)
    return jnp.stack([rows[:, :, head, head] for head in range(kv_heads)], axis=2)


def _attend_all_of(layer_of: Callable[[LayerState], Layer], target: Target) -> Callable[..., Array]:
    def attend_all(
        state: LayerState, hidden: Array, start: Array, pages: Array, key_slots: Array,
        value_slots: Array, lengths: Array,
    ) -> Array:  # fmt: skip
        batch, length, _ = hidden.shape

        def rows(table: Array) -> Array:
            return jnp.broadcast_to(table[None, :], (batch, table.shape[0]))

        def over_all(q: Array, k: Array, v: Array) -> Array:
            return attend(
                q, _pages(pages), rows(key_slots), rows(value_slots), rows(lengths), as_rows(k),
                as_rows(v),                jnp.zeros((batch,), jnp.int32), target=target,
            )[0]  # fmt: skip

        return layer_of(state)(hidden, positions(start, length), over_all)

    return attend_all


def _sums(q: Array, keys: Array, k_new: Array, num_tokens: Array, q_lengths: Array) -> Array:
    valid = jnp.arange(keys.shape[0], dtype=jnp.int32) < num_tokens
    rows = [
        column_sums(q[b], keys, k_new[b], valid, q_lengths[b]) for b in range(q.shape[0])
    ]  # a Python loop: rows of a batch share the keys, and vmap would copy them
    return jnp.stack(rows)


def _keys(pages: Array, key_slots: Array, k_new: Array, target: Target) -> Array:
    """The keys of a layer in stored order, [T, K, D], given those of the suffix [B, S, K, D]."""
    [keys] = gather(_pages(pages), key_slots[None, :], target=target)  # [M, C, K*D]
    return as_bits(keys.reshape(-1, *k_new.shape[2:]), k_new.dtype)


def _importance(scores: Array) -> Array:
    return jnp.sum(jnp.where(scores > -jnp.inf, scores, 0.0), axis=0)


def _pages(pages: Array) -> Array:
    return pages.reshape(-1, *pages.shape[3:])  # [slots, C, K*D]
