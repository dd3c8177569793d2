"""Reads stored KV for a prefill: all of it, or some layers of a run of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckv_jax.errors import CkvError
from ckv_jax.storage.codec import Codec, check_codec, decoded
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.layout import LAST, Layout
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
        self,
        layout: Layout,
        codec: Codec | None,
        whole: int,
        reader: PrefixReader | None,
        writer: SegmentWriter | None,
    ) -> None:
        self.whole = whole
        self._layout = layout
        self._codec = codec
        self._reader = reader
        self._writer = writer

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        """[layers, 2, stop - first, K, D]. Raises `SegmentDamaged` for what cannot be read.

        Of what this ingest has written, no more is read than is asked for.
        """
        size = self._layout.chunk_tokens
        chunks = np.arange(first // size, -(-stop // size))
        kv = _kv_of(self._layout, layers, chunks, self._packs)
        skip = first - int(chunks[0]) * size
        return kv[:, :, skip : skip + stop - first]

    def _packs(self, group: int, chunks: np.ndarray, places: slice) -> np.ndarray:
        layout, whole = self._layout, self.whole // self._layout.chunk_tokens
        old = int(np.searchsorted(chunks, whole))
        parts = []
        if old:
            assert self._reader is not None
            parts.append(_read(self._reader, group, chunks[:old], self._codec)[:, places])
        if old < len(chunks):
            assert self._writer is not None
            shape, part = (len(chunks) - old, *layout.stored_shape), slice(None)
            if self._codec is None:
                shape = (shape[0], places.stop - places.start, *layout.stored_shape[1:])
            else:
                part = places
            stored = np.empty(shape, layout.stored_dtype)
            self._writer.read_back(group, int(chunks[old]) - whole, stored, layer=places.start)
            parts.append(decoded(self._codec, stored, layout)[:, part])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_kv(
    store: ChunkStore, prefix: Prefix, *, first_chunk: int = 0, codec: Codec | None = None
) -> np.ndarray:
    """Keys and values [L, 2, T, K, D] of a stored prefix, T from the first token of `first_chunk`.

    `codec` is the one that its layout names. Raises `SegmentDamaged` for what cannot be read, and
    where chunks of alike tokens come before the last, which are in no order of their positions.
    """
    check_codec(codec, prefix.layout)
    layout = prefix.layout
    if layout.alike and first_chunk < (prefix.num_tokens - LAST) // layout.chunk_tokens:
        raise SegmentDamaged(f"chunk {first_chunk}: tokens from there on are grouped")
    chunks = np.arange(first_chunk, prefix.num_chunks)
    with store.reader(prefix) as reader:

        def read(group: int, chunks: np.ndarray, places: slice) -> np.ndarray:
            return _read(reader, group, chunks, codec)[:, places]

        kv = _kv_of(layout, range(layout.num_layers), chunks, read)
    return kv[:, :, : prefix.num_tokens - first_chunk * layout.chunk_tokens]


def _read(reader: PrefixReader, group: int, chunks: np.ndarray, codec: Codec | None) -> np.ndarray:
    """Packs [n, *pack_shape] of a stored prefix."""
    layout = reader.prefix.layout
    stored = np.empty((len(chunks), *layout.stored_shape), layout.stored_dtype)
    try:
        ok = reader.read_packs(group, chunks, stored)
    except CkvError as error:
        raise SegmentDamaged(f"the packs of group {group} cannot be read: {error}") from error
    if not ok.all():
        raise SegmentDamaged(f"{int((~ok).sum())} packs of group {group} cannot be read")
    return decoded(codec, stored, layout)


def _kv_of(
    layout: Layout,
    layers: range,
    chunks: np.ndarray,
    read: Callable[[int, np.ndarray, slice], np.ndarray],
) -> np.ndarray:
    """[layers, 2, chunks x C, K, D], from layers `places` of packs, `read(group, chunks, places)`
    [n, places, 2, C, heads of a pack, D]."""
    heads, dim = layout.num_kv_heads, layout.head_dim
    shape = (len(layers), 2, len(chunks), layout.chunk_tokens, heads, dim)
    out = np.empty(shape, layout.numpy_dtype)
    for group in range(layout.groups):
        held = layout.group_layers(group)
        first, stop = max(held.start, layers.start), min(held.stop, layers.stop)
        if first >= stop:
            continue
        packs = read(group, chunks, slice(first - held.start, stop - held.start))
        # [M, layers, 2, C, K, D] -> [layers, 2, M, C, K, D]
        rows = packs.transpose(1, 2, 0, 3, 4, 5)
        kinds = slice(None) if layout.kv_together else slice(group % 2, group % 2 + 1)
        of_layers = slice(first - layers.start, stop - layers.start)
        out[of_layers, kinds, ..., layout.group_heads(group), :] = rows
    return out.reshape(len(layers), 2, -1, heads, dim)
