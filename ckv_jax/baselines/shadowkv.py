"""ShadowKV: chunks of 8 by their mean keys, with outliers that are always attended to (`shadowkv`).

Sun et al. 2025 (arXiv 2410.21465), and the authors' code.

- Index: the mean key of each chunk of 8 tokens, per layer and KV head.
- Outliers: the chunks whose mean describes one of their keys worst (least cosine) take part in
  every selection, beside the budget: 48 of the 16,384 chunks of 128k tokens, and no larger share of
  a shorter prefix.
- Low-rank keys: keys before RoPE of a layer's heads together are products [T, r] [r, K*D], of rank
  160 for 1,024 key values a token, in memory. Selected chunks are attended to by keys that are made
  of them again and rotated to their positions (`LowRank`); outliers, sinks and local tokens by
  their own keys. The products are made of the stored packs when a prefix is first generated over.
- Selection: per KV head, at every token, in every layer, by the sum over its query heads of their
  attention to the means; in the authors' code by the largest.
- Cache: the latest selection stays on the device; the rest comes through the engine's tiers, after
  all sequences have selected. Values are fetched with keys (docs/decode.md has the arithmetic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ckv_jax.baselines.decoding import (
    ENDS,
    OwnAttention,
    Selected,
    Setting,
    heads_apart,
    in_every_layer,
    indexed,
    lru,
)
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.score.probe import MeanKeys, Probe
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import apply_rope, rope_tables
from ckv_jax.pipeline.layers import Seen
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.pools import as_bits
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


class LowRank(OwnAttention[Factors]):
    """Selected chunks are attended to by low-rank keys."""

    def nothing(self, rows: int, columns: int) -> Rebuilt:
        config = self._layers.config
        shape = rows, config.num_kv_heads, columns
        size = *shape, self._system.chunk_tokens, config.head_dim
        return Rebuilt(jnp.zeros(size, self._layers.dtype), jnp.ones(shape, bool))


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


def rebuilt(selected: Selected, low: Factors, setting: Setting) -> Rebuilt:
    """The keys of what some rows selected."""
    ids, size = selected.ids, setting.chunk_tokens
    scores = selected.scores.reshape(-1, selected.scores.shape[2])
    always = setting.always.chunks(
        scores, [selected.probe], selected.num_tokens, selected.num_chunks,
        jnp.repeat(selected.limits, len(scores) // len(selected.limits)), size,
    )  # fmt: skip
    assert always is not None
    own = jnp.maximum(ids, 0)
    held = jnp.take_along_axis(always.reshape(selected.scores.shape), own, axis=2)
    wide_u, wide_v = low.u[own].astype(jnp.float32), low.v.astype(jnp.float32)
    keys = jnp.einsum("bkncr,rkd->bkncd", wide_u, wide_v)
    at = own[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None, None, :]
    cos, sin = rope_tables(setting.config, at.reshape(1, -1))
    turned = apply_rope(keys.reshape(1, -1, 1, keys.shape[-1]), cos, sin)
    return Rebuilt(turned.reshape(keys.shape).astype(selected.q.dtype), held)


def by_rebuilt(seen: Seen, added: Any, dtype: DTypeLike) -> Seen:
    """Pages of the selected packs alone, with keys made again in place of most."""
    columns = seen.slots.shape[2]
    keys, exact = (part[:, :, :columns].swapaxes(0, 1) for part in added)  # [K, B, N, ...]
    packs = as_bits(seen.pages[jnp.maximum(seen.slots, 0), 0], jnp.dtype(dtype))
    keys = jnp.where(exact[..., None, None], packs[:, :, :, 0], keys)
    pages = jnp.stack([keys, packs[:, :, :, 1]], axis=3)  # [K, B, N, 2, C, D]
    places = jnp.arange(seen.slots.size, dtype=jnp.int32).reshape(seen.slots.shape)
    slots = jnp.where(seen.slots < 0, -1, places)
    return Seen(pages.reshape(-1, 1, *pages.shape[3:]), slots, seen.lengths)


SHADOWKV = in_every_layer(
    "shadowkv",
    chunk_tokens=8,
    digest="means+cosines",
    always=Outliers(),
    own=OwnParts(
        layout=heads_apart,
        decoding=indexed(LowRank, keep=lru, make=factors, add=rebuilt, see=by_rebuilt),
    ),
)
