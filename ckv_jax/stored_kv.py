"""Stored KV as a prefill wants it: all of it, or some layers of a run of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckv_jax.errors import CkvError
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.writer import SegmentWriter
from ckv_jax.storage.store import ChunkStore


class EarlierKv:
    """KV of a text that is being computed, as far as it is on disk; see `prefill.Earlier`.

    Args:
        whole: tokens of the stored prefix that it goes on from; `reader` has those.
        writer: has the others; None: there are none.
    """

    def __init__(
        self, layout: Layout, whole: int, reader: PrefixReader | None, writer: SegmentWriter | None
    ) -> None:
        self.whole = whole
        self._layout = layout
        self._reader = reader
        self._writer = writer

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        """[layers, 2, stop - first, K, D]. Raises `SegmentDamaged` for what cannot be read."""
        size = self._layout.chunk_tokens
        chunks = np.arange(first // size, -(-stop // size))
        kv = _kv_of(self._layout, layers, chunks, self._packs)
        skip = first - int(chunks[0]) * size
        return kv[:, :, skip : skip + stop - first]

    def _packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        packs = np.empty((len(chunks), *self._layout.pack_shape), self._layout.numpy_dtype)
        old = chunks < self.whole // self._layout.chunk_tokens
        if old.any():
            assert self._reader is not None
            packs[old] = _read(self._reader, group, chunks[old])
        for row in np.flatnonzero(~old).tolist():
            assert self._writer is not None
            chunk = int(chunks[row]) - self.whole // self._layout.chunk_tokens
            self._writer.read_back(group, chunk, packs[row])
        return packs


def read_kv(store: ChunkStore, prefix: Prefix, *, first_chunk: int = 0) -> np.ndarray:
    """Keys and values [L, 2, T, K, D] of a stored prefix, T from the first token of `first_chunk`.

    Raises `SegmentDamaged` for what cannot be read.
    """
    layout = prefix.layout
    chunks = np.arange(first_chunk, prefix.num_chunks)
    with store.reader(prefix) as reader:
        kv = _kv_of(layout, range(layout.num_layers), chunks, lambda g, c: _read(reader, g, c))
    return kv[:, :, : prefix.num_tokens - first_chunk * layout.chunk_tokens]


def _read(reader: PrefixReader, group: int, chunks: np.ndarray) -> np.ndarray:
    layout = reader.prefix.layout
    packs = np.empty((len(chunks), *layout.pack_shape), layout.numpy_dtype)
    try:
        ok = reader.read_packs(group, chunks, packs)
    except CkvError as error:
        raise SegmentDamaged(f"the packs of group {group} cannot be read: {error}") from error
    if not ok.all():
        raise SegmentDamaged(f"{int((~ok).sum())} packs of group {group} cannot be read")
    return packs


def _kv_of(
    layout: Layout,
    layers: range,
    chunks: np.ndarray,
    read: Callable[[int, np.ndarray], np.ndarray],
) -> np.ndarray:
    """[layers, 2, chunks x C, K, D], from packs `read(group, chunks)` [n, pl, 2, C, K, D]."""
    shape = (
        len(layers),
        2,
        len(chunks) * layout.chunk_tokens,
        layout.num_kv_heads,
        layout.head_dim,
    )
    out = np.empty(shape, layout.numpy_dtype)
    for group in range(layout.groups):
        held = layout.group_layers(group)
        mine = [layer for layer in held if layer in layers]
        if not mine:
            continue
        packs = read(group, chunks)
        # [M, pl, 2, C, K, D] -> [pl, 2, M * C, K, D]
        rows = packs.transpose(1, 2, 0, 3, 4, 5).reshape(
            layout.pack_shape[0], layout.pack_shape[1], -1, *layout.pack_shape[3:]
        )
        for layer in mine:
            if layout.kv_together:
                out[layer - layers.start] = rows[layer - held.start]
            else:
                out[layer - layers.start, group % 2] = rows[0, 0]
    return out
