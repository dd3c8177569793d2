"""What an engine is made of, put together for one model, store and system."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.memory.memory import Memory, job_packs
from ckv_jax.pipeline.executor import Executor
from ckv_jax.pipeline.kv_rows import KvRows
from ckv_jax.pipeline.layers import Compute
from ckv_jax.pipeline.pace import Pace
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefill import DensePrefill
from ckv_jax.reads.key_buffers import KeyBuffers
from ckv_jax.reads.prefetcher import Prefetcher
from ckv_jax.reads.residents import Views
from ckv_jax.rivals.executor import LayerwiseExecutor
from ckv_jax.rivals.reorder import Reorderer
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that sessions share. Engine thread only, but for `close`."""

    store: ChunkStore
    system: SystemConfig
    compute: Compute
    plan: Plan
    memory: Memory
    views: Views
    prefill: DensePrefill
    executor: Executor | LayerwiseExecutor
    pace: Pace
    reorderer: Reorderer | None
    rows: KvRows
    prefetcher: Prefetcher
    probe_threads: ThreadPoolExecutor
    key_buffers: KeyBuffers
    read_deadline_s: float

    @classmethod
    def build(
        cls,
        *,
        compute: Compute,
        store: ChunkStore,
        system: SystemConfig,
        layout: Layout,
        config: EngineConfig,
    ) -> Parts:
        """Allocates the pools and starts the threads."""
        plan = Plan.of(compute.num_layers, system)
        memory = Memory(layout, config, system)
        pace = Pace()
        views = Views(store, memory.tiers, digest_bytes=config.digest_bytes)
        prefill = DensePrefill(compute, block=config.prefill_block)
        reorderer = None
        if system.reorder:
            reorderer = Reorderer(store, prefill, replaced=views.drop)
        executor: Executor | LayerwiseExecutor
        if system.chunked:
            executor = Executor(compute, memory, plan, system, pace)
        else:
            note = reorderer.note if reorderer is not None else None
            executor = LayerwiseExecutor(compute, compute.layerwise, memory, system, note)
        return cls(
            store=store,
            system=system,
            compute=compute,
            plan=plan,
            memory=memory,
            views=views,
            prefill=prefill,
            executor=executor,
            pace=pace,
            reorderer=reorderer,
            rows=KvRows(compute),
            prefetcher=Prefetcher(
                config.io_threads,
                config.prefetch_host_bytes,
                max_packs_per_job=job_packs(layout),
            ),
            probe_threads=ThreadPoolExecutor(2, "ckv-probe"),
            key_buffers=KeyBuffers(),
            read_deadline_s=config.read_deadline_s,
        )

    def current(self, prefix: Prefix) -> Prefix:
        """The form of `prefix` to be served: reordered, where the system does so and has."""
        return prefix if self.reorderer is None else self.reorderer.current(prefix)

    def forget(self, prefix: Prefix) -> None:
        """`prefix` is no longer in the store."""
        if self.reorderer is not None:
            self.reorderer.forget(prefix)

    def executables(self) -> int:
        """Programs compiled so far."""
        owners = (self.compute, self.executor, self.memory.pool, self.prefill, self.rows)
        return sum(owner.executables() for owner in owners)

    def close(self) -> None:
        """Stops the threads, then persists cache scores."""
        if self.reorderer is not None:
            self.reorderer.close()
        self.prefetcher.close()
        self.probe_threads.shutdown(cancel_futures=True)
        self.views.save_scores()
