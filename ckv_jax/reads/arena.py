"""Bounded host memory for reads: page-aligned contiguous blocks out of one mapping."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from ckv_jax.memory.host import PAGE_BYTES, aligned_bytes


class BufferArena:
    """First-fit blocks of whole memory pages. Not thread-safe: its owner holds a lock.

    Args:
        size: bytes in all, rounded down to whole memory pages.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"got an arena of {size} bytes, expected 0 or more")
        self.size = size // PAGE_BYTES * PAGE_BYTES
        self.used = 0
        self._memory = aligned_bytes(self.size)
        self._holes: list[tuple[int, int]] = [(0, self.size)] if self.size else []

    def take(self, size: int) -> tuple[int, npt.NDArray[np.uint8]] | None:
        """A block of `size` bytes as (offset, uint8 view), or None if no hole is large enough.

        The bytes are whatever was there before.
        """
        need = _rounded(size)
        for index, (start, room) in enumerate(self._holes):
            if room >= need:
                if room == need:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + need, room - need)
                self.used += need
                return start, self._memory[start : start + size]
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Free a block from `take`."""
        start, room = offset, _rounded(size)
        self.used -= room
        index = bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and start + room == self._holes[index][0]:
            room += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            start, before = self._holes.pop(index - 1)
            room += before
            index -= 1
        self._holes.insert(index, (start, room))


def _rounded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
