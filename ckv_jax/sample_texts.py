"""Texts that a model is profiled on, cut into pieces that are computed at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["PIECE", "pieces_of"]

PIECE = 1024
"""Tokens that are attended to together."""
_LEAST = 64


def pieces_of(texts: Sequence[np.ndarray], tokens: int) -> list[np.ndarray]:
    """About so many tokens of all texts int32 [n] together, in pieces of at most `PIECE`, as many
    of each text as of any other. Raises ValueError for texts that are too short."""
    each = max(_LEAST, tokens // len(texts))
    found = []
    for text in texts:
        text = text[:each]
        size = min(PIECE, len(text))
        found += [text[first : first + size] for first in range(0, len(text) - size + 1, size)]
    if not found or min(map(len, found)) < _LEAST:
        short = min(map(len, texts))
        raise ValueError(f"got a text of {short} tokens, expected at least {_LEAST}")
    return found
