"""The page pool of a device that computes in host memory: reads land where attention finds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.kernels_pallas.target import Target
from ckv_jax.memory.device import Decode
from ckv_jax.memory.host import HostPool
from ckv_jax.memory.pages import storage_dtype


class MappedPool:
    """`pages` [slots, pl, 2, C, K*D] is the memory of `packs` itself, seen as a device array.

    Any thread may fill a slot that no dispatched call reads; nothing is ever copied to a device.
    XLA knows nothing of such writes, so a slot changes hands only after the calls that were given
    it have ended (`PackSource.done`).
    """

    def __init__(
        self, slots: int, slot_shape: tuple[int, ...], dtype: np.dtype, target: Target
    ) -> None:
        self.packs: np.ndarray = HostPool(slots, slot_shape, dtype).packs
        bits = storage_dtype(jnp.dtype(dtype), target)
        self.pages: Array = _same_memory(self.packs.view(bits))
        """The array, the same until `close`."""

    @property
    def slots(self) -> int:
        """Packs that fit."""
        return len(self.packs)

    def warm(self, rows: Sequence[int], packs: int) -> None:
        """Nothing to be done; see `DevicePool.warm`."""

    def write(self, rows: np.ndarray, slots: np.ndarray, *, decode: Decode | None = None) -> None:
        """Copies packs `rows` [n, pl, 2, C, K*D] into `slots` [n]; slot -1 drops its row.

        With `decode`, rows are what that makes packs of.
        """
        if decode is not None:
            rows = np.asarray(decode(rows)).view(self.packs.dtype)
            rows = rows.reshape(-1, *self.packs.shape[1:])
        _copy(rows, self.packs, slots)

    def load(self, host: HostPool, host_slots: np.ndarray, slots: np.ndarray) -> int:
        """Packs from host slots [n] to device slots [n]. Returns the bytes moved."""
        _copy((host.packs[row] for row in host_slots), self.packs, slots)
        return len(slots) * host.pack_bytes

    def save(self, host: HostPool, slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Packs from device slots [n] to host slots [n]."""
        _copy((self.packs[slot] for slot in slots), host.packs, host_slots)

    def flush(self, host: HostPool) -> None:
        """Nothing is ever on its way; see `DevicePool.flush`."""

    def close(self) -> None:
        """Gives the memory back once no read or call has it. There are no pages any more."""
        self.packs = self.packs[:0].copy()  # a view would keep all of it
        del self.pages


def _copy(packs: Iterable[np.ndarray], to: np.ndarray, slots: np.ndarray) -> None:
    """Each pack into its slot, one by one: no array of all of them in between."""
    for pack, slot in zip(packs, slots.tolist(), strict=True):
        if slot >= 0:
            to[slot] = pack


def _same_memory(packs: np.ndarray) -> Array:
    """The packs as a device array that is committed to no device, as those of a model are: JAX
    would compile every call a second time for what was computed from a committed one."""
    array: Array = jax.device_put(packs, may_alias=True)
    if packs.size and array.unsafe_buffer_pointer() != packs.ctypes.data:
        array = jax.dlpack.from_dlpack(packs, copy=False)
    return array
