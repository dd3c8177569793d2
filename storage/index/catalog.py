"""The index over the manifests: SQLite in WAL mode, for speed only, made anew when in doubt.

Nothing read from here is believed without the manifest. Scores, quarantine marks and times of use
live here alone: losing them costs time, never correctness.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckv_jax.storage.index.database import Database
from ckv_jax.storage.segment.manifest import Manifest

_LINK = 8  # bytes of each chain link in `links`; what is found through it is compared in full
_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments(
  id TEXT PRIMARY KEY, checksum TEXT NOT NULL, start TEXT NOT NULL, first TEXT NOT NULL,
  end TEXT NOT NULL, parent TEXT, links BLOB NOT NULL, bytes INTEGER NOT NULL,
  used REAL NOT NULL, score REAL);
CREATE INDEX IF NOT EXISTS segments_first ON segments(first);
CREATE INDEX IF NOT EXISTS segments_end ON segments(end);
CREATE INDEX IF NOT EXISTS segments_parent ON segments(parent);
CREATE TABLE IF NOT EXISTS quarantine(
  id TEXT NOT NULL, checksum TEXT NOT NULL, chunk INTEGER NOT NULL, reason TEXT NOT NULL,
  PRIMARY KEY(id, checksum, chunk));
CREATE TABLE IF NOT EXISTS scores(
  id TEXT PRIMARY KEY, rows INTEGER NOT NULL, importance BLOB NOT NULL, frequency BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reservations(name TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
"""
_ADD = "INSERT OR REPLACE INTO segments VALUES(?,?,?,?,?,?,?,?,?,NULL)"
_STALE_MARKS = (
    "DELETE FROM quarantine WHERE (id, checksum) NOT IN (SELECT id, checksum FROM segments)"
)
_LEAF = (
    "NOT EXISTS (SELECT 1 FROM segments c WHERE c.parent = segments.id AND c.start = segments.end)"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment as the index knows it; `score` is None until somebody read it."""

    id: str
    parent: str | None
    bytes: int
    used: float
    score: float | None


Described = tuple[Manifest, str, int]
"""A manifest, its checksum, and the segment's bytes on disk."""


class Catalog:
    """Which segments there are, by chain link; thread-safe, and shared with other processes.

    Args:
      path: the database file; None for one in memory.
      describe: the manifests of the given ids, without those that are damaged.
      present: ids of all published segments.
    """

    def __init__(
        self,
        path: Path | None,
        describe: Callable[[Iterable[str]], Iterable[Described]],
        present: Callable[[], set[str]],
    ) -> None:
        self._describe = describe
        self._present = present
        self._released: set[str] = set()  # reservations given back, until the disk takes note
        self._db = Database(path, _SCHEMA, self._fill)

    def _fill(self, db: sqlite3.Connection) -> None:
        known = {id_ for (id_,) in db.execute("SELECT id FROM segments")}
        db.executemany(_ADD, map(_row, self._describe(self._present() - known)))

    # -- keeping the index true ------------------------------------------------------------------

    def rebuild(self) -> None:
        """Make the rows of all segments anew from their manifests.

        Scores are kept, and marks on segments that are still there.
        """

        def work(db: sqlite3.Connection) -> None:
            scores = dict(db.execute("SELECT id, score FROM segments WHERE score IS NOT NULL"))
            db.execute("DELETE FROM segments")
            self._fill(db)
            pairs = [(score, id_) for id_, score in scores.items()]
            db.executemany("UPDATE segments SET score = ? WHERE id = ?", pairs)
            db.execute(_STALE_MARKS)

        self._db.write(work)

    def reconcile(self, workspaces: Callable[[], set[str]]) -> None:
        """Add segments that were published behind our back, drop those that are gone.

        Reservations are dropped, too, unless their workspaces exist.
        """
        known = set(self._db.read("SELECT id FROM segments", ()))
        there = self._present()
        gone = [id_ for (id_,) in known if id_ not in there]
        fresh = [_row(d) for d in self._describe(there - {id_ for (id_,) in known})]
        held = {str(name) for (name,) in self._db.read("SELECT name FROM reservations", ())}
        dead = held - workspaces() if held else set()  # asked last: a writer reserves after that
        if gone or fresh or dead:

            def work(db: sqlite3.Connection) -> None:
                db.executemany(_ADD, fresh)
                for table in ("segments", "quarantine", "scores"):
                    db.executemany(f"DELETE FROM {table} WHERE id = ?", [(g,) for g in gone])
                names = [(name,) for name in dead]
                db.executemany("DELETE FROM reservations WHERE name = ?", names)

            self._db.write(work)

    @property
    def refused(self) -> int:
        """Changes to the index that the disk refused; the next open makes up for them."""
        return self._db.refused

    @property
    def rebuilds(self) -> int:
        """Times that the index was lost or damaged, and made anew."""
        return self._db.rebuilds

    def add(self, described: Described) -> None:
        """Index a segment that was just published; marks on one that it replaces go."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(_ADD, _row(described))
            db.execute(_STALE_MARKS + " AND id = ?", (described[0].segment_id,))

        self._db.write(work)

    def drop(self, segment_id: str) -> None:
        """Forget a segment that was removed."""

        def work(db: sqlite3.Connection) -> None:
            for table in ("segments", "quarantine", "scores"):
                db.execute(f"DELETE FROM {table} WHERE id = ?", (segment_id,))

        self._db.write(work)

    # -- finding ---------------------------------------------------------------------------------

    def starting_with(self, links: Sequence[bytes]) -> list[str]:
        """Ids of segments whose first chunk ends in one of `links`."""
        wanted = json.dumps([link.hex() for link in links])
        return self._ids("first IN (SELECT value FROM json_each(?))", (wanted,))

    def ending_with(self, link: bytes) -> list[str]:
        """Ids of segments whose last chunk ends in `link`."""
        return self._ids("end = ?", (link.hex(),))

    def passing(self, link: bytes) -> list[str]:
        """Ids of segments that may have a chunk ending in `link`."""
        return self._ids("instr(links, ?) > 0", (link[:_LINK],))

    def children(self, segment_id: str) -> list[str]:
        """Ids of the segments that continue this one."""
        return self._ids("parent = ?", (segment_id,))

    def leaves(self) -> list[str]:
        """Ids of the segments whose end nothing continues."""
        return self._ids(_LEAF, ())

    def ends(self) -> list[str]:
        """Prefix ids that end with a segment."""
        return [str(end) for (end,) in self._db.read("SELECT end FROM segments", ())]

    def _ids(self, where: str, values: tuple[object, ...]) -> list[str]:
        rows = self._db.read(f"SELECT id FROM segments WHERE {where}", values)
        return [str(id_) for (id_,) in rows]

    # -- sizes and scores ------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All segments."""
        rows = self._db.read("SELECT id, parent, bytes, used, score FROM segments", ())
        return [Entry(*row) for row in rows if _sane(row)]

    def usage(self) -> int:
        """Bytes of all segments and reservations."""
        self._note_released()
        released = tuple(self._released)
        sane = "typeof(bytes) = 'integer' AND bytes BETWEEN 0 AND 1 << 50"
        mine = f"name NOT IN ({','.join('?' * len(released))})"
        query = (
            f"SELECT (SELECT total(bytes) FROM segments WHERE {sane})"
            f" + (SELECT total(bytes) FROM reservations WHERE {sane} AND {mine})"
        )
        return int(self._db.read(query, released)[0][0])

    def reserve(self, name: str, num_bytes: int) -> None:
        """Count `num_bytes` as used until `release(name)`."""
        row = (name, num_bytes)
        self._db.write(
            lambda db: db.execute("INSERT OR REPLACE INTO reservations VALUES(?,?)", row)
        )

    def release(self, name: str) -> None:
        """Give a reservation back; a disk too full to take note of it is asked again later."""
        self._released.add(name)
        self._note_released()

    def _note_released(self) -> None:
        names = [(name,) for name in tuple(self._released)]
        query = "DELETE FROM reservations WHERE name = ?"
        if names and self._db.write(lambda db: db.executemany(query, names)):
            self._released.difference_update(name for (name,) in names)

    def touch(self, times: dict[str, float]) -> None:
        """Note when segments were last read."""
        rows = [(when, id_) for id_, when in times.items()]
        self._db.write(lambda db: db.executemany("UPDATE segments SET used = ? WHERE id = ?", rows))

    def save_scores(self, segment_id: str, importance: np.ndarray, frequency: np.ndarray) -> None:
        """Keep importance float32 [groups, M] and frequency uint32 [groups, M]."""
        score = float(np.mean(importance.astype(np.float64) * frequency))
        row = (segment_id, len(importance), importance.tobytes(), frequency.tobytes())

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO scores VALUES(?,?,?,?)", row)
            db.execute("UPDATE segments SET score = ? WHERE id = ?", (score, segment_id))

        self._db.write(work)

    def load_scores(self, segment_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """What `save_scores` kept, or None."""
        query = "SELECT rows, importance, frequency FROM scores WHERE id = ?"
        for rows, importance, frequency in self._db.read(query, (segment_id,)):
            try:
                return (
                    np.frombuffer(importance, np.float32).reshape(rows, -1).copy(),
                    np.frombuffer(frequency, np.uint32).reshape(rows, -1).copy(),
                )
            except (ValueError, TypeError):
                return None  # a damaged row is no row
        return None

    # -- quarantine ------------------------------------------------------------------------------

    def quarantine(self, segment_id: str, checksum: str, chunk: int, reason: str) -> None:
        """Mark a chunk as bad: the segment is served up to it from now on."""
        row = (segment_id, checksum, chunk, reason)
        self._db.write(
            lambda db: db.execute("INSERT OR IGNORE INTO quarantine VALUES(?,?,?,?)", row)
        )

    def quarantined(self, segment_id: str, checksum: str) -> dict[int, str]:
        """Chunk → reason of the marks on this very segment."""
        query = "SELECT chunk, reason FROM quarantine WHERE id = ? AND checksum = ?"
        rows = self._db.read(query, (segment_id, checksum))
        return {chunk: str(reason) for chunk, reason in rows if isinstance(chunk, int)}

    def pardon(self, segment_id: str) -> None:
        """Remove the marks of a segment that was found to be whole."""
        self._db.write(lambda db: db.execute("DELETE FROM quarantine WHERE id = ?", (segment_id,)))

    def close(self) -> None:
        """Close the database; may be called twice."""
        self._db.close()


def _row(described: Described) -> tuple[object, ...]:
    manifest, checksum, size = described
    links = manifest.links
    return (
        manifest.segment_id,
        checksum,
        manifest.start.hex(),
        links[0].hex(),
        links[-1].hex(),
        manifest.parent,
        b"".join(link[:_LINK] for link in links),
        size,
        max(manifest.created, 0.0) if manifest.created < time.time() + 1 else time.time(),
    )


def _sane(row: tuple[object, ...]) -> bool:
    id_, parent, size, used, score = row
    return (
        isinstance(id_, str)
        and isinstance(parent, str | None)
        and isinstance(size, int)
        and isinstance(used, float)
        and isinstance(score, float | None)
    )
