"""Checksums that cover content and identity, so that a valid pack in the wrong place is bad.

Each checksum is the crc32c of (segment id, kind, row, column) followed by the bytes. For bytes of
one length the crc state is a bijection of its seed, so within a segment no two places share a
checksum for equal content, and across segments they meet with probability 2**-32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np

_PLACE = struct.Struct("<II")


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
