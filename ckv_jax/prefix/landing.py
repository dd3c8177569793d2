"""Landing of reads: directly in the pool where the device uses host memory, else by host blocks of
equal size, decoded on the device if there is a codec. `InPool` shows the interface of a landing;
implement it to add another.

A TPU's pool in `pinned_host` memory is no such place. Its arrays are tiled as on the device, so a
slot holds a pack's bytes in another order than the SSD. JAX also gives no address to read into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ckv_jax.buckets import bucket
from ckv_jax.kernels_pallas.native.library import decode_packs, native
from ckv_jax.prefix.memory import Memory, job_packs
from ckv_jax.prefix.pools import Decode, MappedPool, PageLocked, aligned_bytes, slot_shape
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.storage.codec import Codec, Quantised
from ckv_jax.storage.layout import Layout

Settled = Callable[[], bool]
"""Whether a read that was given up has ended, so that it no longer writes."""


class Room(NamedTuple):
    """The target of one read: rows int32 [n] of `array` [_, *stored_shape]."""

    array: np.ndarray
    rows: np.ndarray


def landing_for(
    memory: Memory, layout: Layout, *, host_bytes: int, codec: Codec | None = None
) -> Landing:
    """The landing that suits the pool of `memory` and the codec of `layout`."""
    if isinstance(memory.pool, MappedPool) and codec is None:
        return InPool(memory, memory.pool, layout, host_bytes)
    locked = PageLocked() if memory.target.platform == "gpu" else None
    return HostBlocks(memory, layout, host_bytes, codec, locked)


class InPool:
    """Rows are device slots: a read lands where attention finds it.

    A disk that does not answer keeps the slots of its reads. So that it cannot keep them all, reads
    go to host memory of their own, and are copied from there, while any are lost to it and where
    more than three slots in four would be in flight.
    """

    def __init__(self, memory: Memory, pool: MappedPool, layout: Layout, host_bytes: int) -> None:
        self._packs = pool.packs.reshape(-1, *layout.pack_shape)  # as the reader wants them
        self._memory = memory
        self._slots_in_flight = 0
        self._most = 3 * pool.slots // 4
        self._host = host_bytes  # left for buffers
        self._unsettled: list[tuple[Settled, int]] = []

    def take(self, n: int, *, demand: bool, spare: int = 0) -> Room | None:
        """Room for `n` packs, or None while there is none.

        A demand may push cached packs out; speculation only has what is free beyond `spare` packs.
        """
        if self._memory.abandoned:
            self._memory.reclaim()
        if not demand and self._memory.tiers.device.free < n + spare:
            return None
        if not self._memory.abandoned and self._slots_in_flight + n <= self._most:
            try:
                room = Room(self._packs, self._memory.take(n))
            except PoolExhausted:
                return None
            self._slots_in_flight += n
            return room
        self._reclaim()
        return self.force(n) if self._host >= n * self._packs[0].nbytes else None

    def force(self, n: int) -> Room:
        """Room for `n` packs that a caller waits for. Raises `PoolExhausted` if there is none."""
        size = n * self._packs[0].nbytes
        self._host -= size
        memory: Any = aligned_bytes(size).view(self._packs.dtype)
        return Room(memory.reshape(n, *self._packs.shape[1:]), np.arange(n, dtype=np.int32))

    def place(self, room: Room, good: np.ndarray) -> np.ndarray:
        """Device slots int32 for the packs of `rows[good]`; the room itself is given back."""
        slots: np.ndarray
        if room.array is self._packs:
            slots = room.rows[good]
            self._slots_in_flight -= len(room.rows)
            if len(good) < len(room.rows):
                self._memory.tiers.release(np.delete(room.rows, good))
        else:
            slots = self._memory.take(len(good))
            self._packs[slots] = room.array[room.rows[good]]
            self._host += room.array.nbytes
        return slots

    def give_back(self, room: Room, settled: Settled | None) -> None:
        """Room whose packs are not wanted, once its read has ended or `settled` says so."""
        if settled is not None and settled():
            settled = None
        if room.array is self._packs:
            self._slots_in_flight -= len(room.rows)
            if settled is None:
                self._memory.tiers.release(room.rows)
            else:
                self._memory.abandon(room.rows, settled)
        elif settled is None:
            self._host += room.array.nbytes
        else:
            self._unsettled.append((settled, room.array.nbytes))

    def warm(self) -> None:
        """Compiles what `place` needs besides the pool's own writes: nothing."""

    def close(self) -> None:
        """Gives all room back for good."""
        self._packs = self._packs[:0].copy()  # a view would keep the pool's memory

    def _reclaim(self) -> None:
        ended = [entry for entry in self._unsettled if entry[0]()]
        for entry in ended:
            self._unsettled.remove(entry)
            self._host += entry[1]


class HostBlocks:
    """Blocks of host memory of one size, one for each read, copied into the pool from there.

    What a codec has encoded is decoded on that way.
    """

    def __init__(
        self,
        memory: Memory,
        layout: Layout,
        host_bytes: int,
        codec: Codec | None,
        locked: PageLocked | None = None,
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._packs = bucket(job_packs(layout))
        self._bits = widths(codec, layout) if isinstance(memory.pool, MappedPool) else None
        self._decode = None if codec is None or self._bits else decoding(codec, layout)
        self._locked = locked
        self._most = max(1, host_bytes // (self._packs * layout.stored_bytes))
        self._made = 0
        self._free: list[np.ndarray] = []
        self._extra: list[np.ndarray] = []
        """Blocks beyond the limit, each of which goes with its read."""
        self._busy: list[tuple[Settled, np.ndarray]] = []

    def take(self, n: int, *, demand: bool, spare: int = 0) -> Room | None:
        self._reclaim()
        room = len(self._free) + self._most - self._made
        if room <= (0 if demand else -(-spare // self._packs)):
            return None
        return self.force(n)

    def force(self, n: int) -> Room:
        """As `InPool.force`; where all blocks are in use, one more, which goes with its read."""
        self._reclaim()
        if self._free:
            return Room(self._free.pop(), np.arange(n, dtype=np.int32))
        self._made += 1
        size = self._packs * self._layout.stored_bytes
        memory = aligned_bytes(size)
        block: Any = memory.view(self._layout.stored_dtype)
        block = block.reshape(self._packs, *self._layout.stored_shape)
        if self._made > self._most:
            self._extra.append(block)
        elif self._locked is not None:
            self._locked.lock(memory)
        return Room(block, np.arange(n, dtype=np.int32))

    def place(self, room: Room, good: np.ndarray) -> np.ndarray:
        slots = self._memory.take(len(good))
        where = np.full(bucket(len(room.rows)), -1, np.int32)  # few shapes reach the device
        where[good] = slots
        pool = self._memory.pool
        if self._bits is not None and isinstance(pool, MappedPool):
            packs = pool.packs.reshape(-1, *self._layout.pack_shape)
            decode_packs(room.array, where[: len(room.rows)], packs, bits=self._bits)
            self._keep(room.array)
            return slots
        padded = room.array[: len(where)]
        if self._decode is None:
            padded = padded.reshape(-1, *slot_shape(self._layout))
        marker: Any = pool.write(padded, where, decode=self._decode)
        if marker is None:
            self._keep(room.array)
        else:
            self._busy.append((marker.is_ready, room.array))
        return slots

    def warm(self) -> None:
        if self._decode is None:
            return
        for n in sorted({bucket(n) for n in range(1, self._packs + 1)}):
            self._decode(np.zeros((n, *self._layout.stored_shape), np.uint8)).block_until_ready()

    def close(self) -> None:
        if self._locked is not None:
            self._memory.pool.pages.block_until_ready()  # no copy reads what is unlocked
            self._locked.close()
        self._free.clear()
        self._busy.clear()

    def give_back(self, room: Room, settled: Settled | None) -> None:
        if settled is not None and not settled():
            self._busy.append((settled, room.array))
        else:
            self._keep(room.array)

    def _keep(self, block: np.ndarray) -> None:
        extra = [one is block for one in self._extra]
        if any(extra):
            del self._extra[extra.index(True)]
            self._made -= 1
        else:
            self._free.append(block)

    def _reclaim(self) -> None:
        ended = [entry for entry in self._busy if entry[0]()]
        for entry in ended:
            self._busy.remove(entry)
            self._keep(entry[1])


Landing = InPool | HostBlocks
"""Gives reads their room. Engine thread only; the reads run elsewhere."""


def decoding(coder: Codec, layout: Layout) -> Decode:
    """Jitted: packs uint8 [n, *stored_shape] as a codec left them -> as the pool keeps them."""
    return jax.jit(lambda rows: coder.decode(rows, layout))


def widths(codec: Codec | None, layout: Layout) -> tuple[int, int] | None:
    """Bits of keys and values where `decode_packs` decodes a codec's packs; None: it does not."""
    if not isinstance(codec, Quantised) or layout.dtype != "bfloat16" or native().path is None:
        return None
    whole = all(layout.head_dim * bits % 256 == 0 for bits in codec.bits)
    return codec.bits if whole else None
