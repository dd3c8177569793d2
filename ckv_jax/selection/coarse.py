"""`Coarse`: the first of two stages of a choice, which leaves few chunks to score with care."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckv_jax.buckets import batch_bucket
from ckv_jax.errors import check_whole

_LEAST = 64
"""Rooms for survivors are powers of two from here: programs that select are many."""
_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Coarse:
    """A coarse pass over all chunks: the last few queries of some of the layers that score.

    It leaves `survivors` chunks for each that may be chosen, or a quarter of all where that is
    fewer; all queries of all scoring layers then decide among those alone. Its cost grows with the
    prefix, that of the rest with the choice: where a quarter are not `fewest` for each, all are
    scored as without it.
    """

    score_layers: int = 1
    """How many of the layers that score: the middles of as many even parts of them. On the
    reference checkpoint the second of three left what all three choose, the first and last less."""
    queries: int = 1
    """The last so many of the queries that score; a token of a text has one of its own."""
    survivors: int = 8
    """Chunks that are left for each that may be chosen."""
    fewest: int | None = None
    """As many at least; None: `survivors`."""
    least: int = 1
    """Chunks that are left in any case: where few may be chosen, a few times as many are soon
    scored, and say less for certain what is among them."""

    def __post_init__(self) -> None:
        check_whole("score_layers", self.score_layers, least=1)
        check_whole("queries", self.queries, least=1)
        check_whole("survivors", self.survivors, least=1, most=_MOST)
        check_whole("least", self.least, least=1, most=_MOST)
        if self.fewest is not None:
            check_whole("fewest", self.fewest, least=1, most=self.survivors)

    def layers(self, scoring: int) -> list[int]:
        """Which of so many scoring layers ask."""
        count = min(self.score_layers, scoring)
        return [(2 * part + 1) * scoring // (2 * count) for part in range(count)]

    def left(self, limits: Any, chunks: Any) -> Any:
        """How many of `chunks` are left for rows that may choose `limits` int32 [B], numpy's or a
        device's, of them; 0: all are scored."""
        quarter = chunks // 4
        wanted = (limits * self.survivors).clip(self.least)
        needed = (limits * (self.fewest or self.survivors)).clip(self.least)
        stands = (limits > 0) & (needed <= quarter)
        return wanted.clip(None, quarter) * stands.astype(limits.dtype)

    def stages(self, limits: np.ndarray, chunks: int) -> Stages | None:
        """What a call for rows with `limits` int32 [B] is compiled for; None: one stage for all."""
        left = self.left(limits, chunks)
        if not left.any():
            return None
        room = batch_bucket(max(_LEAST, int(left.max())))
        return Stages(self, room, bool((limits > left).any()))


class Stages(NamedTuple):
    """What is static of a choice in two stages."""

    coarse: Coarse
    room: int
    """Chunks that a row has left at most, and more."""
    some_whole: bool
    """Whether some rows have all of their chunks scored."""
