"""Packs as they lie on disk, made of KV as a model makes it, and their checksums.

A checksum covers content and identity, so that a valid pack in the wrong place is bad: it is the
crc32c of (segment id, kind, row, column) followed by the bytes. For bytes of one length the crc
state is a bijection of its seed, so within a segment no two places share a checksum for equal
content, and across segments they meet with probability 2**-32.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np

from ckv_jax.storage.layout import Layout

_PLACE = struct.Struct("<II")


def aligned(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] at the start of a page of memory, as direct I/O wants it."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def pack(kv: np.ndarray, layout: Layout, memory: np.ndarray) -> np.ndarray:
    """[groups, n, *pack] in uint8 `memory`, from bit patterns [L, 2, t, K, D].

    Zeros fill a partial last chunk, and the layers that the last group lacks.
    """
    layers, _, tokens, _, dim = kv.shape
    size, chunks = layout.chunk_tokens, layout.num_chunks(tokens)
    whole = tokens // size
    shape = (layout.groups, chunks, *layout.pack_shape)
    packs = memory[: layout.groups * chunks * layout.pack_bytes].view(kv.dtype).reshape(shape)
    if whole < chunks or layers % layout.pack_layers:
        packs[...] = 0
    for group in range(layout.groups):
        span = layout.group_layers(group)
        part = kv[span.start : span.stop, :, :, layout.group_heads(group)]
        if not layout.kv_together:
            part = part[:, group % 2 : group % 2 + 1]
        out = packs[group, :, : len(span)].transpose(1, 2, 0, 3, 4, 5)  # [pl, kv, n, C, K, D]
        body = part[:, :, : whole * size]
        out[:, :, :whole] = body.reshape(*part.shape[:2], whole, size, layout.pack_heads, dim)
        if whole < chunks:
            out[:, :, whole, : tokens - whole * size] = part[:, :, whole * size :]
    return packs


def block_keys(packs: np.ndarray, layer: int, layout: Layout) -> np.ndarray:
    """Bit patterns of the keys of one layer, [n * C, K, D], from packs [groups, n, *pack]."""
    groups, row = key_places(layer, layout)
    parts = [packs[group, :, row, 0] for group in groups]  # [n, C, heads of a pack, D] each
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
    return rows.reshape(-1, *rows.shape[2:])


def key_places(layer: int, layout: Layout) -> tuple[range, int]:
    """The groups whose packs hold the keys of a layer, one head after the other where these are
    apart, and their row in such a pack."""
    group, row = divmod(layer, layout.pack_layers)
    first = group * layout.parts
    return range(first, first + (layout.parts if layout.heads_apart else 1)), row


def seed(segment_id: str, kind: str) -> int:
    """Crc state after the segment and the kind of data ("packs", "probe", "digest")."""
    return int(google_crc32c.value(f"{kind}\0{segment_id}".encode()))


def checksum(state: int, row: int, column: int, data: np.ndarray) -> int:
    """Checksum of `data`, read-only and contiguous, at (row, column) after `seed`."""
    place = google_crc32c.extend(state, _PLACE.pack(row, column))
    return int(google_crc32c.extend(place, data))


def checksums(
    state: int, rows: Sequence[int], columns: Sequence[int], data: np.ndarray, where: Iterable[int]
) -> np.ndarray:
    """uint32 [n]: checksums of `data[where[i]]`, C-contiguous [_, ...], at rows and columns [n]."""
    parts = as_bytes(data)
    extend, place = google_crc32c.extend, _PLACE.pack
    found = np.empty(len(columns), np.uint32)
    for i, (row, column, at) in enumerate(zip(rows, columns, where, strict=True)):
        found[i] = extend(extend(state, place(row, column)), parts[at])
    return found


def as_bytes(data: np.ndarray) -> np.ndarray:
    """A read-only view of C-contiguous `data` [n, ...] as uint8 [n, bytes]."""
    view = data.reshape(len(data), -1).view(np.uint8)
    view.flags.writeable = False
    return view
