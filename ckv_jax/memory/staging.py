"""Two staging blocks that alternate on the way from the host pool to the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jax import Array

from ckv_jax.memory.host import HostPool, aligned_bytes


class Staging:
    """Copies scattered host packs into one of two contiguous blocks and sends that block on.

    While the device consumes one block the other is filled; a block is reused only once the
    write that read it is done. Engine thread only.
    """

    def __init__(
        self,
        rows: int,
        slot_shape: tuple[int, ...],
        dtype: np.dtype,
        write: Callable[[np.ndarray, np.ndarray], Array],
    ) -> None:
        size = rows * math.prod(slot_shape) * dtype.itemsize
        self._blocks = [
            aligned_bytes(size).view(dtype).reshape(rows, *slot_shape) for _ in range(2)
        ]
        self._markers: list[Array | None] = [None, None]
        self._turn = 0
        self._rows = rows
        self._write = write

    @property
    def rows(self) -> int:
        """Packs in one block."""
        return self._rows

    def send(self, host: HostPool, host_slots: np.ndarray, device_slots: np.ndarray) -> int:
        """Packs from host slots [n] to device slots [n]. Returns the bytes moved."""
        moved = 0
        for first in range(0, len(host_slots), self._rows):
            part = slice(first, min(first + self._rows, len(host_slots)))
            block = self._next()[: part.stop - part.start]
            host.read(host_slots[part], block)
            self._markers[self._turn] = self._write(block, device_slots[part])
            moved += block.nbytes
        return moved

    def drain(self) -> None:
        """Waits until no block is in use."""
        for marker in self._markers:
            if marker is not None:
                marker.block_until_ready()
        self._markers = [None, None]

    def _next(self) -> np.ndarray:
        self._turn = 1 - self._turn
        marker = self._markers[self._turn]
        if marker is not None:
            marker.block_until_ready()
        return self._blocks[self._turn]
