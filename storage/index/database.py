"""A SQLite database that is rebuilt when it is damaged, deleted or replaced."""

from __future__ import annotations

import contextlib
import errno
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
from ckv_jax.storage.place.disk import close_descriptor, lock_within, progress

_log = logging.getLogger(__name__)
_RETRY_S = 5.0  # between attempts to get from memory back to a file
_RETRY_BUSY_S = 0.1  # what such an attempt may wait for others
_MOST_KEPT = 10_000  # writes that wait for the file to come back
LARGEST = 64 << 20
"""Bytes of a row or a statement; a file with larger ones counts as damaged."""
_ABSENT = (0, 0)
# Conditions that say nothing against the file: it is busy, or cannot be used just now.
_PASSING = frozenset(
    (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
    )
)
Work = Callable[[sqlite3.Connection], object]


class Database:
    """One connection to a derived database; thread-safe.

    Reads that meet damage make the file again and try again. While the file cannot be used, a copy
    in memory stands in for it: writes go there, and to the file once it is back.

    Args:
      path: the file; None for a database in memory.
      schema: statements that create what is missing.
      fill: brings the tables in line with the source.
      version, upgrade: of the schema; `upgrade`, in a transaction, brings an older file to it.
      wait_s: how long to wait for others who write.
      readonly: whether to leave the file alone, and work on a copy from the start.
    """

    def __init__(
        self,
        path: Path | None,
        schema: str,
        fill: Work,
        *,
        version: int = 0,
        upgrade: Work = lambda _: None,
        wait_s: float,
        readonly: bool = False,
    ) -> None:
        self._path = path
        self._schema = schema
        self._version = version
        self._fill = fill
        self._upgrade = upgrade
        self._wait_s = wait_s
        self._readonly = readonly
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._file = _ABSENT
        self._in_copy = False
        self._kept: list[Work] = []
        self._retry_at = 0.0
        self._closed = False
        self.rebuilds = 0
        """Times that the file was lost or damaged, and made again."""
        self.refused = 0
        """Writes that the file did not take when they came."""
        if path is None or readonly:
            self._copy()
        else:
            with contextlib.suppress(_Unseen):
                if _identity(path) == _ABSENT:
                    self._make()
        self.read("SELECT name FROM sqlite_schema LIMIT 1", ())

    def read(self, query: str, values: tuple[object, ...]) -> list[Any]:
        """All rows of a query."""
        with self._lock:
            for _ in range(2):
                try:
                    return self._connection().execute(query, values).fetchall()
                except sqlite3.Error as e:
                    self._recover(e)
            return self._copy().execute(query, values).fetchall()

    def write(self, work: Work) -> bool:
        """Run `work` in one transaction; False where only the copy in memory has it so far.
        Raises StoreClosed."""
        with self._lock:
            for _ in range(2):
                try:
                    db = self._connection()
                    if self._in_copy:
                        break
                    _transact(db, work)
                    if self._path and self._file == _identity(self._path):
                        return True  # else another process replaced the file: again
                except sqlite3.Error as e:
                    self._recover(e)
            db = self._db if self._in_copy and self._db else self._copy()
            _transact(db, work)
            if self._path is None:
                return True
            self.refused += 1
            if not self._readonly and len(self._kept) < _MOST_KEPT:
                self._kept.append(work)
            return False

    def close(self) -> None:
        """Close the connection; may be called twice."""
        with self._lock:
            if self._kept and not self._closed:
                self._return()
            self._closed = True
            self._disconnect()

    # -- the connection --------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreClosed("the store is closed")
        progress()
        if self._in_copy:
            alone = self._path is None or self._readonly
            if not alone and time.monotonic() >= self._retry_at and not self._return():
                self._retry_at = time.monotonic() + _RETRY_S
            if self._db is not None:
                return self._db
        assert self._path is not None
        there = _identity(self._path)
        if self._db is not None and self._file != there:
            self._disconnect()  # deleted or replaced under us
        if self._db is None:
            if there == _ABSENT:
                self.rebuilds += 1
                self._make()
            if self._db is None:
                self._db, self._file = self._connect(self._wait_s)
        return self._db

    def _connect(self, wait_s: float) -> tuple[sqlite3.Connection, tuple[int, int]]:
        """A connection to the file, which is replaced if it is damaged, and which file that is.
        Raises sqlite3.Error."""
        assert self._path is not None
        damaged = _identity(self._path)
        try:
            return self._open(wait_s)
        except sqlite3.Error as e:
            if _passing(e):
                raise
        try:
            self._replace(self._path, damaged, wait_s)
        except OSError as e:
            raise _Unseen(str(e)) from e
        self.rebuilds += 1
        return self._open(wait_s)

    def _open(self, wait_s: float) -> tuple[sqlite3.Connection, tuple[int, int]]:
        """A connection to the file as it is, and which file that is."""
        assert self._path is not None
        before = _identity(self._path)
        if before != _ABSENT and not os.path.isfile(self._path):
            raise sqlite3.DatabaseError(f"{self._path}: is no plain file")
        db = sqlite3.connect(
            self._path, timeout=wait_s, isolation_level=None, check_same_thread=False
        )
        try:
            _harden(db)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            self._ready(db)
            after = _identity(self._path)
        except BaseException:
            db.close()
            raise
        return db, after if before in (after, _ABSENT) else _ABSENT

    def _ready(self, db: sqlite3.Connection) -> None:
        """Bring the schema of a database to this version."""
        if db.execute("PRAGMA user_version").fetchone()[0] == self._version:
            db.executescript(self._schema)
            return

        def work(db: sqlite3.Connection) -> None:
            if db.execute("PRAGMA user_version").fetchone()[0] != self._version:
                self._upgrade(db)
                db.execute(f"PRAGMA user_version = {self._version}")

        _transact(db, work)
        db.executescript(self._schema)

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        self._in_copy = False
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _recover(self, error: sqlite3.Error) -> None:
        """After an error: a file that is damaged is made again, one that is busy set aside."""
        if _passing(error):
            self._copy()
        else:
            self.rebuilds += 1
            self._make()

    # -- the copy in memory ------------------------------------------------------------------------

    def _copy(self) -> sqlite3.Connection:
        """Go on in memory, from what the file has, or else from the source."""
        if self._in_copy and self._db is not None:
            return self._db
        self._disconnect()
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            if not self._take_over(db):
                db.close()
                db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _harden(db)
            self._ready(db)
            _transact(db, self._fill)
            for work in self._kept:
                _transact(db, work)
        except BaseException:
            db.close()
            raise
        self._db, self._in_copy, self._file = db, True, _ABSENT
        self._retry_at = time.monotonic() + _RETRY_S
        return db

    def _take_over(self, db: sqlite3.Connection) -> bool:
        """Copy the file into `db` without changing anything on the disk; whether that worked."""
        if self._path is None or not os.path.isfile(self._path):
            return False
        with contextlib.suppress(sqlite3.Error, OSError):
            # Without a log, no process has the file open, and SQLite need not make files beside it.
            log = Path(f"{self._path}-wal")
            how = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
            source = sqlite3.connect(
                f"{self._path.as_uri()}?{how}", uri=True, timeout=1.0, isolation_level=None
            )
            with contextlib.closing(source):
                _harden(source)
                source.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                source.backup(db)
                return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        return False

    def _return(self) -> bool:
        """Get from memory back to the file, with what was written meanwhile; whether that worked.
        Where it does not, the copy takes in what came to the source since, and stays."""
        try:
            db, file = self._connect(_RETRY_BUSY_S)
            try:
                _transact(db, lambda db: [work(db) for work in self._kept])
                _transact(db, self._fill)
                db.execute(f"PRAGMA busy_timeout = {int(1000 * self._wait_s)}")
            except BaseException:
                db.close()
                raise
        except (sqlite3.Error, OSError):
            if self._db is not None:
                _transact(self._db, self._fill)
            return False
        self._disconnect()
        self._db, self._file, self._kept = db, file, []
        return True

    # -- making it again --------------------------------------------------------------------------

    def _make(self) -> None:
        """Replace the file by a new one, filled from the source; in memory where that fails."""
        if self._closed:
            raise StoreClosed("the store is closed")
        before = self._file
        self._disconnect()
        if self._path is None or self._readonly:
            self._copy()
            return
        try:
            self._replace(self._path, before, self._wait_s)
            self._db, self._file = self._connect(self._wait_s)
            _transact(self._db, self._fill)  # what was published while the file was being filled
            _transact(self._db, lambda db: [work(db) for work in self._kept])
            self._kept = []
        except (OSError, sqlite3.Error) as e:
            _log.warning("%s: the index is kept in memory for now: %s", self._path, e)
            self._copy()

    def _replace(self, path: Path, before: tuple[int, int], wait_s: float) -> None:
        """Put a new file in the place of the one that was there `before`, if no other process did.
        Raises OSError and sqlite3.Error."""
        with _exclusive(path, wait_s):
            if _identity(path) not in (before, _ABSENT):
                return
            new = path.parent / "tmp" / secrets.token_hex(16)
            fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # against a sweep
                with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
                    db.execute("PRAGMA journal_mode = OFF")
                    db.execute(f"PRAGMA user_version = {self._version}")
                    db.executescript(self._schema)
                    _transact(db, self._fill)
                for suffix in ("-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                os.replace(new, path)
            finally:
                close_descriptor(fd)
                new.unlink(missing_ok=True)


def _transact(db: sqlite3.Connection, work: Work) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")
        work(db)


def _harden(db: sqlite3.Connection) -> None:
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
    db.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;")


@contextlib.contextmanager
def _exclusive(path: Path, wait_s: float) -> Iterator[None]:
    """The lock of those who make the file again; raises OSError where it is not got in time."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            lock_within(fd, wait_s)
        except BlockingIOError:
            said = "another process is rebuilding it"
            raise OSError(errno.ETIMEDOUT, said, str(path)) from None
        yield
    finally:
        close_descriptor(fd)


class _Unseen(sqlite3.OperationalError):
    """The file could not be looked at, which says nothing against it."""

    sqlite_errorcode = sqlite3.SQLITE_CANTOPEN


def _passing(error: sqlite3.Error) -> bool:
    code = int(getattr(error, "sqlite_errorcode", 0))
    return code & 0xFF in _PASSING and code != sqlite3.SQLITE_IOERR_SHORT_READ


def _identity(path: Path) -> tuple[int, int]:
    """Returns the identity of the file; `_ABSENT` if there is none. Raises _Unseen."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return _ABSENT
    except OSError as e:
        raise _Unseen(str(e)) from e
    return found.st_dev, found.st_ino
