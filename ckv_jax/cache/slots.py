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
        self._free = count
        self._owned = 0

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return self._free

    @property
    def owned(self) -> int:
        """Slots that belong to cached pages."""
        return self._owned

    def owner(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        """Page that owns each slot, or `FREE`, or `LENT`."""
        return self._owner[slots]

    def pages(self) -> npt.NDArray[np.int64]:
        """Pages that own a slot, in slot order."""
        return self._owner[self._owner >= 0]

    def take(self, n: int) -> SlotArray:
        """`n` free slots, now lent. The caller has checked `free`."""
        taken = self._stack[self._free - n : self._free][::-1].copy()
        self._free -= n
        self._owner[taken] = LENT
        return taken

    def assign(self, slots: SlotArray, pages: npt.NDArray[np.int64]) -> None:
        """Make pages the owners of slots that are lent."""
        self._owner[slots] = pages
        self._owned += len(slots)

    def put_back(self, slots: SlotArray) -> None:
        """Free distinct slots that are lent or owned."""
        n = len(slots)
        self._owned -= int((self._owner[slots] >= 0).sum())
        self._owner[slots] = FREE
        self._stack[self._free : self._free + n] = slots
        self._free += n
