"""FlexGen, and the dense reference: all of a prefix at every token (`flexgen`, `dense`).

Sheng et al. 2023 (arXiv 2303.06865). Both are asked at a budget of 1, where nothing is selected.
They differ in what stays in memory: `dense` has packs of four layers and is measured with all of
its KV on the device.

- Tensor placement: the KV cache alone leaves the device; `EngineConfig` says how many bytes of it
  stay on the device and in the host's memory. The paper spreads weights and activations as well, by
  shares that a linear program finds.
- Block schedule: the KV of the next layer is read while one layer computes, one sequence after the
  other, without the zig-zag over batches: weights stay on the device.
- Compression to 4 bits (optional in the paper) is left out.
"""

from __future__ import annotations

from ckv_jax.config import SystemConfig

DENSE = SystemConfig(
    name="dense", period=4, subperiod=4, pack_layers=4, digest="means", prefetch="previous",
)  # fmt: skip

FLEXGEN = SystemConfig(
    name="flexgen", period=1, subperiod=1, pack_layers=1, digest="means", prefetch="previous",
)  # fmt: skip
