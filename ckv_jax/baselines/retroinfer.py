"""RetroInfer: clusters of alike keys as the unit of selection (`retroinfer`).

- Index: clusters of 16 tokens on average, over runs of 8,192 tokens, per layer and KV head. The
  paper has segmented k-means over centred keys; here fours of neighbours are halved at the median
  of their principal direction until 16 tokens are left together, so that each cluster is exactly a
  chunk.
- Steady zone: a prefix's first and latest tokens take part in every selection, beside the budget:
  16 and 64 tokens, in the paper 4 and 64.
- Retrieval zone: the clusters with the best mean keys, per KV head, at every token.
- Estimation zone (23.2% of the clusters by their means alone) is left out: on the reference
  checkpoint it gained nothing (docs/decode.md).
- Cache: twice a selection stays on the device, least recently used first out; the rest comes
  through the engine's tiers, after all sequences have selected.
- Index updates: every 1,024 generated tokens become a segment with an index of its own
  (`EngineConfig.segment_tokens`), as for every system here.
"""

from __future__ import annotations

from ckv_jax.baselines.decoding import SelectFirst, decoding, lru
from ckv_jax.baselines.layouts import clusters
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.selection.select import Ends, Select

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
    own=OwnParts(layout=clusters, decoding=decoding(SelectFirst, keep=lru)),
)
