"""PQCache: keys by product quantisation, blocks cached by how often they are used (`pqcache`).

- Index: product-quantised keys. Here a code of 8 bits for each 8 dimensions
  (`storage/digest/data.py`); the authors' script has 2 sub-vectors of 6 bits.
- Selection: in every layer, at every token, by the attention that the quantised keys give. Whole
  chunks of 16 are selected, all heads of a layer together; in the paper tokens, per KV head.
- Local tokens: what is generated is attended to. The paper keeps half of the budget for the
  latest tokens; here no token of the prefix is kept for its place.
- Cache: twice a selection stays on the device, least frequently used first out; the rest comes
  through the engine's tiers, after all sequences have selected.
"""

from __future__ import annotations

from ckv_jax.config import SystemConfig
from ckv_jax.selection.select import Select

PQCACHE = SystemConfig(
    name="pqcache",
    selector="chunk",
    chunk_tokens=16,
    pack_layers=1,
    period=1,
    subperiod=1,
    probe="digest",
    digest="pq",
    prefetch="inter",
    decode=Select(),
    window=2,
    keep="lfu",
    sequential=True,
)
