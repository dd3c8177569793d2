"""Segments in a local folder: private modes, no symlinks, one rename to publish, flock to hold."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckv_jax.storage.errors import SegmentDamaged, StoreError, as_store_error
from ckv_jax.storage.layout import VERSION
from ckv_jax.storage.place.workspace import (
    FOLDER,
    LocalHold,
    LocalWorkspace,
    put_aside,
    segment_folder,
    store_lock,
    sync_folder,
    write_file,
)
from ckv_jax.storage.segment import manifest as manifests

_MARKER = "store.json"
_OWN = ("segments", "pins", "tmp", "lock", "catalog.sqlite", "store.json", "lost+found")
_FORMAT = {"format": "ckv-store", "version": VERSION}


class LocalFiles:
    """`Files` under one folder.

    store.json                      what this folder is
    catalog.sqlite                  the index (`catalog.py`)
    segments/<2 hex>/<id>/          published segments
    pins/<prefix id>                pinned prefixes
    tmp/<hex>/                      segments being written or removed
    lock                            taken while tmp/ is swept
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.make()

    def make(self) -> None:
        """Create whatever is missing of the store; refuse a folder that is something else."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            marker = self.root / _MARKER
            if marker.exists():
                self._check_marker(marker)
            elif not all(p.name.startswith(_OWN) for p in self.root.iterdir()):
                raise StoreError(f"{self.root}: not a store, and not empty")
            for name in ("segments", "pins", "tmp"):
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(self.root / name, FOLDER))
            if not marker.exists():
                self._replace(marker, json.dumps(_FORMAT).encode())
        except FileExistsError as e:
            raise StoreError(f"{e.filename}: is a file, expected a folder") from e
        except OSError as e:
            raise StoreError(f"{self.root}: cannot be used as a store: {e.strerror}") from e

    def _check_marker(self, marker: Path) -> None:
        try:
            found = json.loads(marker.read_bytes()[:1000])
        except ValueError:  # damaged: the folders beside it say what this is
            if not (self.root / "segments").is_dir():
                raise StoreError(f"{self.root}: not a store") from None
            return
        if not isinstance(found, dict) or found.get("format") != _FORMAT["format"]:
            raise StoreError(f"{self.root}: not a store")
        if found != _FORMAT:
            raise StoreError(
                f"{self.root}: a store of version {found.get('version')}, expected {VERSION}: "
                "name another folder and ingest again"
            )

    @property
    def catalog_path(self) -> Path | None:
        return self.root / "catalog.sqlite"

    def _folder(self, segment_id: str) -> Path:
        return segment_folder(self.root, segment_id)

    def segment_ids(self) -> set[str]:
        found: set[str] = set()
        with contextlib.suppress(OSError), os.scandir(self.root / "segments") as fans:
            for fan in fans:
                if len(fan.name) == 2 and fan.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        found.update(n for n in os.listdir(fan.path) if n.startswith(fan.name))
        return {n for n in found if manifests.is_id(n)}

    def stamp(self, segment_id: str) -> object:
        try:
            found = os.lstat(self._folder(segment_id) / manifests.FILE)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _open_manifest(self, segment_id: str) -> int:
        """Open the manifest, one plain name at a time, so that no symlink is followed."""
        names = ["segments", segment_id[:2], self._folder(segment_id).name]
        try:
            at = os.open(self.root, FOLDER & ~os.O_NOFOLLOW)
            try:
                for name in names:
                    below = os.open(name, FOLDER, dir_fd=at)
                    os.close(at)
                    at = below
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(manifests.FILE, flags, dir_fd=at)
            finally:
                os.close(at)
        except OSError as e:
            raise SegmentDamaged(f"segment {segment_id}: no manifest: {e.strerror}") from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SegmentDamaged(f"segment {segment_id}: the manifest is not a plain file")
        return fd

    def manifest(self, segment_id: str) -> bytes:
        fd = self._open_manifest(segment_id)
        with os.fdopen(fd, "rb") as file:
            try:
                if os.fstat(fd).st_size > manifests.MAX_BYTES:
                    raise SegmentDamaged(f"segment {segment_id}: the manifest is too large")
                return file.read(manifests.MAX_BYTES + 1)
            except OSError as e:
                raise SegmentDamaged(f"segment {segment_id}: manifest: {e.strerror}") from e

    def manifests(self, ids: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for id_ in ids:
            with contextlib.suppress(SegmentDamaged):
                yield id_, self.manifest(id_)

    def kvstore(self, segment_id: str, array: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self._folder(segment_id)}/{array}/"}

    def open_direct(self, segment_id: str, name: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(f"{self._folder(segment_id)}/{name}", flags)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a plain file")
        return fd

    def hold(self, segment_id: str) -> LocalHold:
        fd = self._open_manifest(segment_id)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ours, there = os.fstat(fd), os.lstat(self._folder(segment_id) / manifests.FILE)
            if ours.st_ino != there.st_ino:
                raise OSError(errno.ENOENT, "replaced")
        except OSError as e:
            os.close(fd)
            raise SegmentDamaged(f"segment {segment_id}: being removed") from e
        return LocalHold(fd)

    def damaged(self, segment_id: str, sizes: Mapping[str, int]) -> set[str]:
        folder = str(self._folder(segment_id))
        parents = {os.path.dirname(folder), folder}
        parents.update(f"{folder}/{os.path.dirname(name)}" for name in sizes)
        if not all(_is(stat.S_ISDIR, p) for p in parents):
            return set(sizes)
        return {n for n, size in sizes.items() if not _is(stat.S_ISREG, f"{folder}/{n}", size)}

    def workspace(self) -> LocalWorkspace:
        self.make()
        try:
            with store_lock(self.root):
                return LocalWorkspace(self.root)
        except OSError as e:
            raise as_store_error(e) from e

    def workspaces(self) -> set[str]:
        try:
            return set(os.listdir(self.root / "tmp"))
        except OSError:
            return set()

    def remove(self, segment_id: str) -> bool:
        folder = self._folder(segment_id)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(SegmentDamaged):  # without a manifest nobody can hold it
                fd = self._open_manifest(segment_id)
                stack.callback(os.close, fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            put_aside(folder, self.root / "tmp")
        return True

    def pins(self) -> set[str]:
        try:
            return {n for n in os.listdir(self.root / "pins") if manifests.is_id(n)}
        except OSError:
            return set()

    def set_pin(self, prefix_id: str, pinned: bool) -> None:
        if not manifests.is_id(prefix_id):
            raise ValueError(f"prefix id: got {prefix_id!r}, expected hex")
        path = self.root / "pins" / prefix_id
        try:
            if pinned:
                self._replace(path, b"")
            else:
                path.unlink(missing_ok=True)
            sync_folder(path.parent)
        except OSError as e:
            raise StoreError(f"{path}: cannot be written: {e}") from e

    def sweep(self) -> int:
        swept = 0
        with contextlib.suppress(OSError), store_lock(self.root):
            for name in os.listdir(self.root / "tmp"):
                path = self.root / "tmp" / name
                if path.is_symlink() or not path.is_dir():
                    path.unlink(missing_ok=True)
                    continue
                fd = os.open(path, FOLDER)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its writer lives
                finally:
                    os.close(fd)
                shutil.rmtree(path, ignore_errors=True)
                swept += 1
        return swept

    def _replace(self, path: Path, data: bytes) -> None:
        """Write a small file as a whole."""
        new = self.root / "tmp" / secrets.token_hex(16)
        with store_lock(self.root):  # against a sweep
            write_file(new, data)
            os.replace(new, path)

    def close(self) -> None:
        """Nothing is kept open."""


def _is(kind: Callable[[int], bool], path: str, size: int | None = None) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return kind(found.st_mode) and size in (None, found.st_size)
