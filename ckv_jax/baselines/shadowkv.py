"""ShadowKV: chunks of 8 by their mean keys, with outliers that are always attended to (`shadowkv`).

- Index: the mean key of each chunk of 8 tokens, per layer and KV head.
- Outliers: the chunks whose mean describes one of their keys worst (least cosine) take part in
  every selection, beside the budget: 48 of the 16,384 chunks of 128k tokens, and no larger share of
  a shorter prefix.
- Sinks and local tokens: the chunks of the first 4 and the latest 64 tokens are attended to beside
  the budget (KVDrive §9.1).
- Selection: per KV head, at every token, in every layer.
- Cache: the latest selection stays on the device (`window=1`); the rest comes through the engine's
  tiers, after all sequences have selected.
- Low-rank keys are left out. In the paper keys before RoPE stay on the device as products of rank
  160, and values alone are fetched; here keys and values are read as they are. A chunk of one head
  is the least that a direct read brings, so that from an SSD fetching half of it saves nothing
  (docs/decode.md has the arithmetic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
from jax import Array

from ckv_jax.baselines.decoding import ENDS, SelectFirst, decoding, lru
from ckv_jax.baselines.layouts import heads_apart
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.kernels_pallas.score.probe import MeanKeys, Probe
from ckv_jax.selection.select import Select
from ckv_jax.storage.layout import Layout

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
    own=OwnParts(layout=heads_apart, decoding=decoding(SelectFirst, keep=lru)),
)
