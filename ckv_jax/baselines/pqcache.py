"""PQCache: keys by product quantisation, blocks cached by how often they are used (`pqcache`).

Zhang et al. 2025 (arXiv 2407.12820), and the authors' code.

- Index: product-quantised keys, two sub-vectors of 6 bits each, as in the authors' script.
- Selection: in every layer, at every token, by the attention that the quantised keys give. Whole
  chunks of 16 are selected, all heads of a layer together; in the paper tokens, per KV head.
- Local tokens: half of the budget is the latest tokens of the prefix (`HalfLocal`). In the paper
  this half moves on with the generation.
- Cache: two selections stay on the device, least frequently used first out; the rest comes through
  the engine's tiers, after all sequences have selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ckv_jax.baselines.decoding import ENDS, SelectFirst, decoding, in_every_layer, lfu
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.storage.layout import Layout


@dataclass(frozen=True, slots=True)
class HalfLocal:
    """The ends, and before the last of them half of the budget's chunks."""

    def most(self, layout: Layout, tokens: int) -> int:
        """The ends alone: the other half is within the budget."""
        return ENDS.most(layout, tokens)

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> Array:  # fmt: skip
        ends = ENDS.chunks(scores, probes, num_tokens, num_chunks, limits, chunk_tokens)
        chunk = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
        within = chunk < jnp.broadcast_to(num_chunks, limits.shape)[:, None]
        budget = limits - jnp.sum(ends & within, axis=1, dtype=jnp.int32)
        first = (jnp.broadcast_to(num_tokens, limits.shape) - ENDS.last) // chunk_tokens
        local = (chunk >= (first - budget // 2)[:, None]) & (chunk < first[:, None])
        held: Array = ends | local
        return held


PQCACHE = in_every_layer(
    "pqcache",
    chunk_tokens=16,
    digest="pq",
    always=HalfLocal(),
    window=2,
    own=OwnParts(decoding=decoding(SelectFirst, keep=lfu)),
)
