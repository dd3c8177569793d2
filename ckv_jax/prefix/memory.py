"""Device pool and host pool of packs, with moves between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import ONE_DEVICE, Shardings
from ckv_jax.prefix.policy import POLICIES
from ckv_jax.prefix.pools import DevicePool, HostPool, MappedPool, slot_shape
from ckv_jax.prefix.tiers import Demotions, Tiers
from ckv_jax.storage.layout import Layout

if TYPE_CHECKING:
    from ckv_jax.prefix.packs import Packs


def job_packs(layout: Layout) -> int:
    """Packs in one read at most: 2 MiB, but no more than one queue of the kernel takes at once, and
    16 of whatever size, keys and values, or heads, together or apart."""
    return max(16 * layout.parts, min(64, (2 << 20) // layout.stored_bytes))


class Memory:
    """Pools of one engine and layout, and the table of what is where. Engine thread only."""

    def __init__(
        self,
        layout: Layout,
        config: EngineConfig,
        system: SystemConfig,
        target: Target,
        shardings: Shardings = ONE_DEVICE,
    ) -> None:
        device = config.device_cache_bytes // layout.pack_bytes
        work = config.prefetch_device_bytes // layout.pack_bytes
        host = config.host_cache_bytes // layout.pack_bytes
        if work < 1:
            raise ValueError(
                f"got prefetch_device_bytes={config.prefetch_device_bytes}, expected room for at "
                f"least one chunk of one layer group, {layout.pack_bytes} bytes"
            )
        policy = POLICIES[system.policy] if isinstance(system.policy, str) else system.policy
        self.target = target
        self.tiers = Tiers(device, host, work, policy)
        self._slot_shape = slot_shape(layout)
        self.host = HostPool(host, self._slot_shape, layout.numpy_dtype)
        shape = (device + work, self._slot_shape, layout.numpy_dtype, target)
        self.pool: DevicePool | MappedPool = (
            MappedPool(*shape)
            if target.in_host_memory and shardings.size == 1
            else DevicePool(*shape, shardings)
        )
        self.work_slots = work
        self.users: list[Packs] = []
        """Who takes slots now, for packs to attend to or keys to select by."""
        self.abandoned = 0
        """Device slots that reads may still write which were given up."""
        self._abandoned: list[tuple[Callable[[], bool], np.ndarray]] = []
        self._copying = False

    @property
    def step_slots(self) -> int:
        """Device slots that one step of one batch can have, now that no other is computing."""
        return self.tiers.slots - self.tiers.pinned_slots - self.abandoned

    @property
    def hold_slots(self) -> int:
        """Device slots that sequences may keep between their tokens: the rest is for steps."""
        return self.tiers.slots - max(1, self.work_slots // 2)

    def take(self, n: int) -> np.ndarray:
        """Lends `n` device slots int32 [n], if need be those of cached packs not in use.

        Raises `PoolExhausted` where running requests hold the others.
        """
        if self.abandoned:
            self.reclaim()
        if self.tiers.device.free < n:
            self.apply(self.tiers.make_room(n))
        return self.tiers.take(n)

    def write(self, rows: np.ndarray, slots: np.ndarray) -> None:
        """Copies packs `rows` [n, *pack_shape] into `slots` [n]; returns once that is done."""
        rows = rows.reshape(-1, *self._slot_shape)
        for row, slot in zip(rows, slots, strict=True):  # one by one: no shape is compiled for it
            marker = self.pool.write(row[None], slot[None])
            if marker is not None:
                marker.block_until_ready()

    def admit(self, pages: np.ndarray, slots: np.ndarray) -> None:
        """The cache decides about packs in lent slots, see `Tiers.admit`."""
        self.apply(self.tiers.admit(pages, slots))

    def trim(self) -> None:
        """Shrinks the cache to its size again, after pages that sequences held were unpinned."""
        if self.tiers.device_pages > self.tiers.device_slots:
            self.apply(self.tiers.trim())

    def apply(self, demotions: Demotions) -> None:
        """Starts the copies of packs demoted from the device to the host pool."""
        if len(demotions):
            self.pool.save(self.host, demotions[:, 0], demotions[:, 1])
            self._copying = True

    def flush(self) -> None:
        """Waits for those copies."""
        if self._copying:
            self.pool.flush(self.host)
            self._copying = False

    def close(self) -> None:
        """Gives the pools' memory back; nothing computes any more. Parts of an engine refer to each
        other, so that Python would find out only when it looks for cycles."""
        self.host.close()
        self.pool.close()

    def abandon(self, slots: np.ndarray, settled: Callable[[], bool]) -> None:
        """Lends `slots` on to a read that was given up but may still write, until it has ended."""
        self._abandoned.append((settled, slots))
        self.abandoned += len(slots)

    def reclaim(self) -> None:
        """Gives back the slots of such reads that have ended."""
        for entry in list(self._abandoned):
            if entry[0]():
                self._abandoned.remove(entry)
                self.abandoned -= len(entry[1])
                self.tiers.release(entry[1])


def device_room(devices: Iterable[Any]) -> int | None:
    """Bytes that the fullest of some `jax.Device`s has left; None where one does not say.

    A CPU does not: it computes in the host's memory.
    """
    left = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            return None
        left.append(int(stats["bytes_limit"]) - int(stats["bytes_in_use"]))
    return min(left, default=None)
