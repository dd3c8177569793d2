"""What an engine is doing and has done, in one object that people and programs can read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckv_jax.serving.scheduler import Scheduler
    from ckv_jax.serving.worker import Worker
    from ckv_jax.storage.store import ChunkStore


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters count from the start of the engine.

    Attributes:
        device_hits, host_hits, misses: packs that selections used, by where they were found.
        device_packs, host_packs: packs cached now.
        device_bytes, host_bytes: of these packs.
        digest_bytes: of the digests that are resident now.
        pinned_packs: device packs that running sequences hold.
        reads, bad_reads, read_errors: packs read from the store, those of them that were not good,
            and reads that failed as a whole or came too late.
        quarantined: chunks that the store put aside as damaged since it was opened.
        queue, running, jobs: sequences waiting, sequences between two tokens, long jobs.
        programs: compiled programs held.
    """

    device_hits: int
    host_hits: int
    misses: int
    device_packs: int
    host_packs: int
    device_bytes: int
    host_bytes: int
    digest_bytes: int
    pinned_packs: int
    reads: int
    bad_reads: int
    read_errors: int
    quarantined: int
    queue: int
    running: int
    jobs: int
    programs: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def stats_of(worker: Worker, scheduler: Scheduler, store: ChunkStore) -> EngineStats:
    """A snapshot of one engine's parts, of about one moment."""
    tiers, reads = worker.memory.tiers, worker.prefetcher.stats
    pack = worker.memory.host.pack_bytes
    return EngineStats(
        device_hits=tiers.stats.device_hits,
        host_hits=tiers.stats.host_hits,
        misses=tiers.stats.misses,
        device_packs=tiers.device_pages,
        host_packs=tiers.host_pages,
        device_bytes=tiers.device_pages * pack,
        host_bytes=tiers.host_pages * pack,
        digest_bytes=worker.prefixes.digest_bytes,
        pinned_packs=tiers.pinned_slots,
        reads=reads.packs,
        bad_reads=reads.bad_packs,
        read_errors=reads.errors,
        quarantined=store.stats()["quarantined"],
        queue=scheduler.waiting,
        running=scheduler.running,
        jobs=scheduler.jobs,
        programs=len(worker.layers.programs),
    )
