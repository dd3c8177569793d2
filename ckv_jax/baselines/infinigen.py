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

from ckv_jax.baselines.decoding import ENDS, Guessed, HoldNothing, decoding, lru
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.selection.select import Select


class Unheld(Guessed, HoldNothing):
    """Nothing but the guess is on the device."""


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
    own=OwnParts(decoding=decoding(Unheld, keep=lru)),
)
