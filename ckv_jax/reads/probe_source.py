"""Probe keys as packs: their pages have numbers, are read, and are computed again like any pack.

A group is a row of `Layout.probe_layers`, a chunk a page of `ProbePages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckv_jax.reads.source import Source
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.probe_pages import ProbePages
from ckv_jax.storage.segment.reader import PrefixReader


class RecomputedKv(Protocol):
    """Keys that the store could not give, computed again."""

    def keys(self, layer: int) -> np.ndarray:
        """Keys [T, K, D] of one layer. Raises `RecoveryNeeded` while they are to be computed."""
        ...


@dataclass(frozen=True, slots=True)
class ProbeView:
    """Where the caches know the pages of a prefix's probe; see `source.Paged`."""

    held: ProbePages
    first_page: np.ndarray
    """int64 [N]: page of (row 0, page)."""
    page_stride: np.ndarray
    """int64 [N]: pages from one row to the next."""

    @property
    def prefix(self) -> Prefix:
        """Whose probe."""
        return self.held.prefix

    def pages(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """Page numbers int64 [n] of these pages of one row."""
        pages: np.ndarray = self.first_page[chunks] + group * self.page_stride[chunks]
        return pages

    def read_bytes(self, chunks: np.ndarray) -> int:
        """Bytes that reading these pages of one row takes."""
        return int(self.held.tokens[chunks].sum()) * self.held.token_bytes


@dataclass(frozen=True, slots=True)
class _Reader:
    reader: PrefixReader
    held: ProbePages

    def read_packs(
        self,
        group: int | np.ndarray,
        chunks: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
    ) -> np.ndarray:
        layer = self.held.prefix.layout.probe_layers[int(group)]  # `Packs` reads one at a time
        return self.reader.read_probe_pages(layer, self.held, chunks, out, rows=rows)


@dataclass(frozen=True, slots=True)
class _Recomputed:
    recovered: RecomputedKv
    held: ProbePages

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        layout, held = self.held.prefix.layout, self.held
        keys = self.recovered.keys(layout.probe_layers[group])[:, : layout.probe_heads]
        out = np.zeros((len(chunks), *layout.pack_shape), layout.numpy_dtype)
        flat = out.reshape(len(chunks), -1)
        for row, page in enumerate(chunks.tolist()):
            start = int(held.start[page])
            part = keys[start : start + int(held.tokens[page])]
            flat[row, : part.size] = part.reshape(-1)
        return out


def probe_source(view: ProbeView, reader: PrefixReader, recovered: RecomputedKv) -> Source:
    """Where the pages of a prefix's probe come from."""
    return Source(view, _Reader(reader, view.held), _Recomputed(recovered, view.held), kind="probe")
