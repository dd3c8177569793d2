"""Python's own system calls, counted: the k-th one fails, or is where the process dies.

Covers what `os`, `fcntl`, `io` and `sqlite3` do for the store. What TensorStore's threads and the
kernel's queues do is C's own: `traced.py` makes those calls fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckv_jax.storage.place import local

CODES = ("EIO", "EMFILE", "ENFILE", "ENOSPC", "EDQUOT", "ENOLCK", "EROFS", "EINTR", "ESTALE")
"""Errors that each call is made to fail with."""
DIED = 77
"""Exit status of a process that died where it was told to."""

_OS = (
    "open", "close", "read", "pread", "preadv", "write", "pwrite", "pwritev", "fsync", "fdatasync",
    "rename", "replace", "link", "unlink", "remove", "symlink", "mkdir", "rmdir", "listdir",
    "scandir", "stat", "lstat", "fstat", "statvfs", "truncate", "ftruncate", "utime", "chmod",
    "posix_fallocate", "access",
)  # fmt: skip
_SQLITE = {
    "EMFILE": sqlite3.SQLITE_CANTOPEN,
    "ENFILE": sqlite3.SQLITE_CANTOPEN,
    "ENOSPC": sqlite3.SQLITE_FULL,
    "EDQUOT": sqlite3.SQLITE_FULL,
    "ENOLCK": sqlite3.SQLITE_IOERR_LOCK,
    "EROFS": sqlite3.SQLITE_READONLY,
    "EINTR": sqlite3.SQLITE_INTERRUPT,
}
"""What SQLite makes of an error of the disk; anything else is an I/O error to it."""

Note = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Told of a call that was made: name, arguments, keyword arguments, result."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to calls.

    Attributes:
      at: which call, counted from 1; 0: none.
      code: name of its error; None: the process dies there.
      lasting: whether all later calls of that name fail, too.
    """

    at: int = 0
    code: str | None = None
    lasting: bool = False


class Calls:
    """Stands between the store and its system calls; a context manager, thread-safe.

    Calls are counted from `arm` to `disarm`; connections to databases must be made in between
    `__enter__` and `__exit__` to be counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = False
        self._plan = Plan()
        self._failing: str | None = None
        self._undo = contextlib.ExitStack()
        self.count = 0
        """Calls since `arm`."""
        self.failed = ""
        """Name of the call that was made to fail first."""
        self.note: Note | None = None

    def __enter__(self) -> Calls:
        for name in _OS:
            self._replace(os, name)
        self._replace(fcntl, "flock")
        self._replace(fcntl, "lockf")
        self._replace(fcntl, "fcntl")
        self._replace(local, "exchange")  # which asks the kernel by itself
        real_open, real_connect = io.open, sqlite3.connect
        kind = self._connections()

        def open_file(*args: Any, **kwargs: Any) -> Any:
            if not self._armed:
                return real_open(*args, **kwargs)
            if not isinstance(args[0], int):
                self.call("open")
            return _File(self, real_open(*args, **kwargs))

        def connect(*args: Any, **kwargs: Any) -> Any:
            if args[0] == ":memory:":  # no call of the system's
                return real_connect(*args, **kwargs)
            self.call("sqlite3.connect", database=True)
            return real_connect(*args, factory=kind, **kwargs)

        self._set(io, "open", open_file)
        self._set(sqlite3, "connect", connect)
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        self._undo.close()

    def _set(self, module: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)

    def _replace(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def made(*args: Any, **kwargs: Any) -> Any:
            if not self._armed:
                return real(*args, **kwargs)
            try:
                self.call(name)
            except OSError:
                if name == "close":
                    real(*args)  # the kernel closes the descriptor, whatever it answers
                raise
            result = real(*args, **kwargs)
            if self.note is not None:
                self.note(name, args, kwargs, result)
            return result

        self._set(module, name, made)

    # -- for one operation -----------------------------------------------------------------------

    def arm(self, plan: Plan) -> None:
        """Count from here on, and let happen what `plan` says."""
        with self._lock:
            self._plan, self.count, self.failed, self._failing = plan, 0, "", None
            self._armed = True

    def disarm(self) -> None:
        """Let all calls through, uncounted."""
        self._armed = False

    def call(self, name: str, *, database: bool = False) -> None:
        """One call is about to be made; raises what it is to fail with."""
        if not self._armed:
            return
        with self._lock:
            self.count += 1
            hit = self.count == self._plan.at
            if hit:
                self.failed, self._failing = name, name if self._plan.lasting else None
            elif name != self._failing:
                return
        code = self._plan.code
        if code is None:
            os._exit(DIED)
        if database:
            error = sqlite3.OperationalError(f"injected {code}")
            error.sqlite_errorcode = _SQLITE.get(code, sqlite3.SQLITE_IOERR)
            raise error
        number = getattr(errno, code)
        raise OSError(number, os.strerror(number))

    def _connections(self) -> type[sqlite3.Connection]:
        """A class of connections whose statements are calls."""
        calls = self

        class Counted(sqlite3.Connection):
            def execute(self, *args: Any) -> Any:
                calls.call(f"sqlite3 {_verb(args[0])}", database=True)
                return super().execute(*args)

            def executemany(self, *args: Any) -> Any:
                calls.call(f"sqlite3 {_verb(args[0])}", database=True)
                return super().executemany(*args)

            def executescript(self, *args: Any) -> Any:
                calls.call("sqlite3 script", database=True)
                return super().executescript(*args)

            def __exit__(self, *error: Any) -> Any:
                if error[0] is None and self.in_transaction:
                    try:
                        calls.call("sqlite3 commit", database=True)
                    except sqlite3.Error:
                        self.rollback()
                        raise
                found = super().__exit__(*error)
                if calls.note is not None:
                    calls.note("commit", (), {}, None)
                return found

        return Counted


class _File:
    """A file object whose reads, writes and close are calls."""

    def __init__(self, calls: Calls, file: Any) -> None:
        self._calls, self._file = calls, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, *args: Any) -> Any:
        self._calls.call("read")
        return self._file.read(*args)

    def write(self, data: Any) -> Any:
        self._calls.call("write")
        if self._calls.note is not None:
            self._calls.note("write", (self._file.fileno(), bytes(data)), {}, len(data))
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            fd = self._file.fileno()
            self._file.close()
            self._calls.call("close")
            if self._calls.note is not None:
                self._calls.note("close", (fd,), {}, None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _verb(statement: object) -> str:
    return str(statement).split(maxsplit=1)[0].lower()
