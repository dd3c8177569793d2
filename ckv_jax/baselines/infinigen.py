"""InfiniGen: the layer before guesses what a layer attends to (`infinigen`).

- Guess: the hidden state that enters a layer makes the next layer's queries. They select what that
  layer attends to, and nothing corrects the guess (`Guessed`): a read has a layer's time.
- Partial keys: the paper skews queries and keys offline, by a singular value decomposition, and
  scores a fifth of the columns. Here all columns are scored, in four bits.
- Number of tokens: a fixed share of chunks of 16 tokens, by the budget; in the paper all tokens
  within a distance of the largest score, up to a limit.
- Sinks and local tokens: the chunks of the first 4 and the latest 64 tokens are attended to beside
  the budget, as in all sparse systems of KVDrive §9.1.
- Cache: nothing stays on the device between tokens (`HoldNothing`). Heads of a layer select
  together.
"""

from __future__ import annotations

from jax import Array
from jax.typing import ArrayLike

from ckv_jax.baselines.decoding import ENDS, HoldNothing, decoding, lru
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.decode.eviction import Keep
from ckv_jax.decode.selection import DecodeContext
from ckv_jax.selection.select import Select


class Guessed(HoldNothing):
    """What enters a period selects for the next one, whose packs are read while this one computes.

    Of earlier tokens the scores of their guesses count (`Select.queries`).
    """

    def __init__(self, context: DecodeContext, *, keep: Keep) -> None:
        super().__init__(context, keep=keep)
        self._guessed: int | None = None
        """The period whose packs are being read."""

    def begin(self, batch: int) -> None:
        """No period is guessed, see `DecodeSelection.begin`."""
        self._guessed = None
        super().begin(batch)

    def dispatched(self, period: int) -> None:
        """Starts reading what the next period attends to."""
        if period + 1 < self._plan.periods:
            try:
                super()._demand_all(period + 1)
            except BaseException:
                self.release()
                raise
            self._guessed = period + 1

    def score(self, period: int, hidden: Array, starts: ArrayLike) -> None:
        if self._guessed != period:
            super().score(period, hidden, starts)
        if period + 1 < self._plan.periods:
            super().score(period + 1, hidden, starts)

    def _demand_all(self, period: int) -> None:
        if self._guessed != period:
            super()._demand_all(period)


INFINIGEN = SystemConfig(
    name="infinigen",
    chunk_tokens=16,
    pack_layers=1,
    period=1,
    subperiod=1,
    digest="int4",
    decode=Select(),
    always=ENDS,
    window=1,
    own=OwnParts(decoding=decoding(Guessed, keep=lru)),
)
