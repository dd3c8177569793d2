"""A segment's folder on a local disk: written in private, published by one rename."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ckv_jax.storage.descriptors import let_go
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.place.patience import progress
from ckv_jax.storage.segment import manifest as manifests

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a folder and never a symlink."""

_TRIES = 8  # of names that a sweep took away before they were locked
_EXCHANGE = 2  # renameat2: two names change places
_HERE = -100  # renameat2: relative to the working directory
_THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class LocalWorkspace:
    """A folder in tmp/ whose flock tells sweepers that its writer lives. Raises OSError."""

    def __init__(self, root: Path) -> None:
        for _ in range(_TRIES):
            self.name = secrets.token_hex(16)
            self.path = root / "tmp" / self.name
            self.path.mkdir(mode=0o700)
            try:
                fd = lock_entry(self.path)
            except BaseException:
                delete(self.path)
                raise
            if fd is not None:
                self._fd = fd
                return
            delete(self.path)  # a sweep was faster
        raise OSError(errno.EAGAIN, "swept away again and again", str(root / "tmp"))

    def publish(self, segment_id: str, keep: Callable[[], bool]) -> bool:
        root = self.path.parent.parent
        target = segment_folder(root, segment_id)
        for folder in (*(p for p in self.path.iterdir() if p.is_dir()), self.path):
            sync_folder(folder)
        if not target.parent.is_dir():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(target.parent.parent)
        for last in (False, False, True):
            try:
                os.rename(self.path, target)  # of two writers, one finds what the other published
                self._close()
                break
            except OSError as e:
                if e.errno not in _THERE:
                    raise
            if keep():
                return False
            try:
                self._replace(target)
                break
            except FileNotFoundError:  # what was there has just been removed
                if last:
                    raise
        sync_folder(target.parent)
        return True

    def _replace(self, target: Path) -> None:
        """Be published in the place of `target`, which becomes this workspace, to be discarded."""
        try:
            exchange(self.path, target)
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                raise
            aside = self.path.with_name(secrets.token_hex(16))  # a moment without either
            os.rename(target, aside)
            try:
                os.rename(self.path, target)
            except OSError:
                os.rename(aside, target)
                raise
            self._close()
            self.path = aside
            delete(aside)

    def discard(self) -> None:
        """Remove what is left of the folder, before or after `publish`; may be called twice."""
        delete(self.path)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            let_go(fd)


def lock_entry(path: Path) -> int | None:
    """A descriptor that holds the lock of an entry of tmp/; None: it is gone, or somebody's.

    Whoever makes or removes an entry has its lock, and knows then that the name is still its.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, there = os.fstat(fd), os.lstat(path)
        if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        let_go(fd)
        raise
    let_go(fd)
    return None


def exchange(one: Path, other: Path) -> None:
    """Let two names change places at once; raises OSError where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, "no renameat2")
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, FOLDER)
    try:
        os.fsync(fd)
    finally:
        let_go(fd)
    progress()


def write_file(path: Path, data: bytes) -> None:
    """Create a private file that must not exist yet, and make its bytes durable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    progress()


def replace_file(path: Path, data: bytes, tmp: Path) -> None:
    """Write a small file as a whole, by way of `tmp`, and make it and its name durable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_TRIES):
        new = tmp / secrets.token_hex(16)
        with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # against a sweep
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.rename(new, path)
                break
            except (BlockingIOError, FileNotFoundError):
                if not path.parent.is_dir():  # not a sweep's doing
                    delete(new)
                    raise
            except BaseException:
                delete(new)
                raise
    else:
        raise OSError(errno.EAGAIN, "swept away again and again", str(path))
    sync_folder(path.parent)


def segment_folder(root: Path, segment_id: str) -> Path:
    """Where a published segment lies; two hex digits of fan-out keep folders short."""
    if not manifests.is_id(segment_id):
        raise StoreError(f"segment id: got {segment_id!r}, expected hex")
    return root / "segments" / segment_id[:2] / segment_id


def delete(path: Path) -> None:
    """Delete a folder, or whatever has its name, as far as that is possible now."""
    for _ in range(2):  # once more where the disk stumbled
        with contextlib.suppress(OSError):
            _delete(path)
            return


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for name in os.listdir(path):  # one by one: each of them may be gigabytes
        inner = path / name
        if inner.is_symlink() or not inner.is_dir():
            inner.unlink(missing_ok=True)
        else:
            shutil.rmtree(inner, ignore_errors=True)
        progress()
    path.rmdir()
