"""Encryption at rest: the key of a store, and the keys derived from it.

AES-256-GCM. Small files (manifests, records) are sealed as a whole under a key of the store; the
pieces of a segment under a key of the segment's own, which its random salt gives. Imports the
`cryptography` package, so that only a store with a key imports this module.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ckv_jax.storage.errors import SegmentForeign
from ckv_jax.storage.segment import arrays
from ckv_jax.storage.segment.seal import SEALED, Seal, Stream

_log = logging.getLogger(__name__)
_KEY_BYTES = 32  # AES-256
_NONCE_BYTES = 12
_RANDOM = 8  # bytes of a piece's nonce; its column is the rest
_COLUMN = struct.Struct("<I")


class StoreKey:
    """The key of one store: 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._files = AESGCM(self.derive(b"files"))
        self.check = self.derive(b"check")[:16].hex()
        """Check value of the key, kept in the marker of a store."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StoreKey:
        """The key in a file of 64 hexadecimal digits; raises ValueError, which repeats none."""
        try:
            text, mode = Path(path).read_bytes().strip(), os.stat(path).st_mode
        except OSError as e:
            raise ValueError(f"the key file {path} cannot be read: {e.strerror}") from e
        if len(text) != 2 * _KEY_BYTES or set(text.lower()) - set(b"0123456789abcdef"):
            raise ValueError(
                f"the key file {path}: expected {2 * _KEY_BYTES} hexadecimal digits, as "
                "`openssl rand -hex 32` writes"
            )
        if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH):
            _log.warning("other users can open the key file %s; run: chmod 600 %s", path, path)
        return cls(bytes.fromhex(text.decode()))

    def derive(self, purpose: bytes, salt: bytes | None = None) -> bytes:
        """32 bytes for one purpose, by HKDF of the store's key."""
        return HKDF(hashes.SHA256(), _KEY_BYTES, salt, b"ckv " + purpose).derive(self._key)

    def seal(self, name: str, data: bytes) -> bytes:
        """A small file's bytes on disk; `name` is bound to them."""
        nonce = os.urandom(_NONCE_BYTES)
        rest = nonce + self._files.encrypt(nonce, data, name.encode())
        return SEALED + hashlib.sha256(rest).digest() + rest

    def open(self, name: str, data: bytes) -> bytes:
        """Inverse of `seal`.

        Raises:
          ValueError: the bytes are not as they were written.
          SegmentForeign: they are, by another key or for another name: nothing is damaged.
        """
        at = len(SEALED)
        digest, rest = data[at : at + 32], data[at + 32 :]
        if not data.startswith(SEALED) or hashlib.sha256(rest).digest() != digest:
            raise ValueError("not an encrypted file as it was written")
        try:
            return self._files.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], name.encode())
        except InvalidTag:
            raise SegmentForeign(
                f"{name}: encrypted with another key, or tampered with: it is not changed"
            ) from None

    def segment(self, salt: bytes | None = None) -> SegmentKey:
        """The key of a segment by its salt; None: a new one."""
        return SegmentKey(self, os.urandom(_KEY_BYTES) if salt is None else salt)


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """The key of one segment's pieces; the salt of `store`'s key is in its manifest."""

    store: StoreKey
    salt: bytes

    def seal_of(self, tables: Mapping[str, np.ndarray]) -> Seal:
        """The seal of the segment's pieces; see `Seal`."""
        return _EncryptedSeal(algorithms.AES(self.store.derive(b"segment", self.salt)), tables)


class _EncryptedSeal(Seal):
    """An entry of a table is a random nonce and a tag, which authenticates the place, too: a piece
    is as long as in clear, and takes another nonce when it is written again."""

    whole = True

    def __init__(self, aes: algorithms.AES, tables: Mapping[str, np.ndarray]) -> None:
        self._aes = aes
        self._tables = tables

    def seal(self, kind: str, rows: np.ndarray, columns: np.ndarray, data: np.ndarray) -> None:
        for row, column, part in _pieces(rows, columns, data, range(len(data))):
            one = self._begin(kind, row, column)
            one.context.update_into(part, part)
            one.end()

    def open(
        self,
        kind: str,
        rows: np.ndarray,
        columns: np.ndarray,
        data: np.ndarray,
        where: np.ndarray | None = None,
    ) -> np.ndarray:
        good, table = np.zeros(len(rows), bool), self._tables[kind]
        at = range(len(data)) if where is None else where.tolist()
        for i, (row, column, part) in enumerate(_pieces(rows, columns, data, at)):
            one = self._begin(kind, row, column, table[row, column].tobytes())
            one.context.update_into(part, part)
            good[i] = one.end()
        return good

    def is_of(self, kind: str, row: int, column: int, data: np.ndarray) -> bool:
        entry = self._tables[kind][row, column].tobytes()
        one = self._begin(kind, row, column, entry[:_RANDOM])
        one.update(data)  # what comes of it is written nowhere
        one.context.finalize()
        return bool(one.context.tag == entry[_RANDOM:])

    def stream(self, kind: str, row: int, column: int, *, writing: bool) -> Stream:
        entry = None if writing else self._tables[kind][row, column].tobytes()
        return self._begin(kind, row, column, entry)

    def _begin(self, kind: str, row: int, column: int, entry: bytes | None = None) -> _Piece:
        """`entry`: of a piece that is read; None: of one that is written, which fills it."""
        if entry is None:
            nonce, tag = os.urandom(_RANDOM), b""
        else:
            nonce, tag = entry[:_RANDOM], entry[_RANDOM:]
        cipher = Cipher(self._aes, modes.GCM(nonce + _COLUMN.pack(column), tag or None))
        context = cipher.decryptor() if tag else cipher.encryptor()
        context.authenticate_additional_data(kind.encode() + arrays.PLACE.pack(row, column))
        return _Piece(context, nonce, self._tables[kind][row, column] if entry is None else None)


class _Piece:
    """A `Stream`; `note`, uint8 [`ENTRY_BYTES`], is filled at its end."""

    def __init__(self, context: Any, nonce: bytes, note: np.ndarray | None) -> None:
        self.context, self._nonce, self._note = context, nonce, note

    def update(self, data: np.ndarray) -> np.ndarray:
        return np.frombuffer(self.context.update(data), np.uint8)

    def end(self) -> bool:
        try:
            self.context.finalize()
        except InvalidTag:
            return False
        if self._note is not None:
            self._note[:] = np.frombuffer(self._nonce + self.context.tag, np.uint8)
        return True


def _pieces(
    rows: np.ndarray, columns: np.ndarray, data: np.ndarray, at: Any
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(row, column, uint8 bytes) of `data[at]`."""
    parts = data.reshape(len(data), -1).view(np.uint8)
    places = zip(rows.tolist(), columns.tolist(), at, strict=True)
    return ((row, column, parts[i]) for row, column, i in places)
