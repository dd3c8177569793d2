"""The page pool of a device with memory of its own: one array of slots, for packs cached or new.

A fresh pack is written once into a free slot and attended from there; keeping it in the cache
later is a relabelling (`cache.Tiers`), never a copy. The gather of a layer therefore reads cached
and fresh packs alike, by slot number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.kernels_pallas.target import Target
from ckv_jax.memory.host import HostPool
from ckv_jax.memory.pages import storage_dtype
from ckv_jax.memory.staging import Staging
from ckv_jax.model.shardings import ONE_DEVICE, PAGES, Shardings

STAGING_ROWS = 16

Decode = Callable[[Array | np.ndarray], Array]
"""Packs [n, *pack_shape], or their bit patterns, from what lay on disk [n, *stored_shape]."""


class DevicePool:
    """`pages` is [slots, pl, 2, C, K*D]. Engine thread only: writes donate the array."""

    def __init__(
        self,
        slots: int,
        slot_shape: tuple[int, ...],
        dtype: np.dtype,
        target: Target,
        shardings: Shardings = ONE_DEVICE,
    ) -> None:
        self._dtype = storage_dtype(jnp.dtype(dtype), target)
        place = shardings.place(PAGES)
        self._pages = jnp.zeros((slots, *slot_shape), self._dtype, device=place)
        self._write = jax.jit(_write, donate_argnums=0)
        self._read = jax.jit(lambda pages, slots: pages[slots])
        device = next(iter(self._pages.devices()))
        kinds = {memory.kind for memory in device.addressable_memories()}
        here = self._pages.sharding
        if target.platform == "tpu" and "pinned_host" in kinds:
            self._way = [here.with_memory_kind("pinned_host"), here]
        elif shardings.mesh is not None:  # each device its part
            self._way = [here]
        else:  # the call itself takes it, at a quarter of `device_put`'s overhead
            self._way = []
        self._staging = Staging(STAGING_ROWS, slot_shape, np.dtype(dtype), self.write)
        self._copies: list[tuple[Array, np.ndarray]] = []

    @property
    def pages(self) -> Array:
        """The array as it is now; a later `write` invalidates it."""
        return self._pages

    @property
    def slots(self) -> int:
        """Packs that fit."""
        return int(self._pages.shape[0])

    def write(self, rows: np.ndarray, slots: np.ndarray, *, decode: Decode | None = None) -> Array:
        """Copies packs `rows` [n, pl, 2, C, K*D] into `slots` [n]; slot -1 drops its row.

        With `decode`, rows are what that makes packs of, on the device. Every n compiles once, so
        callers round it up.

        Returns a marker that is ready when `rows` may be overwritten: on a CPU the transfer
        aliases the caller's memory.
        """
        fresh = self._transfer(rows.view(self._dtype) if decode is None else rows)
        if decode is not None:
            fresh = decode(fresh).view(self._dtype)
        nowhere = self.slots + np.arange(len(slots))  # distinct, as the scatter is promised
        where = np.where(slots < 0, nowhere, slots).astype(np.int32)
        marker: Array
        self._pages, marker = self._write(self._pages, fresh, where)
        return marker

    def read(self, slots: np.ndarray) -> Array:
        """The packs in `slots` [n], as they are after everything dispatched so far.

        The result has n rounded up to a power of two rows; those past n mean nothing.
        """
        size = 1 << (len(slots) - 1).bit_length()  # few shapes: the rest repeats slot 0
        where = np.zeros(size, np.int32)
        where[: len(slots)] = slots
        packs: Array = self._read(self._pages, where)
        return packs

    def warm(self, rows: Sequence[int], packs: int) -> None:
        """Compiles writes of `rows` packs and of all that staging makes, reads of up to `packs`."""
        for count in sorted({*rows, *range(1, STAGING_ROWS + 1)}):
            nothing = np.zeros((count, *self._pages.shape[1:]), self._dtype)
            self.write(nothing, np.full(count, -1, np.int32)).block_until_ready()
        size = 1
        while size < 2 * packs:
            self.read(np.zeros(min(size, packs), np.int32)).block_until_ready()
            size *= 2

    def load(self, host: HostPool, host_slots: np.ndarray, slots: np.ndarray) -> int:
        """Packs from host slots [n] to device slots [n]. Returns the bytes moved."""
        self.flush(host)  # a pack demoted in this very request may still be on its way
        return self._staging.send(host, host_slots, slots)

    def save(self, host: HostPool, slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Starts copies of packs from device slots [n] to host slots [n]."""
        self._copies.append((self.read(slots), host_slots))

    def flush(self, host: HostPool) -> None:
        """Waits for the copies that `save` started."""
        for packs, slots in self._copies:
            host.write(slots, np.asarray(packs)[: len(slots)].view(host.packs.dtype))
        self._copies.clear()

    def close(self) -> None:
        """Gives the memory back; the pool is of no use any more."""
        self._copies.clear()
        self._pages.delete()

    def _transfer(self, rows: np.ndarray) -> Array | np.ndarray:
        """Puts rows into each place of the way in turn."""
        fresh: Array | np.ndarray = rows
        for place in self._way:
            fresh = jax.device_put(fresh, place)
        return fresh


def _write(pages: Array, fresh: Array, slots: Array) -> tuple[Array, Array]:
    # The marker depends on the write's operands, so it is ready no sooner than they are consumed.
    fresh = fresh.reshape(-1, *pages.shape[1:])
    pages = pages.at[slots].set(fresh, mode="drop", unique_indices=True)
    return pages, pages[0, 0, 0, 0]  # a row that every device has a part of
