"""Memory for reads: blocks of an arena, blocks beyond it, and blocks that are not quiet yet."""

from __future__ import annotations

from collections.abc import Callable

from ckv_jax.memory.host import aligned_bytes
from ckv_jax.reads.arena import BufferArena
from ckv_jax.reads.read_job import ReadJob


class ReadBuffers:
    """Gives jobs their blocks and takes them back. The prefetcher's lock guards it.

    A read that was given up may still write: its block is reused only once it has ended.
    """

    def __init__(self, size: int) -> None:
        self._arena = BufferArena(size)
        self._unsettled: list[tuple[Callable[[], bool], int | None, int]] = []
        self.overflow_bytes = 0
        """In use beyond the arena."""

    @property
    def used(self) -> int:
        """Bytes of the arena in use, whole memory pages."""
        self._settle()
        return self._arena.used

    def place(self, job: ReadJob) -> bool:
        """Gives `job` a block of the arena; False if there is none."""
        found = self._arena.take(job.size)
        if found is None and self._settle():
            found = self._arena.take(job.size)
        if found is not None:
            job.offset, job.block = found
        return found is not None

    def overflow(self, job: ReadJob) -> None:
        """Gives `job` memory of its own."""
        job.block = aligned_bytes(job.size)
        self.overflow_bytes += job.size

    def free(self, job: ReadJob) -> None:
        """Takes back the block of `job`, if it has one."""
        if job.block is None:
            return
        settled, offset = job.settled, job.offset
        job.offset = job.block = job.settled = None
        if settled is None or settled():
            self._give_back(offset, job.size)
        else:
            self._unsettled.append((settled, offset, job.size))

    def _settle(self) -> bool:
        """Takes back blocks of reads that have ended since they were given up; whether any."""
        ended = [entry for entry in self._unsettled if entry[0]()]
        for entry in ended:
            self._unsettled.remove(entry)
            self._give_back(*entry[1:])
        return bool(ended)

    def _give_back(self, offset: int | None, size: int) -> None:
        if offset is None:
            self.overflow_bytes -= size
        else:
            self._arena.give_back(offset, size)
