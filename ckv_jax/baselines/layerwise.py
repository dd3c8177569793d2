"""Re-prefill layer by layer: what AttentionStore, H2O and IMPRESS share (ContiguousKV Figure 8a).

Keys and values are in packs of their own, one layer each, so that a pool page is one chunk's keys
or values. A system is a `LayerSchedule`: what it reads ahead of a layer, and how the layer attends.
Reads, threads, tiers and pool are the core's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from ckv_jax.buckets import bucket
from ckv_jax.config import SystemConfig
from ckv_jax.kernels_pallas.attend import attend_rows
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.score import dot
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer
from ckv_jax.model.shardings import BY_NAME, HEADS, PAGES, WHOLE, Spec
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import FirstToken, ReprefillExecutor
from ckv_jax.pipeline.layers import Layers, LayerState, insert_rows
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits, as_rows, positions
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

CHUNK_TOKENS = 64
"""Tokens of a chunk of keys or of values (IMPRESS §6.1; ContiguousKV §5.1)."""

READ_AHEAD = 2
"""Layers whose unconditional reads (everything, all keys, or the probe) are issued while one
computes, where the pool has room for them. With two the reader never runs dry; more would only hold
more buffers."""

LEAST_TOKENS = 16
"""Smallest bucket of selected tokens."""

Qkv = tuple[Array, Array, Array]


def layer_by_layer(name: str, **fields: Any) -> SystemConfig:
    """A system that selects in every layer by itself, with keys and values apart."""
    return SystemConfig(
        name=name, chunk_tokens=CHUNK_TOKENS, pack_layers=1, period=1, subperiod=1, digest="none",
        **fields,
    )  # fmt: skip


def kv_apart(layout: Layout, num_heads: int) -> Layout:
    """Keys and values of a layer are a read each."""
    return replace(layout, kv_together=False)


class TokenSelection(NamedTuple):
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


class LayerwiseExecutor(ReprefillExecutor):
    """First tokens of one model and system, a layer at a time."""

    def __init__(
        self, worker: Worker, schedule_of: Callable[[Batch, Packs, Trace], LayerSchedule]
    ) -> None:
        """`schedule_of`: one batch's way through the layers."""
        self._layers = worker.layers
        self._schedule_of = schedule_of

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """First tokens of `batch`, whose `limits` count tokens; selections are stored positions.

        Its rows ask about one prefix, and nothing is held.
        """
        with trace.span("dispatch", lane="host"):
            schedule = self._schedule_of(batch, packs, trace)
            hidden = self._layers.embed(batch.tokens)
        schedule.begin()
        for layer in range(self._layers.num_layers):
            hidden = schedule.attend(layer, hidden)
        start = time.perf_counter_ns()
        logits, token = self._layers.head(hidden, np.maximum(batch.lengths - 1, 0))
        token_ids = np.asarray(token)
        trace.add("compute", "compute", start, time.perf_counter_ns())
        selections = schedule.selections
        with trace.span("book", lane="host"):
            masses = np.ones((self._layers.num_layers, len(batch.lengths)), np.float32)
            if selections:
                masses = np.stack(jax.device_get([selection.mass for selection in selections]))
            trace.period_attention_mass.extend(masses[:, batch.lengths > 0].mean(axis=1).tolist())
            self.note(batch.members[0].opened.prefix, selections)
            ids = jax.device_get([selection.ids for selection in selections])
        return FirstToken(
            logits=logits,
            token_ids=token_ids,
            attention_mass=masses,
            selections=ids,
            kv=[],
        )

    def note(self, prefix: Prefix, selections: Sequence[TokenSelection]) -> None:
        """A batch over `prefix` is done, which selected `selections` in its layers."""


class LayerSchedule:
    """One batch's way through the layers."""

    def __init__(
        self, worker: Worker, calls: LayerCalls, batch: Batch, packs: Packs, trace: Trace
    ) -> None:
        self.selections: list[TokenSelection] = []
        self._layers = calls
        self._memory = worker.memory
        [member] = batch.members
        self._opened = opened = member.opened
        self._batch = batch
        self._packs = packs
        self._probes = member.probes
        self._trace = trace
        self._num_layers = opened.prefix.layout.num_layers
        self._chunk_tokens = opened.prefix.layout.chunk_tokens
        self._all = np.arange(opened.num_chunks)
        self._ahead = 0 if worker.system.prefetch == "none" else READ_AHEAD
        self._tokens = np.int32(opened.prefix.num_tokens)
        self._budget = min(
            bucket(int(batch.limits.max()), least=LEAST_TOKENS),
            opened.probe_chunks * self._chunk_tokens,
        )

    def attend(self, layer: int, hidden: Array) -> Array:
        """A layer over what the system attends to in it."""
        raise NotImplementedError

    def read_ahead(self, layer: int) -> None:
        """Starts what a layer needs whatever is selected."""
        raise NotImplementedError

    def begin(self) -> None:
        """Starts the first layers' unconditional reads."""
        for layer in range(self._ahead):
            self._read_ahead(layer)

    def _read_ahead(self, layer: int) -> None:
        if layer < self._num_layers:
            with self._span("submit", layer):
                self.read_ahead(layer)

    def _project(self, layer: int, hidden: Array) -> Qkv:
        with self._span("dispatch", layer):
            return self._layers.project(layer, hidden, self._batch.start)

    def _attend_selected(
        self, layer: int, hidden: Array, qkv: Qkv, selection: TokenSelection, counts: np.ndarray,
        key_table: np.ndarray | None,
    ) -> Array:  # fmt: skip
        """A layer over its important tokens, `counts` [M] of them in each chunk; `key_table`: where
        the keys of all chunks are, None: those that matter are still to be read."""
        chunks = np.flatnonzero(counts)
        keys = chunks if key_table is None else self._all
        with self._span("submit", layer):
            self._packs.demand(0, 2 * layer + 1, chunks)
            if key_table is None:
                self._packs.demand(0, 2 * layer, chunks)
        self._record(2 * layer, keys, counts)
        self._record(2 * layer + 1, chunks, counts)
        with self._span("dispatch", layer):
            if key_table is None:
                key_table = self._collect(2 * layer, chunks)
            value_table = self._collect(2 * layer + 1, chunks)
            hidden = self._layers.attend_tokens(
                layer, hidden, qkv, self._memory.pool.pages, key_table, value_table, selection.ids
            )
        self._done(layer, hidden, len(chunks))
        self.selections.append(selection)
        return hidden

    def _all_keys(self, layer: int, meanwhile: Callable[[], None] = lambda: None) -> np.ndarray:
        """Where the keys of all chunks are, once they are there."""
        group = 2 * layer
        with self._span("submit", layer):
            self._packs.demand(0, group, self._all)
        meanwhile()
        with self._span("dispatch", layer):
            return self._collect(group, self._all, stage="probe_io")

    def _fetch(self, layer: int, selection: TokenSelection) -> tuple[np.ndarray, np.ndarray]:
        """Important tokens by chunk [M], and how far the scoring heads agreed, float [B]: the one
        sync."""
        start = time.perf_counter_ns()
        selection.counts.block_until_ready()
        ready = time.perf_counter_ns()
        self._trace.add("compute", "compute", start, ready, layer=layer)
        counts, similarity = jax.device_get((selection.counts, selection.similarity))
        rows = self._batch.lengths > 0
        self._trace.add("select", "host", ready, time.perf_counter_ns(), layer=layer)
        return counts[rows].max(axis=0)[: self._opened.num_chunks], similarity

    def _collect(
        self, group: int, chunks: np.ndarray, *, stage: str = "critical_io_wait"
    ) -> np.ndarray:
        """Device slots by chunk, int32 [M] padded, -1 where it was not asked for."""
        table = np.full(self._opened.probe_chunks, -1, np.int32)
        table[chunks] = self._packs.collect(0, group, chunks, stage=stage)
        return table

    def _done(self, layer: int, hidden: Array, selected: int) -> None:
        self._packs.done(0, 2 * layer, hidden)
        self._packs.done(0, 2 * layer + 1, hidden)
        self._trace.count_chunks(selected=selected, total=self._opened.num_chunks)

    def _record(self, group: int, chunks: np.ndarray, counts: np.ndarray | None) -> None:
        """One use of each pack, with the share of its tokens that were important (IMPRESS §4.4.2).

        Also counts the tokens that come from the SSD, and those of them that are needed.
        """
        with self._span("book", group // 2):
            lengths = self._opened.chunk_lengths[chunks]
            needed = lengths if counts is None else counts[chunks]
            pages = self._opened.pages(group, chunks)
            device, host = self._memory.tiers.lookup(pages)
            missing = (device < 0) & (host < 0)
            self._trace.count("ssd_tokens", int(lengths[missing].sum()))
            self._trace.count("ssd_tokens_needed", round(float(needed[missing].sum())))
            self._memory.tiers.record(pages, needed / self._chunk_tokens)

    def _span(self, stage: str, layer: int) -> AbstractContextManager[object]:
        return self._trace.span(stage, lane="host", layer=layer)


class LayerCalls:
    """Jitted calls over single layers of one model. Shapes are bucketed by the caller."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        once, layer_of = layers.once, layers.layer_of
        self.project: Callable[..., Qkv] = self._of_layer(
            once(_project_of, layer_of), (WHOLE, WHOLE), HEADS
        )
        """(layer, hidden [B, S, E], start int32 [B]) -> queries [B, S, H, D], keys and values
        [B, S, K, D] of the suffix."""
        self.attend_tokens: Callable[..., Array] = self._of_layer(
            once(_attend_tokens_of, layer_of, layers.target),
            (WHOLE, HEADS, PAGES, WHOLE, WHOLE, WHOLE), WHOLE,
        )  # fmt: skip
        """(layer, hidden, qkv, pages, key slots [M], value slots [M], ids [B, n] or [B, K, n]) ->
        hidden: the rest of the layer, attention over the tokens `ids` and the suffix, the MLP."""

    def _of_layer(
        self, function: Callable[..., Any], takes: Sequence[Spec], gives: Spec
    ) -> Callable[..., Any]:
        """A call whose first argument is a layer's number, for the layer's arrays."""
        split = self._layers.split(function, (BY_NAME, *takes), gives)
        program = self._layers.programs.jit(split)
        state = self._layers.state
        return lambda layer, *args: program(state(layer), *args)


def _project_of(layer_of: Callable[[LayerState], Layer]) -> Callable[..., Qkv]:
    def project(state: LayerState, hidden: Array, start: Array) -> Qkv:
        return layer_of(state).project(hidden, positions(start, hidden.shape[1]))

    return project


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
        # The selected ones come first, as many in every head.
        count = jnp.sum((ids[:, 0] if apart else ids) >= 0, axis=1, dtype=jnp.int32)

        def with_suffix(slots: Array, new: Array) -> Array:
            """The selected tokens of each row, and right behind them those of its suffix."""
            chunk, place = jnp.divmod(jnp.maximum(ids, 0), pages.shape[3])
            where = jnp.take(slots, chunk, mode="clip") * pages.shape[3] + place
            where = jnp.where(ids >= 0, where * parts + heads, -1)
            if apart:
                where = jnp.swapaxes(where, 1, 2).reshape(ids.shape[0], -1)  # [B, n*K]
            selected = gather(tokens, where, target=target)
            if apart and parts == 1:
                selected = _own_parts(selected, kv_heads)
            selected = selected.reshape(ids.shape[0], ids.shape[-1], -1)  # [B, n, K*D]
            room = jnp.pad(selected, ((0, 0), (0, new.shape[1]), (0, 0)))
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


def keys_of(pages: Array, key_slots: Array, k_new: Array, target: Target) -> Array:
    """The keys of a layer in stored order, [T, K, D], given those of the suffix [B, S, K, D]."""
    [keys] = gather(pages_of(pages), key_slots[None, :], target=target)  # [M, C, K*D]
    return as_bits(keys.reshape(-1, *k_new.shape[2:]), k_new.dtype)


def importance_of(scores: Array) -> Array:
    return jnp.sum(jnp.where(scores > -jnp.inf, scores, 0.0), axis=0)


def pages_of(pages: Array) -> Array:
    return pages.reshape(-1, *pages.shape[3:])  # [slots, C, K*D]


def column_sums(
    q: Float[Array, "S H D"],
    keys: Float[Array, "T K D"],
    k_new: Float[Array, "S K D"],
    valid: Bool[Array, " T"],
    q_length: Int32[Array, ""],
) -> Float32[Array, "K T"]:
    """Attention that each prefix token gets from the suffix, for each KV head by itself.

    The softmax is the layer's own: over the valid prefix keys and, causally, the suffix keys.
    Summed over the G query heads of a KV head and the first `q_length` queries; tokens that are
    not valid get -inf. With fewer KV heads (a probe of the first ones), their query heads alone
    are to be given.
    """
    queries, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(dim)
    steps = jnp.arange(queries, dtype=jnp.int32)
    causal = jnp.repeat(steps[None, :] <= steps[:, None], group, axis=0)  # [S*G, S]
    counted = jnp.repeat(steps < q_length, group)  # [S*G]
    sums = []
    for head in range(kv_heads):  # one matmul a head: no [H, S, T] array, no transposed keys
        rows = q[:, head * group : (head + 1) * group].reshape(queries * group, dim)
        old = dot(rows, keys[:, head]) * scale
        new = dot(rows, k_new[:, head]) * scale
        old = jnp.where(valid[None, :], old, -jnp.inf)
        new = jnp.where(causal, new, -jnp.inf)
        top = jnp.maximum(jnp.max(old, axis=1), jnp.max(new, axis=1))[:, None]
        old, new = jnp.exp(old - top), jnp.exp(new - top)
        total = jnp.sum(old, axis=1) + jnp.sum(new, axis=1)
        weight = jnp.where(counted, 1.0 / total, 0.0)  # [S*G]
        sums.append(jnp.sum(old * weight[:, None], axis=0))
    return jnp.where(valid[None, :], jnp.stack(sums), -jnp.inf)


def sums_of(q: Array, keys: Array, k_new: Array, num_tokens: Array, q_lengths: Array) -> Array:
    valid = jnp.arange(keys.shape[0], dtype=jnp.int32) < num_tokens
    rows = [
        column_sums(q[b], keys, k_new[b], valid, q_lengths[b]) for b in range(q.shape[0])
    ]  # a Python loop: rows of a batch share the keys, and vmap would copy them
    return jnp.stack(rows)
