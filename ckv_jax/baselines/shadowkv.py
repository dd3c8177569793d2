"""ShadowKV: chunks of 8 by their mean keys, with outliers that are always attended to (`shadowkv`).

- Index: the mean key of each chunk of 8 tokens, per layer and KV head.
- Outliers: the chunks whose mean describes one of their keys worst (least cosine) take part in
  every selection, beside the budget: 48 of the 16,384 chunks of 128k tokens, and no larger share of
  a shorter prefix.
- Selection: per KV head, at every token, in every layer.
- Cache: the latest selection stays on the device (`window=1`); the rest comes through the engine's
  tiers, after all sequences have selected.
- Low-rank keys are left out. In the paper keys before RoPE stay on the device as products of rank
  160, and values alone are fetched; here keys and values are read as they are. A chunk of one head
  is the least that a direct read brings, so that from an SSD fetching half of it saves nothing
  (docs/decode.md has the arithmetic).
"""

from __future__ import annotations

from ckv_jax.config import SystemConfig
from ckv_jax.selection.select import Select

SHADOWKV = SystemConfig(
    name="shadowkv",
    selector="chunk",
    chunk_tokens=8,
    pack_layers=1,
    heads_apart=True,
    outliers=48 / 16_384,
    period=1,
    subperiod=1,
    probe="digest",
    digest="means+cosines",
    prefetch="intra",
    decode=Select(),
    window=1,
    keep="lru",
    sequential=True,
)
