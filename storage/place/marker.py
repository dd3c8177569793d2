"""The marker of a folder that is ours: `store.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.layout import VERSION
from ckv_jax.storage.place.disk import close_descriptor, open_plain
from ckv_jax.storage.segment import manifest as manifests

FILE = "store.json"
_FORMAT = {"format": "ckv-store", "version": VERSION}
DATA = json.dumps(_FORMAT).encode()
_LARGEST = 1000  # bytes
_CHANGES = 2  # a marker that is made is absent, then torn, then whole
FOLDERS = ("segments", "pins", "tmp")


def check(root: Path) -> bool:
    """Whether a folder is a store of this version; False: it is empty, and may become one.

    Raises:
      StoreError: it is something else, or another version's.
      OSError: it cannot be looked at.
    """
    seen = _read(root)
    for _ in range(_CHANGES):
        try:
            return _is_ours(root, seen)
        except StoreError:  # proof only if no other process is making a store of it meanwhile
            before, seen = seen, _read(root)
            if seen == before:
                raise
    return _is_ours(root, seen)


def _read(root: Path) -> bytes | None:
    """The marker's bytes; None: there is none."""
    try:
        with open(root / FILE, "rb", opener=_plain) as file:
            return file.read(_LARGEST)
    except FileNotFoundError:
        return None


def _is_ours(root: Path, data: bytes | None) -> bool:
    if data is None:
        if _any(root):
            raise StoreError(f"{root}: not a store, and not empty")
        return False
    try:
        judge(str(root), data)
    except ValueError:  # torn by the death of who made it, or hurt since
        if _torn(data) and _fresh(root):
            return False
        if not _segments(root):
            raise StoreError(f"{root}: not a store") from None
    return True


def judge(place: str, data: bytes) -> None:
    """Raises StoreError for another store's marker, ValueError for what is no marker at all."""
    try:
        found = json.loads(data)
    except RecursionError as e:
        raise ValueError(f"{place}: nested too deeply") from e
    if not isinstance(found, dict) or found.get("format") != _FORMAT["format"]:
        raise StoreError(f"{place}: not a store")
    if found != _FORMAT:
        raise StoreError(
            f"{place}: a store of version {str(found.get('version'))[:20]}, expected {VERSION}: "
            "name another folder and ingest again; nothing was changed"
        )


def write(root: Path) -> None:
    """Make an empty folder ours; raises OSError.

    The marker is the first thing that is made, so that a process that dies here leaves a folder
    that is still empty, or known by the marker's beginning.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(root / FILE, flags, 0o600)
    try:
        os.write(fd, DATA)
        os.fsync(fd)
    finally:
        close_descriptor(fd)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        close_descriptor(folder)


def _plain(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _torn(data: bytes) -> bool:
    return DATA.startswith(data) or not data.strip(b"\0")


def _fresh(root: Path) -> bool:
    """Whether a folder holds no more than its maker made at once: what is not ours stays."""
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name in FOLDERS and entry.is_dir(follow_symlinks=False):
                fresh = not _any(Path(entry.path))
            elif entry.name == "holds":
                fresh = entry.is_file(follow_symlinks=False) and not entry.stat().st_size
            else:
                fresh = entry.name == FILE
            if not fresh:
                return False
    return True


def _any(root: Path) -> bool:
    with os.scandir(root) as entries:
        return next(entries, None) is not None


def _segments(root: Path) -> bool:
    """Whether any segment lies where ours do."""
    try:
        fans = os.listdir(root / "segments")
        return any(manifests.is_id(n) for fan in fans for n in os.listdir(root / "segments" / fan))
    except (FileNotFoundError, NotADirectoryError):
        return False
