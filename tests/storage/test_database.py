"""What a derived database takes in, and keeps, while its file is busy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


@contextmanager
def busy(path: Path) -> Iterator[None]:
    """Somebody else writes and does not end."""
    rival = sqlite3.connect(path, isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    yield
    rival.execute("ROLLBACK")
    rival.close()


def rows(path: Path) -> list[int]:
    db = sqlite3.connect(path)
    try:
        return [x for (x,) in db.execute("SELECT x FROM found ORDER BY x")]
    finally:
        db.close()


def test_what_the_file_did_not_take_it_gets_at_the_end(path: Path) -> None:
    made = Database(path, SCHEMA, Source().fill, wait_s=0.05)
    with busy(path):
        assert not made.write(lambda db: db.execute("INSERT INTO found VALUES (7)"))
        assert made.refused == 1
        assert made.read("SELECT x FROM found ORDER BY x", ()) == [(1,), (7,)]
    assert rows(path) == [1]
    made.close()
    assert rows(path) == [1, 7]


def test_what_comes_to_the_source_is_found_while_the_file_is_busy(path: Path) -> None:
    source = Source()
    made = Database(path, SCHEMA, source.fill, wait_s=0.05)
    with busy(path):
        made.write(lambda db: db.execute("INSERT INTO found VALUES (7)"))
        source.rows.append(3)
        made._retry_at = 0.0  # rather than wait for it
        assert made.read("SELECT x FROM found ORDER BY x", ()) == [(1,), (3,), (7,)]
    made.close()


@pytest.mark.parametrize("there", [True, False])
def test_who_only_looks_leaves_the_file_alone(path: Path, there: bool) -> None:
    if there:
        Database(path, SCHEMA, Source().fill, wait_s=0.05).close()
    made = Database(path, SCHEMA, Source().fill, wait_s=0.05, readonly=True)
    assert not made.write(lambda db: db.execute("INSERT INTO found VALUES (7)"))
    assert made.read("SELECT x FROM found ORDER BY x", ()) == [(1,), (7,)]
    made.close()
    assert rows(path) == [1] if there else not path.exists()
