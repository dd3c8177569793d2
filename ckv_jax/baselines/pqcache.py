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

from ckv_jax.baselines.decoding import HalfLocal, SelectFirst, decoding, in_every_layer, lfu
from ckv_jax.config import OwnParts

PQCACHE = in_every_layer(
    "pqcache",
    chunk_tokens=16,
    digest="pq",
    always=HalfLocal(),
    window=2,
    own=OwnParts(decoding=decoding(SelectFirst, keep=lfu)),
)
