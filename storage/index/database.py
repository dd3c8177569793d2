"""A SQLite file that mends itself: damaged, deleted or replaced, it is made anew."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckv_jax.storage.errors import StoreClosed

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_RETRY_S = 5.0  # between attempts to get from memory back to a file
_ABSENT = (0, 0)
# Conditions that say nothing against the file: it is busy, or cannot be written just now.
_PASSING = frozenset(
    (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
    )
)


class Database:
    """One connection to a derived database; thread-safe.

    Reads that meet damage make the file anew and try again. While no file can be kept, the database
    lives in memory. Writes that the disk refuses are dropped, as everything here is derived.

    Args:
      path: the file; None for a database in memory.
      schema: statements that create what is missing.
      fill: adds what the source has and the database lacks.
    """

    def __init__(
        self, path: Path | None, schema: str, fill: Callable[[sqlite3.Connection], None]
    ) -> None:
        self._path = path
        self._schema = schema
        self._fill = fill
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._file = _ABSENT
        self._retry_at = 0.0
        self._closed = False
        self.rebuilds = 0
        """Times that the file was lost or damaged, and made anew."""
        self.refused = 0
        """Writes that were dropped because the disk was full, read-only or busy."""
        if path is None or not path.exists():
            self._make()
        self.read("SELECT name FROM sqlite_schema LIMIT 1", ())

    def read(self, query: str, values: tuple[object, ...]) -> list[Any]:
        """All rows of a query."""
        with self._lock:
            for _ in range(2):
                try:
                    return self._connection().execute(query, values).fetchall()
                except sqlite3.Error as e:
                    if _code(e) in _PASSING:
                        break
                    self.rebuilds += 1
                    self._make()
            return self._in_memory().execute(query, values).fetchall()

    def write(self, work: Callable[[sqlite3.Connection], object]) -> bool:
        """Run `work` in one transaction; False when the disk refused it."""
        with self._lock:
            for _ in range(2):
                try:
                    db = self._connection()
                    with db:
                        db.execute("BEGIN IMMEDIATE")
                        work(db)
                    if self._file == _identity(self._path):
                        return True  # else another process replaced the file: again
                except sqlite3.Error as e:
                    if _code(e) in _PASSING:
                        break
                    self.rebuilds += 1
                    self._make()
            self.refused += 1
            return False

    def close(self) -> None:
        """Close the connection; may be called twice."""
        with self._lock:
            self._closed = True
            self._disconnect()

    # -- the connection --------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreClosed("the store is closed")
        lost = self._db is not None and self._file != _identity(self._path)
        if lost and time.monotonic() >= self._retry_at:  # deleted or replaced under us
            self._disconnect()
            if self._path is not None and not self._path.exists():
                self.rebuilds += 1
                self._make()
        if self._db is None:
            self._file = _identity(self._path)
            self._db = self._connect(self._path)
            self._file = _identity(self._path)
        return self._db

    def _connect(self, path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(
            path or ":memory:", timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            db.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;")
            if path is not None:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(self._schema)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    # -- making it anew --------------------------------------------------------------------------

    def _make(self) -> None:
        """Replace the file by a new one, filled from the source; in memory where that fails."""
        if self._closed:
            raise StoreClosed("the store is closed")
        before = self._file
        self._disconnect()
        if self._path is None:
            self._in_memory()
            return
        try:
            with _exclusive(self._path):
                if _identity(self._path) in (before, _ABSENT):  # else another process was faster
                    self._replace(self._path)
            self._db = self._connect(self._path)
            self._file = _identity(self._path)
            with self._db as db:  # what was published while the new file was being filled
                db.execute("BEGIN IMMEDIATE")
                self._fill(db)
        except (OSError, sqlite3.Error) as e:
            _log.warning("%s: the index stays in memory for now: %s", self._path, e)
            self._in_memory()

    def _replace(self, path: Path) -> None:
        new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = OFF")
                db.executescript(self._schema)
                with db:
                    db.execute("BEGIN")
                    self._fill(db)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    def _in_memory(self) -> sqlite3.Connection:
        self._disconnect()
        self._retry_at = time.monotonic() + _RETRY_S
        self._db = self._connect(None)
        self._file = _identity(None) if self._path is None else _ABSENT
        with self._db as db:
            db.execute("BEGIN")
            self._fill(db)
        return self._db


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _identity(path: Path | None) -> tuple[int, int]:
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return _ABSENT
    return (found.st_dev, found.st_ino) if found else (1, 1)
