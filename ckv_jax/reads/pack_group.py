"""What a batch knows of one layer group of one prefix: where its packs are, who is reading them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckv_jax.cache.tiers import Tiers
from ckv_jax.reads.read_job import ReadJob
from ckv_jax.reads.source import Source


@dataclass(slots=True)
class PackGroup:
    """The state of one layer group, by chunk. See `Packs`, which alone changes it."""

    source: Source
    group: int
    slots: dict[int, int] = field(default_factory=dict)
    """Device slot of each chunk that is there."""
    host: dict[int, int] = field(default_factory=dict)
    """Host slot of each chunk that is cached there."""
    fresh: list[int] = field(default_factory=list)
    """Chunks whose device slots the batch took itself."""
    pinned: list[np.ndarray] = field(default_factory=list)
    """Pages of cached packs that may not leave."""
    jobs: list[ReadJob] = field(default_factory=list)
    """Reads under way."""
    flying: set[int] = field(default_factory=set)
    """Chunks of those reads, and of those that wait for room."""
    waiting: list[np.ndarray] = field(default_factory=list)
    """Parts that were demanded, with no room yet."""
    used: set[int] = field(default_factory=set)
    """Chunks that somebody collected."""

    def own(self, chunks: list[int], slots: np.ndarray) -> None:
        """Chunks that somebody collects have come, into device slots that the batch took."""
        self.slots.update(zip(chunks, slots.tolist(), strict=True))
        self.fresh.extend(chunks)
        self.used.update(chunks)

    def hand_over(self) -> tuple[np.ndarray, np.ndarray]:
        """Chunks int64 [n] and device slots int32 [n] that the batch took, and now gives away."""
        chunks = np.array(self.fresh, np.int64)
        slots = np.fromiter((self.slots[c] for c in self.fresh), np.int32, len(chunks))
        self.fresh.clear()
        return chunks, slots

    def unpin(self, tiers: Tiers) -> None:
        """Cached packs may leave."""
        for pages in self.pinned:
            tiers.unpin(pages)
        self.pinned.clear()

    def reading(self, needed: set[int]) -> ReadJob | None:
        """The first read under way that brings some of these chunks."""
        mine = (job for job in self.jobs if not needed.isdisjoint(job.chunks.tolist()))
        return next(mine, None)

    def unused_bytes(self, job: ReadJob, used: set[int] | None = None) -> int:
        """Bytes that a read brought, if it had begun, of chunks that nobody collected, nor is to
        collect now (`used`)."""
        done = self.used if used is None else self.used | used
        unused = sum(c not in done for c in job.chunks.tolist())
        return job.num_bytes * unused // len(job.chunks) if unused and job.started() else 0

    def end(self, job: ReadJob) -> None:
        """A read is under way no longer."""
        self.jobs.remove(job)
        self.flying.difference_update(job.chunks.tolist())
