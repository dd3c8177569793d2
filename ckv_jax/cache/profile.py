"""What texts chose, written down token by token, and the window widths that it asks for (KVDrive
§5.2)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ckv_jax.cache.replay import misses_by_width
from ckv_jax.cache.widths import TIMES, Widths, spread
from ckv_jax.decode.eviction import Keep

__all__ = ["FIRST", "Recorded", "widths_of"]

FIRST = 16
"""Tokens of a text that fill its windows, and are not counted."""

_FINE = 1000  # parts of a choice that widths cost


class Recorded:
    """One text's choices, in the order in which it made them."""

    def __init__(self) -> None:
        self._ids: dict[int, list[np.ndarray]] = defaultdict(list)
        self._scores: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(self, choice: int, ids: np.ndarray, scores: np.ndarray) -> None:
        """A token took chunks `ids` int [n] for a choice, which gave all chunks `scores` [M]."""
        self._ids[choice].append(ids)
        self._scores[choice].append(scores)

    def arrays(self, choices: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T, 1, R, N], scores float32 [T, 1, R, M]), as `misses_by_width` takes them;
        T = 0 where there is nothing. Choices of an unfinished token are left out."""
        steps = min((len(self._ids[choice]) for choice in range(choices)), default=0)
        if not steps:
            return np.zeros((0, 1, choices, 1), np.int32), np.zeros((0, 1, choices, 1), np.float32)
        count = max(len(ids) for choice in range(choices) for ids in self._ids[choice])
        ids = np.full((steps, 1, choices, count), -1, np.int32)
        for choice in range(choices):
            for step, chosen in enumerate(self._ids[choice][:steps]):
                ids[step, 0, choice, : len(chosen)] = chosen
        scores = [self._scores[choice][:steps] for choice in range(choices)]
        return ids, np.stack([np.stack(one) for one in scores], axis=1)[:, None].astype(np.float32)


def widths_of(
    texts: list[Recorded], packs: np.ndarray, times: float, keep: Keep, *, rows: int = 1,
    first: int = FIRST,
) -> Widths:  # fmt: skip
    """The widths that leave these texts least to fetch, of windows of `times` choices on average.

    Args:
      packs: int [P], packs of one chunk in each choice of a period.
      rows: choices of each period: one, or one for each KV head.
      first: tokens of each text that fill its windows.

    Raises:
      ValueError: windows of one choice, or no text with more choices than `first`.
    """
    if times <= 1:
        raise ValueError(f"got window={times:g}, expected more than one choice to be spread")
    packs = np.repeat(packs, rows)
    missed = np.zeros((len(packs), len(TIMES)), np.int64)
    counted = 0
    for text in texts:
        ids, scores = text.arrays(len(packs))
        if len(ids) <= first:
            continue
        counted += 1
        slots = np.ceil(np.array(TIMES) * ids.shape[-1]).astype(np.int32)
        missed += misses_by_width(ids, scores, slots, keep, skip=first)
    if not counted:
        raise ValueError(
            f"got no text that chose for more than {first} tokens, expected one at least: longer "
            "texts, over longer prefixes or under a smaller budget"
        )
    cost = np.round(np.array(TIMES) * _FINE).astype(np.int64)[None, :] * packs[:, None]
    option = spread(-missed * packs[:, None], cost, int(times * _FINE) * int(packs.sum()))
    found = [TIMES[taken] for taken in option]
    return Widths(times=tuple(zip(*[iter(found)] * rows, strict=True)))
