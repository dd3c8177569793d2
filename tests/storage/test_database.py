"""A derived database while its file is busy, lost or of another version."""

from __future__ import annotations

import errno
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from segment_support import failing

from ckv_jax.storage.index.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS found (x UNIQUE)"


class Source:
    """What the tables are filled from."""

    def __init__(self) -> None:
        self.rows = [1]

    def fill(self, db: sqlite3.Connection) -> None:
        db.executemany("INSERT OR IGNORE INTO found VALUES (?)", [(x,) for x in self.rows])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()  # where a file is made before it gets its name
    return tmp_path / "index.sqlite"


def rows(path: Path) -> list[int]:
    db = sqlite3.connect(path)
    try:
        return [x for (x,) in db.execute("SELECT x FROM found ORDER BY x")]
    finally:
        db.close()


def test_a_file_of_another_version_is_upgraded_once(path: Path) -> None:
    upgraded: list[int] = []

    def upgrade(db: sqlite3.Connection) -> None:
        upgraded.append(db.execute("PRAGMA user_version").fetchone()[0])
        db.execute("DELETE FROM found")
        db.execute("INSERT INTO found VALUES (9)")

    def opened(version: int) -> list[int]:
        made = Database(path, SCHEMA, Source().fill, version=version, upgrade=upgrade, wait_s=0.05)
        try:
            return [x for (x,) in made.read("SELECT x FROM found", ())]
        finally:
            made.close()

    assert opened(3) == opened(3) == [1] and not upgraded
    assert opened(5) == opened(5) == [9] and upgraded == [3]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (5,)


def read(made: Database) -> list[int]:
    return [x for (x,) in made.read("SELECT x FROM found ORDER BY x", ())]


def test_a_file_that_another_process_makes_anew_is_taken_over(path: Path) -> None:
    source = Source()
    made = Database(path, SCHEMA, source.fill, wait_s=0.5)
    assert made.write(lambda db: db.execute("INSERT INTO found VALUES (7)")) and made.rebuilds == 0
    source.rows.append(2)
    path.unlink()
    other = Database(path, SCHEMA, source.fill, wait_s=0.5)
    other.write(lambda db: db.execute("INSERT INTO found VALUES (8)"))
    other.close()
    assert read(made) == [1, 2, 8] and made.rebuilds == 0
    assert made.write(lambda db: db.execute("INSERT INTO found VALUES (9)")) and made.refused == 0
    made.close()
    assert rows(path) == [1, 2, 8, 9] and not list((path.parent / "tmp").iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@contextmanager
def busy(path: Path) -> Iterator[None]:
    """Somebody else writes and does not end."""
    rival = sqlite3.connect(path, isolation_level=None)
    try:
        rival.execute("BEGIN IMMEDIATE")
        yield
        rival.execute("ROLLBACK")
    finally:
        rival.close()


def test_what_waits_in_memory_outlives_a_question_that_nobody_can_answer(path: Path) -> None:
    """Which looks like damage: the copy is made anew, too."""
    made = Database(path, SCHEMA, Source().fill, wait_s=0.05)
    with busy(path):
        made.write(lambda db: db.execute("INSERT INTO found VALUES (7)"))
        with pytest.raises(sqlite3.Error, match="nowhere"):
            made.read("SELECT x FROM nowhere", ())
        assert read(made) == [1, 7] and rows(path) == [1]
    made.close()
    assert rows(path) == [1, 7]


def test_a_damaged_file_that_cannot_be_replaced_now_is_replaced_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"damaged" * 1000)
    with failing(monkeypatch, "replace", errno.ENOSPC):
        made = Database(path, SCHEMA, Source().fill, wait_s=0.05)
        assert not made.write(lambda db: db.execute("INSERT INTO found VALUES (7)"))
        assert read(made) == [1, 7]
    made.close()
    assert rows(path) == [1, 7] and not list((path.parent / "tmp").iterdir())
