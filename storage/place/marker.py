"""The marker file of a store, `store.json`: writes it, checks it, and refuses other folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckv_jax.storage.errors import SegmentForeign, StoreError, WrongKey
from ckv_jax.storage.layout import VERSION
from ckv_jax.storage.place.disk import close_descriptor, lock_within, open_plain, sync_folder
from ckv_jax.storage.segment import manifest as manifests
from ckv_jax.storage.segment.seal import SEALED

if TYPE_CHECKING:
    from ckv_jax.storage.encryption import StoreKey

FILE = "store.json"
_FORMAT = {"format": "ckv-store", "version": VERSION}
_LARGEST = 1000  # bytes
_LOCK_S = 10.0  # the longest wait for another process that makes the same folder a store
_CHANGES = 2  # a marker that is made is absent, then torn, then whole
FOLDERS = ("segments", "pins", "tmp")


def data_of(key_check: str = "") -> bytes:
    """The marker's bytes. `key_check`: what it says of the key of an encrypted store."""
    return json.dumps(_FORMAT | ({"key": key_check} if key_check else {})).encode()


def check(root: Path, key: StoreKey | None = None) -> bool:
    """Whether a folder is a store of this version; False: it is empty, and may become one.

    Raises:
      StoreError: it is something else, or another version's; WrongKey: or has another key.
      OSError: it cannot be looked at.
    """
    seen = _read(root)
    for _ in range(_CHANGES):
        try:
            return _is_ours(root, seen, key)
        except StoreError:  # proof only if no other process is making a store of it meanwhile
            before, seen = seen, _read(root)
            if seen == before:
                raise
    return _is_ours(root, seen, key)


def _read(root: Path) -> bytes | None:
    """The marker's bytes; None: there is none."""
    try:
        with open(root / FILE, "rb", opener=open_plain) as file:
            return file.read(_LARGEST)
    except FileNotFoundError:
        return None


def _is_ours(root: Path, data: bytes | None, key: StoreKey | None) -> bool:
    key_check = key.check if key else ""
    if data is None:
        if os.listdir(root):
            raise StoreError(
                f"{root} is not a store and is not empty: name a store, or a new or empty folder"
            )
        return False
    try:
        judge(str(root), data, key_check)
    except ValueError:  # torn by the death of who made it, or hurt since
        torn = data_of(key_check).startswith(data) or not data.strip(b"\0")
        if torn and _fresh(root):
            return False
        if not _segments(root):
            raise StoreError(f"{root} is not a store: its {FILE} is damaged") from None
        _check_segments(root, key)
    return True


def _check_segments(root: Path, key: StoreKey | None) -> None:
    """Raises WrongKey where all segments are of another key.

    For a store with a damaged marker: opened with any key, it would get segments of two keys.
    """
    error: WrongKey | None = None
    for path in root.glob(f"segments/*/*/{manifests.FILE}"):
        data = b""
        try:
            with open(path, "rb", opener=open_plain) as file:
                data = file.read(manifests.MAX_BYTES)
            manifests.opened(data, path.parent.name, key)
            return
        except SegmentForeign:
            error = _wrong_key(str(root), data.startswith(SEALED), key is not None)
        except (OSError, ValueError):
            continue  # damaged, or not to be read now
    if error is not None:
        raise error


def judge(place: str, data: bytes, key_check: str = "") -> None:
    """Raises StoreError for another store's marker, or one of a store with another key, ValueError
    for what is no marker at all."""
    try:
        found = json.loads(data)
    except RecursionError as e:
        raise ValueError(f"{place}: nested too deeply") from e
    if not isinstance(found, dict) or found.get("format") != _FORMAT["format"]:
        raise StoreError(f"{place} is not a store: its {FILE} is of another program")
    own = found.pop("key", "")
    if found != _FORMAT:
        raise StoreError(
            f"{place}: a store of version {str(found.get('version'))[:20]}, expected {VERSION}: "
            "name another folder and ingest the texts again; this one was not changed"
        )
    if own != key_check:
        raise _wrong_key(place, bool(own), bool(key_check))


def _wrong_key(place: str, encrypted: bool, with_key: bool) -> WrongKey:
    if not encrypted:
        return WrongKey(
            f"{place}: not encrypted: leave --encrypt-key-file (CKV_ENCRYPT_KEY_FILE) out, or name "
            "another folder and ingest the texts again"
        )
    how = "with another key than that in" if with_key else "and not readable without"
    return WrongKey(f"{place}: encrypted {how} --encrypt-key-file FILE")


def write(root: Path, key: StoreKey | None = None) -> None:
    """Make an empty folder ours; raises OSError, and as `check` where another process was first.

    The marker is the first thing that is made, so that a process that dies here leaves a folder
    that is still empty, or known by the marker's beginning.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(root / FILE, flags, 0o600)
    try:
        lock_within(fd, _LOCK_S)
        found = os.read(fd, _LARGEST)
        if not found or not _is_ours(root, found, key):
            os.pwrite(fd, data_of(key.check if key else ""), 0)
            os.fsync(fd)
    finally:
        close_descriptor(fd)
    sync_folder(root.resolve())


def _fresh(root: Path) -> bool:
    """Whether a folder holds no more than its maker made at once: what is not ours stays."""
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name in FOLDERS and entry.is_dir(follow_symlinks=False):
                fresh = not os.listdir(entry.path)
            elif entry.name == "holds":
                fresh = entry.is_file(follow_symlinks=False) and not entry.stat().st_size
            else:
                fresh = entry.name == FILE
            if not fresh:
                return False
    return True


def _segments(root: Path) -> bool:
    """Whether the folder has any segment."""
    try:
        fans = os.listdir(root / "segments")
        return any(manifests.is_id(n) for fan in fans for n in os.listdir(root / "segments" / fan))
    except (FileNotFoundError, NotADirectoryError):
        return False
