"""Beginnings that several prompts share: what is worth storing once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

__all__ = ["LEAST", "shared_beginnings"]

LEAST = 256
"""Tokens: computing fewer again costs no more than a place of their own in the store."""


def shared_beginnings(prompts: Sequence[np.ndarray], *, least: int = LEAST) -> list[int]:
    """For each prompt int32 [n], how many of its first tokens some other prompt begins with too.

    0 where those are fewer than `least`. A prompt's last token is never among them, so that there
    is something to ask.
    """
    # In the order of a dictionary, no other shares more with a prompt than its neighbours do.
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">i4").tobytes())
    longest = [0] * len(prompts)
    for one, other in pairwise(order):
        common = _common(prompts[one], prompts[other])
        for i in (one, other):
            longest[i] = max(longest[i], min(common, len(prompts[i]) - 1))
    return [count if count >= least else 0 for count in longest]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
