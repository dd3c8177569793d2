"""What rows of a decode batch chose, as the host sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ckv_jax.pipeline.choice_calls import Chosen
from ckv_jax.selection.base import Selection


class Outcome(NamedTuple):
    """What b rows chose, on the host; with J choices a row, these stand one after the other."""

    selection: Selection
    ids: np.ndarray
    """int32 [b, n]: those of the selection."""
    near: np.ndarray
    """int32 [b, <= n]: what nearly was chosen, best first, -1 elsewhere."""
    table: np.ndarray
    """int32 [b, n]: see `cache.window.Moves`."""
    misses: np.ndarray
    own: np.ndarray
    """float32 [b, M]: what the tokens themselves give every chunk."""

    @classmethod
    def of(cls, chosen: Chosen) -> Outcome:
        """Of all rows of a call; waits for it."""
        selection: Selection = jax.tree.map(np.asarray, chosen.selection)
        return cls(
            selection=selection,
            ids=np.asarray(selection.ids),
            near=np.asarray(chosen.near),
            table=np.asarray(chosen.moves.table),
            misses=np.asarray(chosen.moves.misses),
            own=np.asarray(chosen.own),
        )

    def rows(self, rows: slice) -> Outcome:
        """The same of some of them."""
        selection = Selection(*(part[rows] for part in self.selection))
        return Outcome(selection, *(part[rows] for part in self[1:]))

    def part(self, part: int, parts: int) -> Outcome:
        """The same of one of so many choices of every row."""
        return self.rows(slice(part, None, parts))

    def near_misses(self) -> np.ndarray:
        """What the rows nearly chose and none of them did, ascending, int64 [n]."""
        near = np.zeros(self.own.shape[1] + 1, bool)  # the last one is -1's
        near[self.near] = True
        near[self.ids] = False
        return np.flatnonzero(near[:-1])


def chunks_of(rows: Sequence[np.ndarray]) -> np.ndarray:
    """All chunk ids of some rows, each once, ascending, int64 [n]; -1 is none."""
    if not rows:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.bincount(np.concatenate(rows, axis=None) + 1)[1:])
