"""RetroInfer: clusters of alike keys as the unit of selection (`retroinfer`).

Chen et al. 2025 (arXiv 2505.02922), and the authors' code.

- Index: clusters of 16 tokens, over runs of 8,192 tokens, per layer and KV head. The paper has
  segmented k-means over centred keys; here fours of neighbours are halved at the median of their
  principal direction until 16 tokens are left together, so that each cluster is exactly a chunk.
- Steady zone: a prefix's first 16 and latest 64 tokens take part in every selection, beside the
  budget; in the paper 4 and 64.
- Retrieval zone: the clusters with the best mean keys, per KV head, at every token.
- Estimation zone: the next best 23.2% of the clusters, by their mean keys and mean values alone
  (`Estimating`). `RETROINFER_PLAIN` has none, as the plain RetroInfer of KVDrive §9.1.
- Cache: two selections stay on the device, least recently used first out, as in KVDrive's Table 3.
  The rest comes through the engine's tiers, after all sequences have selected.
- Index updates: every 1,024 generated tokens become a segment with an index of its own
  (`EngineConfig.segment_tokens`), as for every system here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ckv_jax.baselines.decoding import (
    Estimate,
    Estimating,
    Selected,
    SelectFirst,
    Setting,
    clusters,
    decoding,
    in_every_layer,
    indexed,
    lru,
    with_estimate,
)
from ckv_jax.buckets import pad_rows
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.score.probe import MeanKeys, Probe
from ckv_jax.model.config import ModelConfig
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import float_keys
from ckv_jax.selection.select import Ends

ESTIMATED = Fraction(232, 1000)
"""The estimation zone's share of the clusters (the authors' configuration)."""


def mean_values(
    config: ModelConfig, opened: OpenPrefix, layer: int, keys: np.ndarray, values: np.ndarray
) -> Array:
    """Mean values [M, K, D] of a layer's clusters, in the layout's dtype, padded like its probe."""
    means = values.sum(axis=1) / opened.chunk_lengths[:, None, None]
    return jnp.asarray(
        pad_rows(means.astype(opened.prefix.layout.numpy_dtype), opened.probe_chunks)
    )


def estimate(selected: Selected, values: Array, setting: Setting) -> Estimate:
    """Attention to the estimation zone of a prefix, whose clusters have mean values [M, K, D]."""
    seen = next_best(selected.scores, selected.ids, selected.num_chunks)
    mean = means_of(selected.probe, selected.num_tokens, seen.shape[2], values.dtype)
    widen = setting.target.in_host_memory
    return Estimate(*attend_means(selected.q, mean, values, seen, widen=widen))


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
    tokens, heads, dim = probe.shape
    size = tokens // chunks
    held = jnp.clip(num_tokens - size * jnp.arange(chunks, dtype=jnp.int32), 0, size)
    there = jnp.arange(size, dtype=jnp.int32)[None, :] < held[:, None]
    keys = float_keys(probe, dtype).reshape(chunks, size, heads, dim)
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


RETROINFER = in_every_layer(
    "retroinfer",
    chunk_tokens=16,
    digest="means",
    always=Ends(),
    window=2,
    own=OwnParts(
        layout=clusters,
        decoding=indexed(Estimating, keep=lru, make=mean_values, add=estimate, see=with_estimate),
    ),
)

RETROINFER_PLAIN = replace(
    RETROINFER,
    name="retroinfer-plain",
    own=OwnParts(layout=clusters, decoding=decoding(SelectFirst, keep=lru)),
)
"""Without estimation."""
