"""Host buffers for probe keys, used again: fresh memory costs as much as half the read."""

from __future__ import annotations

import math
import threading
from collections import defaultdict

import numpy as np

from ckv_jax.memory.host import aligned_bytes

_KEPT = 2  # of a shape: one that is scored, one that is read into


class KeyBuffers:
    """Page-aligned arrays by shape. Thread-safe."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]]
        self._free = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array whose content is whatever was there before."""
        with self._lock:
            free = self._free[shape, dtype]
            if free:
                return free.pop()
        return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def give_back(self, buffer: np.ndarray) -> None:
        """Nobody reads or writes `buffer` any more."""
        with self._lock:
            if len(self._free) > _KEPT:  # lengths of prefixes that are no longer asked for
                self._free.clear()
            free = self._free[buffer.shape, buffer.dtype]
            if len(free) < _KEPT:
                free.append(buffer)
