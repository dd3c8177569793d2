"""The host pool: packs in page-aligned memory of this machine."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = mmap.PAGESIZE
_LARGE = 4 << 20  # two large pages: what is smaller keeps to what it needs


def slots_for(budget_bytes: int, pack_bytes: int) -> int:
    """How many packs fit into a byte budget.

    Raises:
        ValueError: a negative budget, or a pack size below 1.
    """
    if budget_bytes < 0:
        raise ValueError(f"got a budget of {budget_bytes} bytes, expected 0 or more")
    if pack_bytes < 1:
        raise ValueError(f"got packs of {pack_bytes} bytes, expected 1 or more")
    return budget_bytes // pack_bytes


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """`size` zero bytes that start on a memory page.

    The operating system provides the pages as they are first touched, so a generous budget costs
    nothing until it is used; the memory goes back once no array refers to it. Large pages are asked
    for: a fault for every 4 KiB of a pack takes longer than its copy. A forked process does not get
    the memory: a read past the page cache that is under way then could land in the other's copy.
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

    Six times the rate of pageable memory was measured. Without a CUDA runtime nothing is locked,
    and copies take the slower way.
    """

    def __init__(self) -> None:
        self._runtime = _cuda_runtime()
        self._locked: list[npt.NDArray[np.uint8]] = []

    def lock(self, memory: npt.NDArray[np.uint8]) -> bool:
        """Locks the pages of `memory` until `close`; whether that worked."""
        if self._runtime is None or memory.size == 0:
            return False
        address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
        if self._runtime.cudaHostRegister(address, size, ctypes.c_uint(0)):
            self._runtime.cudaGetLastError()  # else the next call of another library reports it
            return False
        self._locked.append(memory)
        return True

    def close(self) -> None:
        """Unlocks all of it. Idempotent; no copy may be under way."""
        while self._locked:
            memory = self._locked.pop()
            assert self._runtime is not None
            self._runtime.cudaHostUnregister(ctypes.c_void_p(memory.ctypes.data))


def _cuda_runtime() -> Any:
    """The CUDA runtime that JAX's plugin has loaded, or None."""
    for name in ("libcudart.so.13", "libcudart.so.12"):
        with suppress(OSError):
            return ctypes.CDLL(name)
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
        if slots < 0:
            raise ValueError(f"got {slots} slots, expected 0 or more")
        if not slot_shape or min(slot_shape) < 1:
            raise ValueError(f"got a slot shape of {slot_shape}, expected axes of 1 or more")
        kind = np.dtype(dtype)
        self.pack_bytes = math.prod(slot_shape) * kind.itemsize
        memory = aligned_bytes(slots * self.pack_bytes)
        self._packs: npt.NDArray[Any] = memory.view(kind).reshape(slots, *slot_shape)

    @property
    def packs(self) -> npt.NDArray[Any]:
        """All packs `[slots, *slot_shape]`, without a copy."""
        return self._packs

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self._packs.nbytes

    def close(self) -> None:
        """Gives the memory back; the pool is empty from now on."""
        self._packs = self._packs[:0].copy()  # a view would keep all of it

    def read(self, slots: npt.NDArray[np.int32], out: npt.NDArray[Any]) -> None:
        """Copy the packs of `slots` `[n]` into `out` `[n, *slot_shape]`, C-contiguous.

        Raises:
            ValueError: a slot outside the pool, or an `out` of another dtype or shape.
        """
        if len(slots) and (slots.min() < 0 or slots.max() >= len(self._packs)):
            raise ValueError(
                f"got slots {slots.min()} to {slots.max()}, pool of {len(self._packs)}"
            )
        if out.dtype != self._packs.dtype or out.shape != (len(slots), *self._packs.shape[1:]):
            raise ValueError(
                f"got out {out.dtype} {out.shape}, "
                f"expected {self._packs.dtype} {(len(slots), *self._packs.shape[1:])}"
            )
        # checked above; "clip" spares the temporary copy that "raise" makes
        np.take(self._packs, slots, axis=0, out=out, mode="clip")

    def write(self, slots: npt.NDArray[np.int32], packs: npt.NDArray[Any]) -> None:
        """Copy `packs` `[n, *slot_shape]`, in the pool's dtype, into distinct `slots` `[n]`.

        Raises:
            ValueError: another dtype or shape than the pool's.
        """
        if packs.dtype != self._packs.dtype or packs.shape[1:] != self._packs.shape[1:]:
            raise ValueError(
                f"got packs {packs.dtype} {packs.shape[1:]}, "
                f"expected {self._packs.dtype} {self._packs.shape[1:]}"
            )
        self._packs[slots] = packs
