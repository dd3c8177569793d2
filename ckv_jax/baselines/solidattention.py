"""SolidAttention: coarse blocks, read ahead by what the token before selected (`solidattention`).

Zheng et al., FAST '26. The paper was not at hand: this follows its abstract and a public
reproduction (github.com/ZjuXxxc/solidattention-repro).

- Blocks: keys and values of 32 tokens lie together, all heads of a layer, so that one read brings
  them.
- Budget: half of it for the latest tokens (`HalfLocal`), half for selected blocks.
- Selection: in every layer, at every token, by the blocks' mean keys; the reproduction has
  InfLLM's representatives.
- Speculative prefetching: while a layer computes, the blocks are read that the next layer selected
  for the token before. What else it selects is read then (`ReadBefore`), in any order.
- Cache: buffers are shared by all layers, so that nothing stays on the device between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckv_jax.baselines.decoding import HalfLocal, HoldNothing, decoding, in_every_layer, lru
from ckv_jax.config import OwnParts
from ckv_jax.decode.window import PrefixRows


class ReadBefore(HoldNothing):
    """What the next period selected for the token before is read while a period computes."""

    _before: np.ndarray | None = None
    """Chunks int [B, selections, N] of the token before, -1: none."""
    _of: Sequence[PrefixRows] = ()
    """The rows that they are of."""

    def dispatched(self, period: int) -> None:
        """Starts those reads, behind all demands."""
        if self._before is None or self._of is not self._by_prefix:
            return
        if period + 1 == self._plan.periods:
            return
        for selection in self._plan.selections_of(period + 1):
            for on in self._by_prefix:
                ids = self._before[on.rows[: len(on.selectors)], selection]
                for group in self._plan.groups(selection):
                    self._opened().ahead(on.which, group, np.unique(ids[ids >= 0]))

    def finish(self) -> None:
        self._before, self._of = self._windows.kept.ids.copy(), self._by_prefix
        super().finish()


SOLIDATTENTION = in_every_layer(
    "solidattention",
    chunk_tokens=32,
    digest="means",
    always=HalfLocal(),
    own=OwnParts(decoding=decoding(ReadBefore, keep=lru)),
)
