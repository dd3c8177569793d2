"""Quest: pages of keys, selected by an upper bound of their attention (`quest`).

- Index: the least and the greatest value of each dimension of a page's keys. Pages have 8 tokens,
  as in KVDrive's comparison; 16 in Quest's own.
- Selection: the sum over dimensions of the larger of q·min and q·max, at every token, in every
  layer. Each KV head selects by itself; its query heads select together, where Quest's evaluation
  has a selection for each query head. No layer is dense; in its evaluation the first two are.
- Sinks and local tokens: the chunks of the first 4 and the latest 64 tokens are attended to beside
  the budget (KVDrive §9.1).
- Cache: none, in the paper all pages stay on the device. Here a selection's packs are read for
  every token (`HoldNothing`), from what the engine's tiers keep, after all sequences have selected.
"""

from __future__ import annotations

from ckv_jax.baselines.decoding import ENDS, HoldNothing, decoding, lru
from ckv_jax.baselines.layouts import heads_apart
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.selection.select import Select

QUEST = SystemConfig(
    name="quest",
    chunk_tokens=8,
    pack_layers=1,
    period=1,
    subperiod=1,
    digest="bounds",
    prefetch="intra",
    decode=Select(),
    always=ENDS,
    window=1,
    own=OwnParts(layout=heads_apart, decoding=decoding(HoldNothing, keep=lru)),
)
