"""A segment's folder on a local disk: written in private, published by one rename, then held."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.segment import manifest as manifests

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a folder and never a symlink."""


class LocalHold:
    """A shared flock on a segment's manifest; the kernel drops it with the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LocalWorkspace:
    """A folder in tmp/ whose flock tells sweepers that its writer lives."""

    def __init__(self, root: Path) -> None:
        self.name = secrets.token_hex(16)
        self.path = root / "tmp" / self.name
        self.path.mkdir(mode=0o700)
        self._fd = os.open(self.path, FOLDER)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        root = self.path.parent.parent
        target = segment_folder(root, segment_id)
        for folder in (*(p for p in self.path.iterdir() if p.is_dir()), self.path):
            sync_folder(folder)
        if not target.parent.is_dir():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(target.parent.parent)
        with store_lock(root):  # of two writers, one sees what the other published
            if os.path.lexists(target):
                if keep():
                    return False
                put_aside(target, self.path.parent)
            os.rename(self.path, target)
        sync_folder(target.parent)
        self._close()
        return True

    def discard(self) -> None:
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Create a private file that must not exist yet, and make its bytes durable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def store_lock(root: Path) -> Iterator[None]:
    """The lock of all processes that use a store: for moments, never while data is written."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(root / "lock", flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def segment_folder(root: Path, segment_id: str) -> Path:
    """Where a published segment lies; two hex digits of fan-out keep folders short."""
    if not manifests.is_id(segment_id):
        raise StoreError(f"segment id: got {segment_id!r}, expected hex")
    return root / "segments" / segment_id[:2] / segment_id


def put_aside(folder: Path, tmp: Path) -> None:
    """Take a published folder out of sight at once, then delete it."""
    aside = tmp / secrets.token_hex(16)
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    except OSError as e:
        raise StoreError(f"{folder}: cannot be removed: {e}") from e
    if aside.is_symlink() or not aside.is_dir():
        aside.unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
