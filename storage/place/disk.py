"""Plain files and folders of a local disk: opened past no symlink, written durably, deleted."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from ckv_jax.storage.errors import ABSENT, as_unavailable
from ckv_jax.storage.place.disk_timeout import progress

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a folder and never a symlink."""

NO_FILE = (errno.ENXIO, errno.ELOOP, errno.EISDIR)
"""What the kernel says of a name that is there, and is no plain file."""
TRIES = 8  # of names that a sweep took away before they were locked
_EXCHANGE = 2  # renameat2: two names change places
_HERE = -100  # renameat2: relative to the working directory


def close_descriptor(fd: int) -> None:
    """Closes a descriptor, whatever the kernel says of it.

    Linux frees it even where `close` fails, and what this store writes is fsynced before it is
    closed: such an error proves nothing and loses nothing, and must not end an operation that is
    complete, or keep other descriptors open.
    """
    with contextlib.suppress(OSError):
        os.close(fd)


def names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where it is missing or is none."""
    try:
        found = os.listdir(folder)
    except OSError as e:
        if e.errno in ABSENT:
            return []
        raise
    progress()
    return found


def open_plain(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a plain file; anything else is as good as absent."""
    fd = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
    except BaseException:
        close_descriptor(fd)
        raise
    if not plain:
        close_descriptor(fd)
        raise OSError(errno.ENXIO, "is no plain file", str(path))
    return fd


def is_there(kind: Callable[[int], bool], path: str, size: int | None = None) -> bool:
    """Whether something of a kind (`stat.S_ISREG`) is there; raises StoreUnavailable."""
    try:
        found = os.lstat(path)
    except OSError as e:
        if e.errno in ABSENT:
            return False
        raise as_unavailable(path, e) from e
    progress()
    return kind(found.st_mode) and size in (None, found.st_size)


def is_gone(path: str | Path) -> bool:
    """Whether there is no such name, not even a dangling link; raises OSError where none can say.

    `os.path.lexists` takes every error for absence.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def lock_entry(path: Path) -> int | None:
    """A descriptor that holds the lock of an entry of tmp/; None: it is gone, or locked.

    A writer or sweep that makes or removes an entry has its lock, and knows that the name is still
    its own.
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
        close_descriptor(fd)
        raise
    close_descriptor(fd)
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
        close_descriptor(fd)
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
    for _ in range(TRIES):
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
