"""ContiguousKV, as its paper describes it (`contiguous-kv`).

- §4.2, chunks: 16 tokens are the unit of selection, reading, caching and eviction. A pack holds
  keys and values of four layers together; the paper's hold one layer.
- §4.3.1, selection: the first layer of a period of 8 selects for all of it by its own keys, which
  lie in an array of their own and are read before. The selected chunks' keys of that layer are read
  twice, once in the probe and once in their pack; in the paper once.
- §4.3.2, prefetch: within a period subperiod by subperiod (of 4 layers); across periods what the
  period before selected is read ahead, then the difference. Demands go first.
- §4.4, Equation 1: attention of all tokens of the question, summed by chunk. The softmax goes over
  the prefix alone, not over prefix and suffix.
- §4.4, Equation 2: a chunk is worth the attention it received while selected, times its uses, in
  memory or not; two heaps, no pack in both tiers.

The paper generates no text. Here a generation goes on with what the re-prefill selected.
"""

from __future__ import annotations

from ckv_jax.config import SystemConfig

CONTIGUOUS_KV = SystemConfig(
    name="contiguous-kv",
    selector="chunk",
    period=8,
    subperiod=4,
    pack_layers=4,
    probe="keys",
    speculate="previous",
    policy="attention",
)
