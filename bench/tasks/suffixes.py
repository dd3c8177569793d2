"""Longer suffixes: a question that comes after some sentences that ask nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckv_jax.data import words
from ckv_jax.data.ledger import Ledger

__all__ = ["lengthened"]

_FILLERS = np.array([words.WORD_IDS[word] for word in words.FILLERS], np.int32)
_DOT = np.int32(words.WORD_IDS["."])
_SENTENCE = 6  # words and full stop


def lengthened(page: Ledger, tokens: int, seed: int = 0) -> Ledger:
    """`page` with every suffix `tokens` long: sentences of filler words, then the question.

    The sentence before the question ends with a full stop. Raises ValueError if a question is
    longer than `tokens`.
    """
    longest = int(page.lengths.max(initial=0))
    if longest > tokens:
        raise ValueError(f"got suffixes of {tokens} tokens, expected at least {longest}")
    rng = np.random.default_rng((seed, tokens, 11))
    suffixes = rng.choice(_FILLERS, (len(page.answers), tokens))
    for row, question, length in zip(suffixes, page.questions, page.lengths, strict=True):
        row[tokens - length - 1 :: -_SENTENCE] = _DOT
        row[tokens - length :] = question[:length]
    return replace(
        page, questions=suffixes.astype(np.int32), lengths=np.full_like(page.lengths, tokens)
    )
