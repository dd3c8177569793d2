"""Plain files and folders, looked at so that no symlink and no device passes for one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ckv_jax.storage.descriptors import let_go
from ckv_jax.storage.errors import ABSENT, as_unavailable
from ckv_jax.storage.place.patience import progress


def names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where it is missing or is none."""
    try:
        found = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    progress()
    return found


def open_plain(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a plain file; anything else is as good as absent."""
    fd = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
    except BaseException:
        let_go(fd)
        raise
    if not plain:
        let_go(fd)
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
