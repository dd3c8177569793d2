"""Slots of one memory pool: who sits where, and which are free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FREE = -1
LENT = -2

SlotArray = npt.NDArray[np.int32]


class Slots:
    """`count` slots, each free, lent to a running request, or owned by a cached page.

    Plain bookkeeping: the memory behind a slot belongs to someone else.
    """

    def __init__(self, count: int) -> None:
        self._owner: npt.NDArray[np.int64] = np.full(count, FREE, np.int64)
        self._stack: SlotArray = np.arange(count, dtype=np.int32)[::-1].copy()
        self.free = count
        """Slots that are neither lent nor owned."""
        self.owned = 0
        """Slots that belong to cached pages."""
        self._mark = np.zeros(count, np.int32)

    def __len__(self) -> int:
        return len(self._owner)

    def require_lent(self, slots: SlotArray) -> None:
        """Refuse slots that are outside the pool, not lent, or given twice."""
        n = len(slots)
        if not n:
            return
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= len(self._owner):
            raise ValueError(f"got slots {low} to {high}, expected 0 to {len(self._owner) - 1}")
        ranks = np.arange(n, dtype=np.int32)
        self._mark[slots] = ranks
        if (self._owner[slots] != LENT).any() or (self._mark[slots] != ranks).any():
            raise ValueError("got device slots that are not lent, or one twice in one call")

    def pages(self) -> npt.NDArray[np.int64]:
        """Pages that own a slot, in slot order."""
        return self._owner[self._owner >= 0]

    def take(self, n: int) -> SlotArray:
        """`n` free slots, now lent. The caller has checked `free`."""
        taken = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self._owner[taken] = LENT
        return taken

    def assign(self, slots: SlotArray, pages: npt.NDArray[np.int64]) -> None:
        """Make pages the owners of slots that are lent."""
        self._owner[slots] = pages
        self.owned += len(slots)

    def put_back(self, slots: SlotArray) -> None:
        """Free distinct slots that are lent or owned."""
        n = len(slots)
        self.owned -= int((self._owner[slots] >= 0).sum())
        self._owner[slots] = FREE
        self._stack[self.free : self.free + n] = slots
        self.free += n
