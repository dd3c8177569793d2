"""ShadowKV: chunks of 8 by their mean keys, with outliers that are always attended to (`shadowkv`).

Sun et al. 2025 (arXiv 2410.21465).

- Index: the mean key of each chunk of 8 tokens, per layer and KV head.
- Outliers: the chunks whose mean describes one of their keys worst (least cosine) take part in
  every selection, beside the budget: 48 of the 16,384 chunks of 128k tokens, and no larger share of
  a shorter prefix.
- Sinks and local tokens: the chunks of the first 4 and the latest 64 tokens are attended to beside
  the budget (KVDrive §9.1).
- Low-rank keys: keys before RoPE of a layer's heads together are products [T, r] [r, K*D], of rank
  160 for 1,024 key values a token, in memory. Selected chunks are attended to by keys that are made
  of them again and rotated to their positions (`LowRank`); outliers, sinks and local tokens by
  their own keys. The products are made of the stored packs when a prefix is first generated over.
- Selection: per KV head, at every token, in every layer.
- Cache: the latest selection stays on the device (`window=1`); the rest comes through the engine's
  tiers, after all sequences have selected.
- Values are fetched with keys: a chunk of one head, keys and values, is the least that a direct
  read brings (docs/decode.md has the arithmetic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ckv_jax.baselines.decoding import ENDS, lru
from ckv_jax.baselines.layouts import heads_apart
from ckv_jax.baselines.side_index import Indexed, SideIndex, indexed
from ckv_jax.buckets import bucket
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.decode.eviction import Keep
from ckv_jax.decode.selection import DecodeContext, Extend
from ckv_jax.kernels_pallas.attend.api import attend_rows, merge
from ckv_jax.kernels_pallas.score.probe import MeanKeys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Layer
from ckv_jax.model.rope import apply_rope, rope_tables
from ckv_jax.pipeline.layers import LayerKv, LayerState, insert
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.pools import as_bits, as_rows, positions
from ckv_jax.selection.select import Always, Select
from ckv_jax.storage.layout import Layout

RANK = Fraction(160, 1024)
"""Rank of keys, as a share of the key values of a token (the authors' configuration)."""

_FINEST = 1024
"""Largest denominator of a share: host and device count with the same whole numbers."""


@dataclass(frozen=True, slots=True)
class Outliers:
    """The ends, and of each KV head a share of a prefix's chunks: those whose mean key describes
    one of their keys worst."""

    share: float = 48 / 16_384

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"got share={self.share}, expected a share of the chunks in (0, 1]")

    def most(self, layout: Layout, tokens: int) -> int:
        """See `selection.select.Always`."""
        chunks = layout.num_chunks(tokens)
        return min(chunks, ENDS.most(layout, tokens) + int(self.of(chunks)))

    def of(self, chunks: Any) -> Any:
        """Number of outliers among `chunks`, an int or a device's int32 array of any shape."""
        part = Fraction(self.share).limit_denominator(_FINEST)
        return -(-chunks * part.numerator // part.denominator)

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> Array:  # fmt: skip
        """See `selection.select.Always`."""
        oddities = []
        for probe in probes:
            if not isinstance(probe, MeanKeys) or probe.oddity is None:
                raise ValueError(
                    f"got outliers of {type(probe).__name__}, expected the digest means+cosines"
                )
            queries = scores.shape[0] // len(probes) // probe.shape[1]
            oddities.append(jnp.tile(probe.oddity.T, (queries, 1)))
        count = jnp.broadcast_to(self.of(num_chunks), scores.shape[:1])
        ends = ENDS.chunks(scores, probes, num_tokens, num_chunks, limits, chunk_tokens)
        held: Array = ends | (jnp.concatenate(oddities) < count[:, None])
        return held


class Factors(NamedTuple):
    """Keys before RoPE of one layer of a prefix, as a product."""

    u: Array
    """[M, C, r]"""
    v: Array
    """[r, K, D]"""


class Rebuilt(NamedTuple):
    """Keys of what a batch's rows selected."""

    keys: Array
    """[B, K, N, C, D], rotated."""
    exact: Array
    """bool [B, K, N]: whose own keys are taken in place of these."""


class LowRank(Indexed[Factors]):
    """Selected chunks are attended to by low-rank keys."""

    def __init__(self, context: DecodeContext, *, keep: Keep, index: SideIndex[Factors]) -> None:
        layers = context.runtime.layers
        super().__init__(context, keep=keep, index=index)
        self._layers = layers
        self._rebuilt: Rebuilt | None = None
        jit, once, always = layers.programs.jit, layers.once, context.runtime.system.always
        self._rebuild = jit(once(_rebuild_of, layers.config, always), static=("chunk_tokens",))
        self._extended = jit(
            once(_extended_of, layers.layer_of, layers.target),
            static=("context", "parts"), donate=("buffers",),
        )  # fmt: skip

    def select(
        self, period: int, hidden: Array, starts: np.ndarray, tables: np.ndarray
    ) -> np.ndarray:
        """See `DecodeSelection.select`; makes keys of what is selected again as well."""
        tables = super().select(period, hidden, starts, tables)
        config, size = self._layers.config, self._system.chunk_tokens
        width = bucket(self.widest)
        if not tables[-1, :, width:].any():  # keys are made again for every column
            tables = tables[:, :, :width]
        columns = tables.shape[2] or self._columns  # no table: windows do not hold
        shape = len(hidden), config.num_kv_heads, columns
        found = Rebuilt(
            jnp.zeros((*shape, size, config.head_dim), self._layers.dtype), jnp.ones(shape, bool)
        )
        for call, low in zip(self._calls[period], self._indices[period], strict=True):
            assert call.found is not None
            of, scores, record = call.of, call.found.scores, call.found.record
            found = self._rebuild(
                (of.key, shape, scores.shape), tuple(fine[0] for fine, _ in of.probes), low,
                of.rows, of.num_tokens, of.num_chunks, of.limits, scores, record, found,
                chunk_tokens=size,
            )  # fmt: skip
        self._rebuilt = found
        return tables

    def extend(self, step: Step) -> Extend | None:
        """See `DecodeSelection.extend`."""
        assert self._rebuilt is not None
        return partial(self._run, self._rebuilt)

    def _run(
        self, rebuilt: Rebuilt, layers: range, hidden: Array, start: ArrayLike, buffers: LayerKv,
        at: ArrayLike, pages: Array, tables: Any, **static: Any,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        """`Layers.extend` of one layer."""
        columns = tables.shape[2]
        rebuilt = Rebuilt(rebuilt.keys[:, :, :columns], rebuilt.exact[:, :, :columns])
        rows = buffers[0][0].shape[1]
        key = hidden.shape, rows, pages.shape, tables.shape, *static.values()
        out: Array
        out, kept = self._extended(
            key, self._layers.state(layers.start), hidden, start, buffers[0], at, pages, tables,
            rebuilt, **static,
        )  # fmt: skip
        return out, (kept,)


def factors(
    config: ModelConfig, opened: OpenPrefix, layer: int, keys: np.ndarray, values: np.ndarray
) -> Factors:
    """The best product of the layer's keys float32 [M, C, K, D], less their RoPE."""
    layout, shape = opened.prefix.layout, keys.shape
    width = shape[2] * shape[3]
    rank = max(1, round(RANK * width))
    u, v = _factors(jnp.asarray(keys), config=config, rank=rank)
    more = ((0, opened.probe_chunks - shape[0]), (0, 0), (0, 0))
    u = jnp.pad(u.reshape(*shape[:2], rank), more)
    dtype = layout.numpy_dtype
    return Factors(u.astype(dtype), v.reshape(rank, *shape[2:]).astype(dtype))


@partial(jax.jit, static_argnames=("config", "rank"))
def _factors(keys: Array, *, config: ModelConfig, rank: int) -> tuple[Array, Array]:
    """(U [T, r], V [r, K*D]): keys past the last token are 0 and stay so."""
    flat = keys.reshape(1, -1, *keys.shape[2:])
    cos, sin = rope_tables(config, jnp.arange(flat.shape[1], dtype=jnp.int32)[None])
    scale = jnp.square(cos) + jnp.square(sin)  # of a rotation there and back
    plain = apply_rope(flat, cos, -sin)[0] / scale[0][:, None, :]
    rows = plain.reshape(plain.shape[0], -1)
    gram = jnp.matmul(rows.T, rows, precision=lax.Precision.HIGHEST)
    _, basis = jnp.linalg.eigh(gram)  # ascending
    v = basis[:, -rank:].T
    return jnp.matmul(rows, v.T, precision=lax.Precision.HIGHEST), v


def _rebuild_of(config: ModelConfig, held_by: Always) -> Callable[..., Rebuilt]:
    def rebuild(
        probes: Sequence[Probe], low: Sequence[Factors], rows: Array, num_tokens: Array,
        num_chunks: Array, limits: Array, scores: Array, record: Array, found: Rebuilt, *,
        chunk_tokens: int,
    ) -> Rebuilt:  # fmt: skip
        """Adds the keys of a call's rows to those of a batch."""
        batch, heads, count = found.exact.shape
        size = len(rows) // len(low)
        known = (record.shape[1] - 1) // 5  # see `scoring.Record`, of which ids come first
        ids = record[:, : min(known, count)].reshape(len(rows), heads, -1)
        tokens, chunks, most = (
            jnp.repeat(x, len(scores) // len(x)) for x in (num_tokens, num_chunks, limits)
        )
        always = held_by.chunks(scores, probes, tokens, chunks, most, chunk_tokens)
        assert always is not None
        always = always.reshape(len(rows), heads, -1)
        held = jnp.take_along_axis(always, jnp.maximum(ids, 0), axis=2)
        for place, (u, v) in enumerate(low):
            mine = slice(place * size, (place + 1) * size)
            own = jnp.maximum(ids[mine], 0)
            wide_u, wide_v = u[own].astype(jnp.float32), v.astype(jnp.float32)
            keys = jnp.einsum("bkncr,rkd->bkncd", wide_u, wide_v)
            within = jnp.arange(chunk_tokens, dtype=jnp.int32)[None, None, None, :]
            at = own[..., None] * chunk_tokens + within
            shape = keys.shape
            cos, sin = rope_tables(config, at.reshape(1, -1))
            flat = keys.reshape(1, -1, 1, shape[-1])
            keys = apply_rope(flat, cos, sin).reshape(shape).astype(found.keys.dtype)
            some = jnp.where(limits[mine] > 0, rows[mine], batch)  # padding is dropped
            wide = ids.shape[2]
            found = Rebuilt(
                found.keys.at[some, :, :wide].set(keys, mode="drop"),
                found.exact.at[some, :, :wide].set(held[mine], mode="drop"),
            )
        return found

    return rebuild


def _extended_of(
    layer_of: Callable[[LayerState], Layer], target: Target
) -> Callable[..., tuple[Array, tuple[Array, Array]]]:
    def extend(
        state: LayerState, hidden: Array, start: Array, buffers: tuple[Array, Array], at: Array,
        pages: Array, tables: Array, rebuilt: Rebuilt, *, context: int, parts: int,
    ) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
        after: list[tuple[Array, Array]] = []

        def over_all(q: Array, k: Array, v: Array) -> Array:
            keys, values = insert(buffers, (as_rows(k), as_rows(v)), at)
            after.append((keys, values))
            slots, lengths = (part.swapaxes(0, 1) for part in (tables[:-parts], tables[-parts:]))
            packs = as_bits(pages[jnp.maximum(slots, 0), 0], k.dtype)  # [B, K, N, 2, C, D]
            exact = rebuilt.exact[..., None, None]
            chosen = jnp.where(exact, packs[:, :, :, 0], rebuilt.keys)
            widen = target.in_host_memory  # XLA's CPU has not all products of bfloat16
            found = attend_chunks(q, chosen, packs[:, :, :, 1], lengths, widen=widen)
            own = attend_rows(
                q, as_bits(keys[:, :context], k.dtype), as_bits(values[:, :context], v.dtype), at,
                target=target,
            )  # fmt: skip
            merged: Array = merge(*zip(found, own, strict=True))[0]
            return merged

        out = layer_of(state)(hidden, positions(start, hidden.shape[1]), over_all)
        return out, after[0]

    return extend


def attend_chunks(
    q: Array, keys: Array, values: Array, lengths: Array, *, widen: bool
) -> tuple[Array, Array]:
    """Attention of q [B, 1, H, D] to the first `lengths` [B, K, N] of keys and values
    [B, K, N, C, D]: out in q's dtype, log-sum-exp float32 [B, 1, H]."""
    batch, length, heads, dim = q.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    dtype = jnp.dtype(jnp.float32) if widen else q.dtype
    rows = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).astype(dtype)
    keys, values = (x.reshape(batch, kv_heads, -1, dim).astype(dtype) for x in (keys, values))
    logits = jnp.einsum("bskgd,bktd->bskgt", rows, keys, preferred_element_type=jnp.float32)
    there = jnp.arange(size, dtype=jnp.int32)[None, None, None, :] < lengths[..., None]
    there = there.reshape(batch, 1, kv_heads, 1, -1)
    logits = jnp.where(there, logits * (1.0 / math.sqrt(dim)), -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(lse > -jnp.inf, lse, 0.0)[..., None])
    values = jnp.where(there[:, 0, :, 0, :, None], values, jnp.zeros((), dtype))
    out = jnp.einsum(
        "bskgt,bktd->bskgd", weights.astype(dtype), values, preferred_element_type=jnp.float32
    )
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3])


SHADOWKV = SystemConfig(
    name="shadowkv",
    chunk_tokens=8,
    pack_layers=1,
    period=1,
    subperiod=1,
    digest="means+cosines",
    prefetch="intra",
    decode=Select(),
    always=Outliers(),
    window=1,
    own=OwnParts(layout=heads_apart, decoding=indexed(LowRank, keep=lru, make=factors)),
)
