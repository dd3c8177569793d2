"""Quest: pages of keys, selected by an upper bound of their attention (`quest`).

- Index: the least and the greatest value of each dimension of a page's keys. Pages have 8 tokens,
  as in KVDrive's comparison; 16 in Quest's own.
- Selection: the sum over dimensions of the larger of q·min and q·max, at every token, in every
  layer. Each KV head selects by itself; its query heads select together, where Quest's evaluation
  has a selection for each query head. No layer is dense; in the paper the first two are.
- Cache: none, in the paper all pages stay on the device. Here a selection's packs are read for
  every token (`window=0`), from what the engine's tiers keep, after all sequences have selected.
"""

from __future__ import annotations

from ckv_jax.config import SystemConfig
from ckv_jax.selection.select import Select

QUEST = SystemConfig(
    name="quest",
    selector="chunk",
    chunk_tokens=8,
    pack_layers=1,
    heads_apart=True,
    period=1,
    subperiod=1,
    probe="digest",
    digest="bounds",
    prefetch="intra",
    decode=Select(),
    window=0,
    keep="lru",
    sequential=True,
)
