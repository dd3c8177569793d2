"""Seals of a segment's pieces: checksums that prove their content, or authenticated encryption in
an encrypted store.

A piece is what has an entry in a table of the manifest: a pack, a chunk of a probe, a part of a
layer's digest, a row of an assignment. `Seal` is of pieces in clear, whose entries are checksums;
`encryption.py` has the other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import google_crc32c
import numpy as np

from ckv_jax.storage.segment import arrays

SEALED = b"ckv-sealed-1\n"
"""How an encrypted manifest or record begins: then come the SHA-256 of the rest, a nonce, and
AES-GCM's output."""
ENTRY_BYTES = 24
"""Of a table of an encrypted segment: 8 of a nonce, and a tag."""


class Stream(Protocol):
    """One piece that comes in parts, in order."""

    def update(self, data: np.ndarray) -> np.ndarray:
        """The next part as it is written, or as it was sealed: uint8 [n], as `data`, read-only."""

    def end(self) -> bool:
        """After the last part: notes what proves the piece, or says whether that is as noted."""


class Seal:
    """Notes what proves pieces, and checks them. `tables`: those of the manifest, by kind."""

    whole = False
    """Whether pieces can be read as a whole only."""

    def __init__(self, segment_id: str, tables: Mapping[str, np.ndarray]) -> None:
        self._tables = tables
        self._seeds = {kind: arrays.seed(segment_id, kind) for kind in tables}

    def seal(self, kind: str, rows: np.ndarray, columns: np.ndarray, data: np.ndarray) -> None:
        """Turn pieces `data` [n, ...] at rows and columns int [n] into what is written, in place,
        and note what proves them."""
        seed = self._seeds[kind]
        found = arrays.checksums(seed, rows, columns, arrays.as_rows(data))
        self._tables[kind][rows, columns] = found

    def open(
        self,
        kind: str,
        rows: np.ndarray,
        columns: np.ndarray,
        data: np.ndarray,
        where: np.ndarray | None = None,
    ) -> np.ndarray:
        """Turn pieces that were read, uint8 `data[where]` [n, bytes], into what was sealed, in
        place.

        Returns bool [n]: whether each is as it was written; the bytes of others are of no use.
        """
        found = arrays.checksums(self._seeds[kind], rows, columns, data, where)
        good: np.ndarray = np.equal(found, self._tables[kind][rows, columns])
        return good

    def is_of(self, kind: str, row: int, column: int, data: np.ndarray) -> bool:
        """Whether uint8 `data`, in clear, is what was sealed at a place."""
        return bool(self.open(kind, np.array([row]), np.array([column]), data[None])[0])

    def stream(self, kind: str, row: int, column: int, *, writing: bool) -> Stream:
        """A piece that comes in parts."""
        state = arrays.placed(self._seeds[kind], row, column)
        return _Checksummed(self._tables[kind], (row, column), state, writing)


class _Checksummed:
    def __init__(
        self, table: np.ndarray, place: tuple[int, int], state: int, writing: bool
    ) -> None:
        self._table, self._place, self._state, self._writing = table, place, state, writing

    def update(self, data: np.ndarray) -> np.ndarray:
        self._state = int(google_crc32c.extend(self._state, data))
        return data

    def end(self) -> bool:
        if self._writing:
            self._table[self._place] = self._state
        return bool(self._table[self._place] == self._state)


def chunks_of(data: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(chunks int [n], uint8 [n, bytes]) of contiguous `data` [t, ...] in chunks of `size` tokens:
    the whole ones, then a partial one."""
    whole = len(data) // size
    flat = data.reshape(len(data), -1).view(np.uint8)
    if whole:
        yield np.arange(whole), flat[: whole * size].reshape(whole, -1)
    if len(data) % size:
        yield np.array([whole]), flat[whole * size :].reshape(1, -1)
