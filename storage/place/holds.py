"""Holds: shared locks on segments in use, one byte each in one lock file."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections import Counter
from pathlib import Path

from ckv_jax.storage.errors import StoreError, StoreUnavailable, as_unavailable
from ckv_jax.storage.place.disk import NO_FILE, close_descriptor, open_plain

_NAME = "holds"
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process
_REPAIRING = 1 << 61  # where the bytes of repairs begin
_BUSY = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_NOWHERE = (errno.EROFS, errno.EACCES, errno.EPERM)


class Holds:
    """Shared locks on segments that are read, exclusive ones on those that are being removed.

    The locks belong to open files, not to processes: two stores in one process respect each other,
    and the kernel drops them with the process. Thread-safe. All calls raise `StoreUnavailable` for
    a lock that could not be asked for, which says nothing about who holds it.
    """

    def __init__(self, root: Path, *, readonly: bool = False) -> None:
        self._path = root / _NAME
        self._flags = os.O_RDWR | (0 if readonly else os.O_CREAT)
        self._none: tuple[int, ...] = (errno.ENOENT,) if readonly else ()
        self._lock = threading.Lock()
        self._file: _File | None = None
        self._claims: _File | None = None

    def require(self) -> None:
        """Raise StoreError where nothing could ever be locked, so that nothing could be served."""
        try:
            fd = open_plain(self._path, self._flags)
        except OSError as e:
            if e.errno in NO_FILE:
                raise StoreError(f"{self._path} is not a regular file: move it away") from e
            return  # nothing is known
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as e:
            if e.errno in _NO_LOCKS:
                raise StoreError(
                    f"{self._path.parent}: the file system has no open file description locks "
                    "(F_OFD_SETLK), which a store needs: name a folder on another file system"
                ) from e
        finally:
            close_descriptor(fd)

    def hold(self, segment_id: str) -> Hold | None:
        """Keep a segment from being removed; None where it is being removed right now.

        Where no lock can be made, as the folder cannot be written, no process here can remove it.
        """
        with self._lock:
            try:
                self._file = _current(self._path, self._flags, self._file)
            except OSError as e:
                if e.errno in (*_NOWHERE, *self._none):
                    return Hold()
                raise as_unavailable(self._path, e) from e
            place = _place(segment_id)
            return Hold(self._file, place) if self._file.take(place, alone=False) else None

    def claim(self, segment_id: str, *, repairing: bool = False) -> Hold | None:
        """Locks a segment exclusively, to remove it; None while another holds it. With `repairing`:
        from other repairs, not from its readers."""
        with self._lock:
            try:
                self._claims = _current(self._path, self._flags, self._claims)
            except OSError as e:
                raise as_unavailable(self._path, e) from e
            place = _place(segment_id) + (_REPAIRING if repairing else 0)
            return Hold(self._claims, place) if self._claims.take(place, alone=True) else None

    def close(self) -> None:
        """Close what nothing is held through; what is held stays so until it is released."""
        with self._lock:
            for file in (self._file, self._claims):
                if file is not None:
                    file.retire()
            self._file = self._claims = None


class Hold:
    """One lock, or none where there are no locks; its holder releases it, once or twice."""

    def __init__(self, file: _File | None = None, place: int = 0) -> None:
        self._file = file
        self._place = place

    def release(self) -> None:
        """Give the lock up."""
        file, self._file = self._file, None
        if file is not None:
            file.unlock(self._place)


class _File:
    """An open lock file, and how many users each of its locked bytes has."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()
        self._retired = False
        self._stuck = False  # a byte that could not be unlocked: it goes with the descriptor

    def take(self, place: int, *, alone: bool) -> bool:
        """Take a byte alone, or together with others; False while others have it, or one alone."""
        with self._lock:
            users = self._users[place]
            kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
            if (users and alone) or not (users or self._set(kind, place)):
                return False
            self._users[place] += 1
            return True

    def unlock(self, place: int) -> None:
        """Give a byte back."""
        with self._lock:
            self._users[place] -= 1
            if self._users[place] > 0:
                return
            del self._users[place]
            try:
                self._set(fcntl.F_UNLCK, place)
            except StoreUnavailable:
                self._stuck = True
            self._close_unused()

    def _set(self, kind: int, place: int) -> bool:
        request = _LOCK.pack(kind, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except OSError as e:
            if e.errno in _BUSY:
                return False
            raise StoreUnavailable(f"{_NAME}: cannot be locked: {e.strerror}") from e
        return True

    def current(self, path: Path) -> bool:
        """Whether the file is still what `path` names, and fit for use."""
        ours = os.fstat(self._fd)
        try:
            there = os.stat(path)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino) and not self._stuck

    def retire(self) -> None:
        """Close the descriptor as soon as nothing is held through it."""
        with self._lock:
            self._retired = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._retired and not self._users and self._fd >= 0:
            fd, self._fd = self._fd, -1
            close_descriptor(fd)


def _current(path: Path, flags: int, file: _File | None) -> _File:
    """`file`, or a new one where the folder was deleted and made again."""
    if file is not None:
        if file.current(path):
            return file
        file.retire()
    return _File(path, flags)


def _place(segment_id: str) -> int:
    """The byte of a segment; two that share one only seem to be held by each other's readers."""
    return int(segment_id[:15], 16)
