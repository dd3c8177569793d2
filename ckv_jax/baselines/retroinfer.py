"""RetroInfer: clusters of alike keys as the unit of selection (`retroinfer`).

Chen et al. 2025 (arXiv 2505.02922).

- Index: clusters of 16 tokens on average, over runs of 8,192 tokens, per layer and KV head. The
  paper has segmented k-means over centred keys; here fours of neighbours are halved at the median
  of their principal direction until 16 tokens are left together, so that each cluster is exactly a
  chunk.
- Steady zone: a prefix's first and latest tokens take part in every selection, beside the budget:
  16 and 64 tokens, in the paper 4 and 64.
- Retrieval zone: the clusters with the best mean keys, per KV head, at every token.
- Estimation zone: the next best 23.2% of the clusters, by their mean keys and mean values alone
  (`Estimating`). Mean values are made of the stored packs when a prefix is first generated over,
  and stay in memory. `RETROINFER_PLAIN` has no estimation, as the plain RetroInfer of KVDrive §9.1.
- Cache: twice a selection stays on the device, least recently used first out; the rest comes
  through the engine's tiers, after all sequences have selected.
- Index updates: every 1,024 generated tokens become a segment with an index of its own
  (`EngineConfig.segment_tokens`), as for every system here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from ckv_jax.baselines.decoding import SelectFirst, decoding, lru
from ckv_jax.baselines.layouts import clusters
from ckv_jax.baselines.side_index import Indexed, SideIndex, indexed
from ckv_jax.buckets import pad_rows
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.decode.eviction import Keep
from ckv_jax.decode.selection import DecodeContext, Extend
from ckv_jax.kernels_pallas.score.probe import Keys, MeanKeys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Layer
from ckv_jax.pipeline.layers import LayerKv, LayerState, insert, over_pages_and_rows
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.pools import as_bits, as_rows, positions
from ckv_jax.selection.select import Ends, Select

ESTIMATED = Fraction(232, 1000)
"""The estimation zone's share of the clusters (the authors' configuration)."""


class Estimate(NamedTuple):
    """Attention of a batch's rows to clusters by their means, float32."""

    out: Array
    """[B, 1, H, D]"""
    lse: Array
    """[B, 1, H]; -inf where nothing is estimated."""


class Estimating(Indexed[Array]):
    """What is next best after a selection is attended to by mean keys and mean values."""

    def __init__(self, context: DecodeContext, *, keep: Keep, index: SideIndex[Array]) -> None:
        super().__init__(context, keep=keep, index=index)
        layers = context.runtime.layers
        self._layers = layers
        self._estimate: Estimate | None = None
        jit = layers.programs.jit
        self._estimated = jit(layers.once(_estimated_of, layers.layer_of, layers.target))
        self._extended = jit(
            layers.once(_extended_of, layers.layer_of, layers.target),
            static=("context", "parts"), donate=("buffers",),
        )  # fmt: skip

    def select(
        self, period: int, hidden: Array, starts: np.ndarray, tables: np.ndarray
    ) -> np.ndarray:
        """See `DecodeSelection.select`; estimates as well."""
        tables = super().select(period, hidden, starts, tables)
        heads, dim = self._layers.config.num_heads, self._layers.config.head_dim
        found = Estimate(
            jnp.zeros((len(hidden), 1, heads, dim), jnp.float32),
            jnp.full((len(hidden), 1, heads), -jnp.inf, jnp.float32),
        )
        for call, values in zip(self._calls[period], self._indices[period], strict=True):
            assert call.found is not None
            of, scores, record = call.of, call.found.scores, call.found.record
            found = self._estimated(
                (of.key, hidden.shape, scores.shape), of.states[0], hidden, starts, of.rows,
                tuple(fine[0] for fine, _ in of.probes), values, of.num_tokens, of.num_chunks,
                of.limits, scores, record, found,
            )  # fmt: skip
        self._estimate = found
        return tables

    def extend(self, step: Step) -> Extend | None:
        """See `DecodeSelection.extend`."""
        assert self._estimate is not None
        return partial(self._run, self._estimate)

    def _run(
        self, estimate: Estimate, layers: range, hidden: Array, start: ArrayLike, buffers: LayerKv,
        at: ArrayLike, pages: Array, tables: ArrayLike, **static: Any,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        """`Layers.extend` of one layer, merged with its estimate."""
        rows = buffers[0][0].shape[1]
        key = hidden.shape, rows, pages.shape, np.shape(tables), *static.values()
        out: Array
        out, kept = self._extended(
            key, self._layers.state(layers.start), hidden, start, buffers[0], at, pages, tables,
            estimate, **static,
        )  # fmt: skip
        return out, (kept,)


def mean_values(
    config: ModelConfig, opened: OpenPrefix, layer: int, keys: np.ndarray, values: np.ndarray
) -> Array:
    """Mean values [M, K, D] of a layer's clusters, in the layout's dtype, padded like its probe."""
    means = values.sum(axis=1) / opened.chunk_lengths[:, None, None]
    return jnp.asarray(
        pad_rows(means.astype(opened.prefix.layout.numpy_dtype), opened.probe_chunks)
    )


def _estimated_of(
    layer_of: Callable[[LayerState], Layer], target: Target
) -> Callable[..., Estimate]:
    def estimate(
        state: LayerState, hidden: Array, start: Array, rows: Array, probes: Sequence[Probe],
        values: Sequence[Array], num_tokens: Array, num_chunks: Array, limits: Array,
        scores: Array, record: Array, found: Estimate,
    ) -> Estimate:  # fmt: skip
        """Adds the estimates of a call's rows to those of a batch."""
        q = layer_of(state).query(hidden[rows], start[rows][:, None])  # [R, 1, H, D]
        size, chunks = len(rows) // len(probes), scores.shape[1]
        heads = len(scores) // len(rows)
        count = (record.shape[1] - 1) // 5  # see `scoring.Record`, of which ids come first
        ids = record[:, :count].reshape(len(rows), heads, count)
        scores = scores.reshape(len(rows), heads, chunks)
        for place, (probe, value) in enumerate(zip(probes, values, strict=True)):
            mine = slice(place * size, (place + 1) * size)
            seen = next_best(scores[mine], ids[mine], num_chunks[place])
            mean = means_of(probe, num_tokens[place], chunks, value.dtype)
            out, lse = attend_means(q[mine], mean, value, seen, widen=target.in_host_memory)
            some = jnp.where(limits[mine] > 0, rows[mine], len(hidden))  # padding is dropped
            found = Estimate(
                found.out.at[some].set(out, mode="drop"), found.lse.at[some].set(lse, mode="drop")
            )
        return found

    return estimate


def next_best(scores: Array, ids: Array, num_chunks: Array) -> Array:
    """The clusters bool [b, K, M] of the estimation zone: the best of those `scores` [b, K, M] that
    `ids` [b, K, n], -1: none, leave, as many as its share of `num_chunks`."""
    batch, heads, chunks = scores.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    at = jnp.where(ids < 0, chunks, ids)
    there = jnp.arange(chunks, dtype=jnp.int32)[None, None, :] < num_chunks
    left = jnp.where(there, scores, -jnp.inf).at[row, head, at].set(-jnp.inf, mode="drop")
    values, best = lax.top_k(left, math.ceil(chunks * ESTIMATED))
    count = -(-num_chunks * ESTIMATED.numerator // ESTIMATED.denominator)
    rank = jnp.arange(best.shape[2], dtype=jnp.int32)[None, None, :]
    best = jnp.where((rank < count) & (values > -jnp.inf), best, chunks)
    return jnp.zeros(scores.shape, bool).at[row, head, best].set(True, mode="drop")


def means_of(probe: Probe, num_tokens: Array, chunks: int, dtype: DTypeLike) -> MeanKeys:
    """Mean keys of clusters: those of the digest, or of keys of `dtype`, or their bit patterns,
    that were computed again for it."""
    if isinstance(probe, MeanKeys):
        return probe
    assert isinstance(probe, Keys)
    tokens, heads, dim = probe.shape
    size = tokens // chunks
    held = jnp.clip(num_tokens - size * jnp.arange(chunks, dtype=jnp.int32), 0, size)
    keys = probe.keys
    if jnp.issubdtype(keys.dtype, jnp.unsignedinteger):
        keys = lax.bitcast_convert_type(keys, dtype)
    there = jnp.arange(size, dtype=jnp.int32)[None, :] < held[:, None]
    keys = keys.reshape(chunks, size, heads, dim).astype(jnp.float32)
    total = jnp.sum(jnp.where(there[:, :, None, None], keys, 0.0), axis=1)
    log_size = jnp.log(held.astype(jnp.float32))
    return MeanKeys(
        total / jnp.maximum(held, 1).astype(jnp.float32)[:, None, None],
        jnp.broadcast_to(log_size[:, None], (chunks, heads)),
    )


def attend_means(
    q: Array, probe: MeanKeys, value: Array, seen: Array, *, widen: bool
) -> tuple[Array, Array]:
    """Attention of q [b, 1, H, D] to clusters `seen` bool [b, K, M] by their means: a cluster
    weighs size * exp(q.mean_key / sqrt(D)), never more than its keys do together (Jensen).

    Returns out float32 [b, 1, H, D] and log-sum-exp [b, 1, H]. Products are of q's dtype, or of
    float32 with `widen`.
    """
    batch, length, heads, dim = q.shape
    kv_heads = value.shape[1]
    dtype = jnp.dtype(jnp.float32) if widen else q.dtype
    rows = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).astype(dtype)
    logits = jnp.einsum(
        "bskgd,mkd->bskgm", rows, probe.mean.astype(dtype), preferred_element_type=jnp.float32
    )
    logits = logits * (1.0 / math.sqrt(dim)) + probe.log_size.T[None, None, :, None, :]
    logits = jnp.where(seen[:, None, :, None, :], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(lse > -jnp.inf, lse, 0.0)[..., None])
    out = jnp.einsum(
        "bskgm,mkd->bskgd", weights.astype(dtype), value.astype(dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _extended_of(
    layer_of: Callable[[LayerState], Layer], target: Target
) -> Callable[..., tuple[Array, tuple[Array, Array]]]:
    def extend(
        state: LayerState, hidden: Array, start: Array, buffers: tuple[Array, Array], at: Array,
        pages: Array, tables: Array, estimate: Estimate, *, context: int, parts: int,
    ) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
        after: list[tuple[Array, Array]] = []

        def over_all(q: Array, k: Array, v: Array) -> Array:
            keys, values = insert(buffers, (as_rows(k), as_rows(v)), at)
            after.append((keys, values))
            slots, lengths = tables[:-parts], tables[-parts:]
            return over_pages_and_rows(
                q, pages, slots, lengths if parts > 1 else lengths[0], 0,
                as_bits(keys[:, :context], k.dtype), as_bits(values[:, :context], v.dtype), at,
                target=target, beside=[(estimate.out.astype(q.dtype), estimate.lse)],
            )  # fmt: skip

        out = layer_of(state)(hidden, positions(start, hidden.shape[1]), over_all)
        return out, after[0]

    return extend


RETROINFER = SystemConfig(
    name="retroinfer",
    chunk_tokens=16,
    pack_layers=1,
    period=1,
    subperiod=1,
    digest="means",
    prefetch="intra",
    decode=Select(),
    always=Ends(),
    window=2,
    own=OwnParts(layout=clusters, decoding=indexed(Estimating, keep=lru, make=mean_values)),
)

RETROINFER_PLAIN = replace(
    RETROINFER,
    name="retroinfer-plain",
    own=OwnParts(layout=clusters, decoding=decoding(SelectFirst, keep=lru)),
)
"""Without estimation."""
