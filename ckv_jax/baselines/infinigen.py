"""InfiniGen: the layer before guesses what a layer attends to (`infinigen`).

- Guess: the hidden state that enters a layer makes the next layer's queries. They select what that
  layer attends to, and nothing corrects the guess (`Select(guessed=True)`): a read has a layer's
  time.
- Partial keys: the paper skews queries and keys offline, by a singular value decomposition, and
  scores a fifth of the columns. Here all columns are scored, in four bits.
- Number of tokens: a fixed share of chunks of 16 tokens, by the budget; in the paper all tokens
  within a distance of the largest score, up to a limit.
- Cache: nothing stays on the device between tokens (`window=0`). Heads of a layer select together.
"""

from __future__ import annotations

from ckv_jax.config import SystemConfig
from ckv_jax.selection.select import Select

INFINIGEN = SystemConfig(
    name="infinigen",
    selector="chunk",
    chunk_tokens=16,
    pack_layers=1,
    period=1,
    subperiod=1,
    probe="digest",
    digest="int4",
    prefetch="inter",
    decode=Select(guessed=True),
    window=0,
    keep="lru",
    sequential=True,
)
