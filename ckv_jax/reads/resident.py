"""What the engine keeps of one prefix: page numbers, lengths, its digest on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckv_jax.buckets import probe_bucket
from ckv_jax.reads.digest import Digest
from ckv_jax.reads.probe_source import ProbeView
from ckv_jax.storage.prefix import Prefix


@dataclass(slots=True)
class Resident:
    """What outlives one request: cheap tables, last selections, and the resident digest."""

    prefix: Prefix
    first_page: np.ndarray
    """int64 [M]: page of (group 0, chunk)."""
    page_stride: np.ndarray
    """int64 [M]: pages from one group to the next."""
    chunk_lengths: np.ndarray
    """int32 [M]: valid tokens of each chunk."""
    probe: ProbeView | None = None
    """Pages of probe keys, of a layout that has them."""
    latest: dict[int, np.ndarray] = field(default_factory=dict)
    """Period -> chunk ids int [rows, J, n] that each of its J choices has made last; -1: none."""
    opening: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int [n]: those of the first period, most attended first, to speculate it the next time."""
    recurrence: float = 0.0
    """Share of the best of `opening` that were among as many best of the request after."""
    digest: Digest | None = None
    """Its probes are padded to `probe_chunks`."""
    room: int = 0
    """Chunks that the probe is to have room for at least."""

    @property
    def num_chunks(self) -> int:
        """M."""
        return len(self.chunk_lengths)

    @property
    def probe_chunks(self) -> int:
        """M, rounded up to a bucket: multiples of 1,024 tokens, then coarser."""
        step = max(1, 1024 // self.prefix.layout.chunk_tokens)
        return probe_bucket(max(self.num_chunks, self.room), step=step)

    @property
    def digest_bytes(self) -> int:
        """Device bytes of the resident digest."""
        digest = self.digest  # others ask while the engine's thread lets go of it
        return 0 if digest is None else digest.nbytes

    def pages(self, group: int | np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """Page numbers (int64) of these chunks of one layer group, or of one each."""
        pages: np.ndarray = self.first_page[chunks] + group * self.page_stride[chunks]
        return pages

    def read_bytes(self, chunks: np.ndarray) -> int:
        """Bytes that reading these chunks of one layer group takes."""
        return len(chunks) * self.prefix.layout.stored_bytes

    def probe_pages(self, row: int) -> np.ndarray:
        """Page numbers (int64) of one row of its probe keys; none without such keys."""
        if self.probe is None:
            return np.zeros(0, np.int64)
        return self.probe.pages(row, np.arange(len(self.probe.held)))

    def all_pages(self) -> np.ndarray:
        """Page numbers (int64) of everything that caches may hold of it."""
        every, layout = np.arange(self.num_chunks), self.prefix.layout
        pages = [self.pages(group, every) for group in range(layout.groups)]
        pages += [self.probe_pages(row) for row in range(len(layout.probe_layers))]
        return np.concatenate(pages)
