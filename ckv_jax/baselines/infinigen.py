"""InfiniGen: the layer before guesses what a layer attends to (`infinigen`).

Lee et al. 2024 (OSDI '24, arXiv 2406.19707), and the authors' code.

- Guess: the hidden state that enters a layer makes the next layer's queries. They select what that
  layer attends to, and nothing corrects the guess (`Guessed`): a read has a layer's time. Layer 0
  selects by its own queries, and guesses for layer 1.
- Partial keys: a fifth of the columns of each head's skewed keys is scored (`PARTIAL`): the leading
  directions of the prefix's own keys, in the paper those of calibration queries.
- Number of tokens: a share of chunks of 16 tokens, by the budget; in the paper all tokens within a
  distance of the largest score. Heads of a layer select together.
- Cache: nothing stays on the device between tokens (`HoldNothing`).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from ckv_jax.baselines.decoding import (
    HoldNothing,
    Predicted,
    in_every_layer,
    indexed,
    low_rank,
    lru,
)
from ckv_jax.config import OwnParts

PARTIAL = Fraction(1, 5)
"""Share of the columns of a head's skewed keys that is scored (the authors' script)."""


class Unheld(Predicted, HoldNothing):
    """Nothing but the guess is on the device."""


INFINIGEN = in_every_layer(
    "infinigen",
    chunk_tokens=16,
    digest="int4",
    own=OwnParts(
        decoding=indexed(Unheld, keep=lru, make=partial(low_rank, share=PARTIAL, each_head=True))
    ),
)
