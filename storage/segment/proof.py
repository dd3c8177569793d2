"""What a piece that was not good twice proves, once its own bytes are looked at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckv_jax.storage.errors import (
    SegmentDamaged,
    SegmentForeign,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.segment.deadline import Deadline
from ckv_jax.storage.segment.open_segments import Opened
from ckv_jax.storage.segment.segment import Segment

Report = Callable[[Segment | None, int, str, bool], None]
"""Told of a chunk that was not read: segment (None: it could not be opened), chunk within it,
reason, and whether it is proven to be bad, or gone."""


def is_gone(error: StoreError) -> bool:
    """Whether a segment could not be opened as it is gone, and not because of the disk."""
    return isinstance(error, SegmentDamaged | SegmentForeign)


class Proof:
    """Looks at pieces that could not be read, and tells of those that stay bad."""

    def __init__(self, tell: Report, patience: Patience) -> None:
        self._tell = tell
        self._patience = patience

    def prove(
        self,
        segment: Opened,
        kind: str,
        row: int,
        column: int,
        chunk: int,
        what: str,
        deadline: Deadline,
        out: np.ndarray | None = None,
    ) -> bool:
        """Look at a piece that was not good twice; report it, or put its bytes into uint8 `out`.

        Only what its own bytes prove bad is reported as bad: the reads may have failed for other
        reasons. Returns whether the piece turned out to be good.
        """
        if isinstance(segment, StoreError):
            self._tell(None, chunk, f"{what}: {segment}", is_gone(segment))
            return False
        try:
            data = self._patience.run(
                what, lambda: segment.reread(kind, row, column), seconds=deadline.left()
            )
        except StoreUnavailable as e:
            self._tell(segment, chunk, f"{what}: {e}", False)
            return False
        if data is None:
            self._tell(segment, chunk, f"{what}: not as it was written", True)
            return False
        if out is not None:
            out[:] = np.frombuffer(data, np.uint8)
        return True
