"""What a derived database takes in, and keeps, while its file is busy."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
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


@pytest.mark.parametrize("how", ["deleted", "damaged", "replaced"])
def test_a_file_that_is_lost_under_us_is_made_anew(path: Path, how: str) -> None:
    source = Source()
    made = Database(path, SCHEMA, source.fill, wait_s=0.5)
    assert made.write(lambda db: db.execute("INSERT INTO found VALUES (7)")) and made.rebuilds == 0
    source.rows.append(2)
    if how == "replaced":
        path.unlink()
        other = Database(path, SCHEMA, source.fill, wait_s=0.5)
        other.write(lambda db: db.execute("INSERT INTO found VALUES (8)"))
        other.close()
        assert read(made) == [1, 2, 8] and made.rebuilds == 0
    else:
        if how == "deleted":
            path.unlink()
        else:
            made._disconnect()
            path.write_bytes(b"no database at all" * 300)
        assert read(made) == [1, 2] and made.rebuilds == 1
    assert made.write(lambda db: db.execute("INSERT INTO found VALUES (9)")) and made.refused == 0
    made.close()
    assert rows(path)[-1] == 9 and not list((path.parent / "tmp").iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
