"""KVDrive: clusters, a sliding window on the device, and sequences in a pipeline (`kvdrive`).

- §4, hierarchical index: 16 alike tokens are a unit, known by their mean key, per layer and KV
  head. The paper clusters chunks of 4 tokens by k-means; here fours of neighbours are halved at the
  median until 16 tokens are left together, so that clusters are of one size.
- §5.1, sliding window with lookahead eviction: twice a selection stays on the device; what scores
  lowest at the current token leaves first.
- §5.2, window scaling: periods have windows of several widths, as `window_widths.profile_windows`
  found them for a model.
- §6.1, selection, fetch and compute apart: packs of the first sequences are read while later ones
  select; a layer then computes once for the whole batch. A selection is always by the layer's own
  queries.
- §6.2, pipeline tuning, is left out: windows and batches are what the configuration says.
- §7.1, warm-up by importance: the last 32 tokens of the question fill the windows; the host's
  memory is not filled before the first token.
- §7.2 and §7.3, storage: packs of one head and layer, read directly by the kernel's queue, as for
  every system with packs per head here. Extents that hold a cluster together are the packs.
- §9.1: the first 16 and the latest 64 tokens take part in every selection; in the paper 4 and 64.
"""

from __future__ import annotations

from ckv_jax.baselines.layouts import clusters
from ckv_jax.baselines.window_widths import ProfiledSelections
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.selection.select import Ends, Select

KVDRIVE = SystemConfig(
    name="kvdrive",
    chunk_tokens=16,
    pack_layers=1,
    period=1,
    subperiod=1,
    digest="means",
    prefetch="intra",
    choose=Select(queries=32),
    decode=Select(),
    always=Ends(),
    window=2,
    own=OwnParts(layout=clusters, decoding=ProfiledSelections),
)
