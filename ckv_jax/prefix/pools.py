"""Pools of packs: in device memory, mapped where the device uses host memory, and in the host."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from jaxtyping import Int32

from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import ONE_DEVICE, PAGES, Shardings
from ckv_jax.storage.layout import Layout

STAGING_ROWS = 16

_log = logging.getLogger(__name__)

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
            self._transfer_shardings = [here.with_memory_kind("pinned_host"), here]
        elif shardings.mesh is not None:  # each device its part
            self._transfer_shardings = [here]
        else:  # the call itself takes it, at a quarter of `device_put`'s overhead
            self._transfer_shardings = []
        size = STAGING_ROWS * math.prod(slot_shape) * dtype.itemsize
        self._blocks = [
            aligned_bytes(size).view(dtype).reshape(STAGING_ROWS, *slot_shape) for _ in range(2)
        ]
        self._markers: list[Array | None] = [None, None]  # of the writes that read them
        self._turn = 0
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
        fresh: Array | np.ndarray = rows.view(self._dtype) if decode is None else rows
        for place in self._transfer_shardings:
            fresh = jax.device_put(fresh, place)
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
        """Packs from host slots [n] to device slots [n]. Returns the bytes moved.

        Scattered packs are copied into one of two blocks, which is sent on while the other is
        filled; a block is reused once the write that read it is done.
        """
        self.flush(host)  # a pack demoted in this very request may still be on its way
        for first in range(0, len(slots), STAGING_ROWS):
            part, self._turn = slice(first, first + STAGING_ROWS), 1 - self._turn
            marker = self._markers[self._turn]
            if marker is not None:
                marker.block_until_ready()
            block = self._blocks[self._turn][: len(slots[part])]
            # "clip" spares the temporary copy that "raise" makes
            np.take(host.packs, host_slots[part], axis=0, out=block, mode="clip")
            self._markers[self._turn] = self.write(block, slots[part])
        return len(slots) * host.pack_bytes

    def save(self, host: HostPool, slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Starts copies of packs from device slots [n] to host slots [n]."""
        self._copies.append((self.read(slots), host_slots))

    def flush(self, host: HostPool) -> None:
        """Waits for the copies that `save` started."""
        for packs, slots in self._copies:
            host.packs[slots] = np.asarray(packs)[: len(slots)].view(host.packs.dtype)
        self._copies.clear()

    def close(self) -> None:
        """Gives the memory back; the pool is of no use any more."""
        self._copies.clear()
        self._pages.delete()


def _write(pages: Array, fresh: Array, slots: Array) -> tuple[Array, Array]:
    # The marker depends on the write's operands, so it is ready no sooner than they are consumed.
    fresh = fresh.reshape(-1, *pages.shape[1:])
    pages = pages.at[slots].set(fresh, mode="drop", unique_indices=True)
    return pages, pages[0, 0, 0, 0]  # a row that every device has a part of


def storage_dtype(dtype: jnp.dtype, target: Target) -> jnp.dtype:
    """The element type of KV that is updated in place on this target.

    XLA's CPU backend widens 16-bit floats around every update, which copies the whole array:
    a pool of bit patterns stays in place. Measured: 0.06 ms against 166 ms for 16 packs.
    """
    if target.platform == "cpu" and dtype.itemsize == 2:
        return np.dtype(np.uint16)
    return dtype


def slot_shape(layout: Layout) -> tuple[int, int, int, int]:
    """`(pl, 2, C, K*D)`: a pack as the pools keep it, the same bytes as `Layout.pack_shape`.

    With a token's heads in one row no accelerator pads or reorders a slot of few or narrow heads.
    """
    pack, kinds, chunk, heads, dim = layout.pack_shape
    return pack, kinds, chunk, heads * dim


def as_rows(x: Array) -> Array:
    """[..., K, D] to [..., K*D]: a token's heads side by side, as pools and buffers keep them."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def as_bits(x: Array, dtype: jnp.dtype) -> Array:
    """The same bits as elements of `dtype`."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def positions(start: Int32[Array, " B"], length: int) -> Int32[Array, "B S"]:
    """Positions of `length` tokens of each row, from `start[b]` on."""
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]


def layer_pages(
    pages: Array, slots: Array, index: Array | int
) -> tuple[Array, tuple[Array, Array]]:
    """The pool as pages of one layer's K or V, and the two tables into it of layer `index` of its
    packs.

    `pages` [slots, pl, 2, C, K*D]; `slots` [..., N], -1 where there is none.
    """
    pool = pages.reshape(-1, *pages.shape[3:])  # [slots * pl * 2, C, K*D]
    keys = jnp.where(slots >= 0, (slots * pages.shape[1] + index) * 2, -1)
    return pool, (keys, jnp.where(slots >= 0, keys + 1, -1))


_LARGE = 4 << 20  # two large pages: what is smaller keeps to what it needs


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """`size` zero bytes that start on a memory page.

    The operating system provides the pages as they are first touched, so a generous budget costs
    nothing until it is used; the memory goes back once no array refers to it. Large pages are asked
    for: a fault for every 4 KiB of a pack takes longer than its copy. A forked process does not get
    the memory: a read past the page cache that is in progress then could land in the other's copy.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux, which alone reads past its page cache into this
        memory.madvise(mmap.MADV_DONTFORK)
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class PageLocked:
    """Memory that a GPU copies from without a stop: its driver holds the pages in place.

    Six times the rate of pageable memory was measured. Where CUDA's runtime is missing or
    refuses, copies take the slower way, which is logged once.
    """

    def __init__(self) -> None:
        self._runtime = _cuda_runtime()
        self._refused = False
        self._locked: list[npt.NDArray[np.uint8]] = []

    def lock(self, memory: npt.NDArray[np.uint8]) -> bool:
        """Locks the pages of `memory` until `close`; whether that worked."""
        if memory.size == 0:
            return False
        why = "no CUDA runtime"
        if self._runtime is not None:
            address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
            error = self._runtime.cudaHostRegister(address, size, ctypes.c_uint(0))
            if not error:
                self._locked.append(memory)
                return True
            self._runtime.cudaGetLastError()  # else the next call of another library reports it
            why = f"CUDA error {error}"
        if not self._refused:
            _log.warning("cannot page-lock host memory, copies to the device are slower: %s", why)
            self._refused = True
        return False

    def close(self) -> None:
        """Unlocks all of it. Idempotent; no copy may be in progress."""
        while self._locked:
            memory = self._locked.pop()
            assert self._runtime is not None
            self._runtime.cudaHostUnregister(ctypes.c_void_p(memory.ctypes.data))


def _cuda_runtime() -> Any:
    """A CUDA runtime, the one that this process has loaded before any other, or None."""
    for mode in (os.RTLD_NOLOAD | os.RTLD_NOW, os.RTLD_NOW):
        for name in ("libcudart.so.13", "libcudart.so.12"):
            with suppress(OSError):
                return ctypes.CDLL(name, mode=mode)
    return None


class HostPool:
    """Packs by host slot. The engine thread alone may call it.

    Which page sits in which slot is `Tiers`' business; this is only the memory.

    Args:
        slots: number of packs held; 0 makes an empty pool.
        slot_shape: shape of one pack, such as `(pack_layers, 2, C, K*D)`.
        dtype: element type of keys and values (`Layout.numpy_dtype`).
    """

    def __init__(self, slots: int, slot_shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        kind = np.dtype(dtype)
        self.pack_bytes = math.prod(slot_shape) * kind.itemsize
        memory = aligned_bytes(slots * self.pack_bytes)
        self.packs: npt.NDArray[Any] = memory.view(kind).reshape(slots, *slot_shape)
        """All packs `[slots, *slot_shape]`."""

    def close(self) -> None:
        """Gives the memory back; the pool is empty from now on."""
        self.packs = self.packs[:0].copy()  # a view would keep all of it


class MappedPool:
    """`pages` [slots, pl, 2, C, K*D] is the memory of `packs` itself, seen as a device array.

    Any thread may fill a slot that no dispatched call reads; nothing is ever copied to a device.
    XLA knows nothing of such writes, so a slot changes hands only after the calls that were given
    it have ended (`Packs.done`).
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
