"""The places a pack can be in memory, moved together: the device's pool and the host pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax import Array

from ckv_jax.cache.policy import POLICIES
from ckv_jax.cache.tiers import Moves, Tiers
from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.memory.device import DevicePool
from ckv_jax.memory.host import HostPool, slots_for
from ckv_jax.memory.mapped import MappedPool, in_host_memory
from ckv_jax.pipeline.buckets import bucket
from ckv_jax.pipeline.layers import Selection
from ckv_jax.reads.residents import PrefixView
from ckv_jax.storage.layout import Layout

PagePool = DevicePool | MappedPool


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
        self.tiers = Tiers(device, host, work, POLICIES[system.policy])
        self.host = HostPool(host, layout.pack_shape, layout.numpy_dtype)
        shape = (device + work, layout.pack_shape, layout.numpy_dtype)
        self.pool: PagePool = MappedPool(*shape) if in_host_memory() else DevicePool(*shape)
        self._abandoned: list[tuple[Callable[[], bool], np.ndarray]] = []
        self._job_packs = job_packs(layout)

    def warm(self, packs: int) -> None:
        """Compiles the pool's writes, and its reads of up to `packs` packs."""
        self.pool.warm(sorted({bucket(n) for n in range(1, self._job_packs + 1)}), packs)

    @property
    def packs(self) -> np.ndarray | None:
        """All slots [n, *pack_shape] as reads may fill them, where the device shares memory."""
        return self.pool.packs if isinstance(self.pool, MappedPool) else None

    def write(self, rows: np.ndarray, slots: np.ndarray) -> Array | None:
        """Copies packs `rows` [n, *pack_shape] into `slots` [n]; slot -1 drops its row.

        Returns what to wait for before `rows` may be overwritten, if anything.
        """
        return self.pool.write(rows, slots)

    def record(self, view: PrefixView, groups: range, selection: Selection) -> None:
        """I_j += A_j and F_j += 1 for the packs of every critical chunk (§4.4).

        Where the policy says so, I_j += A_j for those of all other chunks, too.
        """
        chosen, attention = np.asarray(selection.ids), np.asarray(selection.attention)
        real = chosen >= 0
        chunks, where = np.unique(chosen[real], return_inverse=True)
        total = np.bincount(where, weights=attention[real], minlength=len(chunks))
        pages = np.concatenate([view.pages(group, chunks) for group in groups])
        self.tiers.record(pages, np.tile(total, len(groups)))
        if self.tiers.observes:
            others = np.setdiff1d(np.arange(view.num_chunks), chunks, assume_unique=True)
            seen = np.asarray(selection.scores)[real.any(axis=1)].sum(axis=0)[others]
            pages = np.concatenate([view.pages(group, others) for group in groups])
            self.tiers.observe(pages, np.tile(seen, len(groups)))

    def stage(self, host_slots: np.ndarray, device_slots: np.ndarray) -> int:
        """Host packs to device slots; returns the bytes moved."""
        return self.pool.load(self.host, host_slots, device_slots)

    def apply(self, moves: Moves) -> None:
        """Starts the copies of packs demoted from the device to the host pool."""
        if len(moves.demote):
            self.pool.save(self.host, moves.demote[:, 0], moves.demote[:, 1])

    def flush(self) -> None:
        """Waits for those copies."""
        self.pool.flush(self.host)

    def abandon(self, slots: np.ndarray, settled: Callable[[], bool]) -> None:
        """Lends `slots` on to a read that was given up but may still write, until it has ended."""
        self._abandoned.append((settled, slots))

    def reclaim(self) -> None:
        """Gives back the slots of such reads that have ended."""
        ended = [entry for entry in self._abandoned if entry[0]()]
        for entry in ended:
            self._abandoned.remove(entry)
            self.tiers.release(entry[1])
