"""The three places a pack can be in memory, moved together: device pool, staging, host pool."""

from __future__ import annotations

import numpy as np
from jax import Array

from ckv_jax.cache.policy import POLICIES
from ckv_jax.cache.pool import HostPool, slots_for
from ckv_jax.cache.tiers import Moves, Tiers
from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.pipeline.buckets import bucket
from ckv_jax.pipeline.device_pool import DevicePool
from ckv_jax.pipeline.staging import Staging
from ckv_jax.storage.layout import Layout

STAGING_ROWS = 16


def job_packs(layout: Layout) -> int:
    """Packs in one read at most: 2 MiB of a 7B model's, keys and values together or apart."""
    return 16 if layout.kv_together else 32


class Memory:
    """Pools of one engine and layout, and the table of what is where. Engine thread only."""

    def __init__(self, layout: Layout, config: EngineConfig, system: SystemConfig) -> None:
        device = slots_for(config.device_cache_bytes, layout.pack_bytes)
        work = slots_for(config.prefetch_device_bytes, layout.pack_bytes)
        host = slots_for(config.host_cache_bytes, layout.pack_bytes)
        if work < 1:
            raise ValueError(
                f"got prefetch_device_bytes={config.prefetch_device_bytes}, "
                f"expected room for at least one pack of {layout.pack_bytes} bytes"
            )
        self.tiers = Tiers(device, host, work, POLICIES[system.policy]())
        self.pool = DevicePool(device + work, layout.pack_shape, layout.numpy_dtype)
        self.host = HostPool(host, layout.pack_shape, layout.numpy_dtype)
        self._staging = Staging(STAGING_ROWS, layout.pack_shape, layout.numpy_dtype, self.pool)
        self._copies: list[tuple[Array, np.ndarray]] = []
        self._job_packs = job_packs(layout)

    def warm(self, packs: int) -> None:
        """Compiles the pool's writes, and its reads of up to `packs` packs."""
        sizes = {bucket(n) for n in range(1, self._job_packs + 1)}
        for rows in sorted(sizes.union(range(1, STAGING_ROWS + 1))):
            nothing = np.zeros((rows, *self.host.packs.shape[1:]), self.host.packs.dtype)
            self.pool.write(nothing, np.full(rows, -1, np.int32)).block_until_ready()
        size = 1
        while size < 2 * packs:
            self.pool.read(np.zeros(min(size, packs), np.int32)).block_until_ready()
            size *= 2

    def stage(self, host_slots: np.ndarray, device_slots: np.ndarray) -> int:
        """Host packs to device slots; returns the bytes moved."""
        self.flush()  # a pack demoted in this very request may still be on its way
        return self._staging.send(self.host, host_slots, device_slots)

    def apply(self, moves: Moves) -> None:
        """Starts the copies of packs demoted from the device to the host pool."""
        if len(moves.demote):
            packs = self.pool.read(moves.demote[:, 0])
            self._copies.append((packs, moves.demote[:, 1]))

    def flush(self) -> None:
        """Waits for those copies."""
        for packs, slots in self._copies:
            rows = np.asarray(packs)[: len(slots)].view(self.host.packs.dtype)
            self.host.write(slots, rows)
        self._copies.clear()
