"""InfiniGen: the layer before guesses what a layer attends to (`infinigen`).

Lee et al. 2024 (OSDI '24, arXiv 2406.19707), and the authors' code.

- Guess: the hidden state that enters a layer makes the next layer's queries. They select what that
  layer attends to, and nothing corrects the guess (`Guessed`): a read has a layer's time.
- First layers: layer 0 selects by its own queries, and guesses for layer 1. The authors' code loads
  all KV of layers 0 and 1.
- Partial keys: a fifth of the columns of each head's skewed keys is scored. The paper skews by a
  singular value decomposition of calibration queries, offline; here the columns are the leading
  directions of the prefix's own keys (`PARTIAL`).
- Number of tokens: a fixed share of chunks of 16 tokens, by the budget; in the paper all tokens
  within a distance of the largest score, up to a limit.
- Heads of a layer select together; in the paper each has tokens of its own.
- Sinks and local tokens: the chunks of the first 4 and the latest 64 tokens are attended to beside
  the budget, as in all sparse baselines of KVDrive §9.1.
- Cache: nothing stays on the device between tokens (`HoldNothing`).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from ckv_jax.baselines.decoding import ENDS, HoldNothing, in_every_layer, indexed, lru
from ckv_jax.baselines.kvswap import Predicted, low_rank
from ckv_jax.config import OwnParts
from ckv_jax.selection.select import Select

PARTIAL = Fraction(1, 5)
"""Share of the columns of a head's skewed keys that is scored (the authors' script)."""


class Unheld(Predicted, HoldNothing):
    """Nothing but the guess is on the device."""


INFINIGEN = in_every_layer(
    "infinigen",
    chunk_tokens=16,
    digest="int4",
    decode=Select(),
    always=ENDS,
    window=1,
    own=OwnParts(
        decoding=indexed(Unheld, keep=lru, make=partial(low_rank, share=PARTIAL, each_head=True))
    ),
)
