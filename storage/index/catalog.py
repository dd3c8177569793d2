"""The catalog of manifests: a SQLite database in WAL mode, rebuilt when in doubt.

Nothing read from here is believed without the manifest. Scores, quarantine marks and times of use
live here alone: losing them costs time, never correctness.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.storage.errors import StoreUnavailable
from ckv_jax.storage.index.database import LARGEST, Database
from ckv_jax.storage.segment.manifest import Manifest

LINK = 8  # bytes of each chain link in `links`; what is found through it is compared in full
_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments(
  id TEXT PRIMARY KEY, checksum TEXT NOT NULL, start TEXT NOT NULL, first TEXT NOT NULL,
  end TEXT NOT NULL, parent TEXT, links BLOB NOT NULL, bytes INTEGER NOT NULL,
  used REAL NOT NULL, score REAL, tenant TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS segments_first ON segments(first);
CREATE INDEX IF NOT EXISTS segments_end ON segments(end);
CREATE INDEX IF NOT EXISTS segments_parent ON segments(parent);
CREATE INDEX IF NOT EXISTS segments_tenant ON segments(tenant);
CREATE TABLE IF NOT EXISTS quarantine(
  id TEXT NOT NULL, checksum TEXT NOT NULL, chunk INTEGER NOT NULL, reason TEXT NOT NULL,
  PRIMARY KEY(id, checksum, chunk));
CREATE TABLE IF NOT EXISTS scores(
  id TEXT PRIMARY KEY, rows INTEGER NOT NULL, importance BLOB NOT NULL, frequency BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reservations(
  name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, tenant TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evictions(
  number INTEGER PRIMARY KEY, id TEXT NOT NULL, prefix TEXT NOT NULL, tenant TEXT NOT NULL,
  bytes INTEGER NOT NULL, time REAL NOT NULL, reason TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS evictions_prefix ON evictions(prefix)
"""
_VERSION = 4  # of the schema
MOST_EVICTIONS = 10_000  # that are remembered
_LATEST = float(1 << 36)  # seconds since 1970: a time that calendars can write
_SANE = "typeof(bytes) = 'integer' AND bytes BETWEEN 0 AND 1 << 50"
_ADD = "INSERT OR REPLACE INTO segments VALUES(?,?,?,?,?,?,?,?,?,NULL,?)"
_STALE_MARKS = (
    "DELETE FROM quarantine WHERE (id, checksum) NOT IN (SELECT id, checksum FROM segments)"
)
_STALE_SCORES = "DELETE FROM scores WHERE id NOT IN (SELECT id FROM segments)"
_LEAF = (
    "NOT EXISTS (SELECT 1 FROM segments c WHERE c.parent = segments.id AND c.start = segments.end)"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment as the index knows it; `score` is None until it was read."""

    id: str
    parent: str | None
    bytes: int
    used: float
    score: float | None
    tenant: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction of a prefix: when its last segment was removed, and why."""

    prefix_id: str
    time: float
    bytes: int
    reason: str


Described = tuple[Manifest, str, int]
"""A manifest, its checksum, and the segment's bytes on disk."""


class Catalog:
    """Catalog of segments by chain link; thread-safe, and shared with other processes.

    `describe`: the manifests of the given ids, without those that are damaged or unread; `present`:
    ids of all published segments; raises StoreUnavailable where that is unknown. The others: see
    `Database`.
    """

    def __init__(
        self,
        path: Path | None,
        describe: Callable[[Iterable[str]], Iterable[Described]],
        present: Callable[[], set[str]],
        *,
        wait_s: float,
        readonly: bool,
    ) -> None:
        self._describe = describe
        self._present = present
        self.listed = True
        """Whether all that is published could be listed when the index was last filled."""
        self.complete = True
        """Whether it then also had every manifest."""
        self.db = Database(
            path,
            _SCHEMA,
            self._fill,
            version=_VERSION,
            upgrade=self._upgrade,
            wait_s=wait_s,
            readonly=readonly,
        )

    def _fill(self, db: sqlite3.Connection) -> None:
        self._take_in(
            db, *self._changes({str(i) for (i,) in db.execute("SELECT id FROM segments")})
        )

    def _changes(self, known: set[str]) -> tuple[list[str], list[Any]]:
        """Ids of segments that are gone, and rows of those that the index lacks."""
        try:
            there = self._present()
        except StoreUnavailable:
            self.listed = self.complete = False
            return [], []
        fresh = [_row_of(d) for d in self._describe(there - known)]
        self.listed, self.complete = True, len(fresh) == len(there - known)
        return sorted(known - there), fresh

    @staticmethod
    def _take_in(db: sqlite3.Connection, gone: list[str], fresh: list[Any]) -> None:
        db.executemany("DELETE FROM segments WHERE id = ?", [(id_,) for id_ in gone])
        db.executemany(_ADD, fresh)
        db.execute(_STALE_MARKS)
        db.execute(_STALE_SCORES)

    def _upgrade(self, db: sqlite3.Connection) -> None:
        """Bring the tables of earlier code to today's, with the times of use and scores."""
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
        query = "SELECT used, score, id FROM segments"
        kept = db.execute(query).fetchall() if "segments" in tables else []
        for table in ("segments", "reservations"):
            db.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        there = self.listed
        self._fill(db)
        if there and self.listed:
            db.executemany("UPDATE segments SET used = ?, score = ? WHERE id = ?", kept)

    # -- keeping the index true ------------------------------------------------------------------

    def rebuild(self) -> None:
        """Make the rows of all segments again from their manifests. Scores are kept, and marks on
        segments that are still there."""

        def work(db: sqlite3.Connection) -> None:
            kept = db.execute("SELECT used, score, id FROM segments").fetchall()
            fresh = self._changes(set())[1]
            if not self.listed:
                return  # what cannot be listed now is not lost
            db.execute("DELETE FROM segments")
            self._take_in(db, [], fresh)
            db.executemany("UPDATE segments SET used = ?, score = ? WHERE id = ?", kept)

        self.db.write(work)

    def reconcile(self) -> None:
        """Add segments that were published behind our back, drop those that are gone."""
        known = {str(id_) for (id_,) in self.db.read("SELECT id FROM segments", ())}
        gone, fresh = self._changes(known)
        stale = "SELECT 1 FROM scores WHERE id NOT IN (SELECT id FROM segments) LIMIT 1"
        if gone or fresh or self.db.read(stale, ()):
            self.db.write(lambda db: self._take_in(db, gone, fresh))

    def add(self, described: Described, reservation: str | None = None) -> None:
        """Index a segment that was just published, and is used from now on; marks on one that it
        replaces go, and the score of the same one stays. From the same moment on, `reservation`
        no longer counts."""
        row, id_, now = _row_of(described), described[0].segment_id, time.time()

        def work(db: sqlite3.Connection) -> None:
            query = "SELECT score FROM segments WHERE id = ? AND checksum = ?"
            (score,) = db.execute(query, (id_, described[1])).fetchone() or (None,)
            db.execute(_ADD, row)
            query = "UPDATE segments SET used = ?, score = ? WHERE id = ?"
            db.execute(query, (now, score, id_))
            db.execute(_STALE_MARKS + " AND id = ?", (id_,))
            db.execute("DELETE FROM reservations WHERE name = ?", (reservation,))

        self.db.write(work)

    def drop(self, segment_id: str, reason: str) -> None:
        """Forget a segment that was removed, but why."""
        row = (time.time(), reason, segment_id)

        def work(db: sqlite3.Connection) -> None:
            query = "INSERT INTO evictions(id, prefix, tenant, bytes, time, reason)"
            query += " SELECT id, end, tenant, bytes, ?, ? FROM segments WHERE id = ?"
            db.execute(query, row)
            for table in ("segments", "quarantine", "scores"):
                db.execute(f"DELETE FROM {table} WHERE id = ?", (segment_id,))
            query = "DELETE FROM evictions WHERE number <= (SELECT max(number) FROM evictions) - ?"
            db.execute(query, (MOST_EVICTIONS,))

        self.db.write(work)

    def why(self, prefix_id: str, tenant: str | None) -> Eviction | None:
        """The last eviction of a prefix whose id is or begins so; None: none is remembered."""
        query = (
            "SELECT prefix, time, bytes, reason FROM evictions WHERE substr(prefix, 1, ?) = ?"
            " AND (? IS NULL OR tenant = ?) ORDER BY number DESC LIMIT 1"
        )
        found = self.db.read(query, (len(prefix_id), prefix_id, tenant, tenant))
        return _eviction(found[0]) if found and prefix_id else None

    # -- finding ---------------------------------------------------------------------------------

    def starting_with(self, links: Sequence[bytes]) -> list[str]:
        """Ids of segments whose first chunk ends in one of `links`."""
        wanted = json.dumps([link.hex() for link in links])
        return self._ids("first IN (SELECT value FROM json_each(?))", (wanted,))

    def ending_with(self, link: bytes, tenant: str | None = None) -> list[str]:
        """Ids of segments whose last chunk ends in `link`; None: of all tenants."""
        return self._ids("end = ?", (link.hex(),), tenant)

    def passing(self, link: bytes, tenant: str | None = None) -> list[str]:
        """Ids of segments that may have a chunk ending in `link`; None: of all tenants."""
        return self._ids("instr(links, ?) > 0", (link[:LINK],), tenant)

    def holders(
        self, prefix_ids: Collection[str], tenant: str | None = None
    ) -> dict[str, list[str]]:
        """Ids of the segments that hold the end of each prefix: those that end there, or, where
        there are none, those that pass it. Prefixes that no segment holds are left out.
        `tenant`: whose segments alone; None: all."""
        found: dict[str, list[str]] = {}
        if not prefix_ids:
            return found
        whose = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
        for id_, end in self.db.read(f"SELECT id, end FROM segments{whose[0]}", whose[1]):
            if end in prefix_ids:
                found.setdefault(end, []).append(str(id_))
        inside = {bytes.fromhex(i)[:LINK]: i for i in prefix_ids if i not in found}
        if not inside:
            return found
        wanted = np.sort(np.frombuffer(b"".join(inside), np.uint64))
        for id_, links in self.db.read(f"SELECT id, links FROM segments{whose[0]}", whose[1]):
            if not isinstance(links, bytes) or len(links) % LINK:
                continue
            there = np.frombuffer(links, np.uint64)
            for link in there[np.isin(there, wanted)]:
                found.setdefault(inside[link.tobytes()], []).append(str(id_))
        return found

    def links(self, segment_ids: Iterable[str]) -> set[bytes]:
        """The first bytes of the chain links of segments."""
        wanted = json.dumps(list(segment_ids))
        query = "SELECT links FROM segments WHERE id IN (SELECT value FROM json_each(?))"
        found = (row for (row,) in self.db.read(query, (wanted,)) if isinstance(row, bytes))
        return {row[at : at + LINK] for row in found for at in range(0, len(row), LINK)}

    def children(self, segment_id: str) -> list[str]:
        """Ids of the segments that continue this one."""
        return self._ids("parent = ?", (segment_id,))

    def line(self, link: bytes) -> tuple[list[str], list[str], bool]:
        """What a prefix may need, as far as the index knows: ids of segments that it may end with
        and of all that these continue, those of the former, and whether none is missing."""
        parents = dict(self.db.read("SELECT id, parent FROM segments", ()))
        ends = list(dict.fromkeys(self.ending_with(link) + self.passing(link)))
        needed: dict[str, None] = {}
        complete = bool(ends)
        for end in ends:
            id_: str | None = end
            while id_ is not None and id_ not in needed:
                if id_ not in parents:
                    complete = False
                    break
                needed[id_] = None
                id_ = parents[id_]
        return list(needed), ends, complete

    def leaves(self, tenant: str | None = None) -> list[str]:
        """Ids of the segments whose end nothing continues; None: of all tenants."""
        return self._ids(_LEAF, (), tenant)

    def ends(self, tenant: str | None) -> list[str]:
        """Prefix ids that end with a segment, those of one tenant; None: of all."""
        return self._column("end", "1", (), tenant)

    def _ids(self, where: str, values: tuple[object, ...], tenant: str | None = None) -> list[str]:
        return self._column("id", where, values, tenant)

    def _column(
        self, name: str, where: str, values: tuple[object, ...], tenant: str | None
    ) -> list[str]:
        if tenant is not None:
            where, values = f"tenant = ? AND {where}", (tenant, *values)
        rows = self.db.read(f"SELECT {name} FROM segments WHERE {where}", values)
        return [str(value) for (value,) in rows]

    # -- sizes and scores ------------------------------------------------------------------------

    def entries(self, tenant: str | None = None) -> list[Entry]:
        """Segments of one tenant; None: of all."""
        query = "SELECT id, parent, bytes, used, score, tenant FROM segments"
        values: tuple[object, ...] = ()
        if tenant is not None:
            query, values = f"{query} WHERE tenant = ?", (tenant,)
        return [Entry(*row) for row in self.db.read(query, values) if _sane(row)]

    def usage(self) -> int:
        """Bytes of all segments and reservations."""
        return int(self.db.read(*_bytes_used(None))[0][0])

    def reserve(
        self, name: str, num_bytes: int, tenant: str, limits: dict[str | None, int], lacking: int
    ) -> dict[str | None, int]:
        """Count `num_bytes` as used until `release(name)`, if they fit, in one step.

        Returns by how much each of `limits`, of all (None) and of tenants, would be exceeded; empty
        where the bytes are reserved. `lacking`: by how much the disk's room would be, if above 0.
        Raises StoreUnavailable where there are limits, and other processes cannot see the
        reservation.
        """
        over: dict[str | None, int] = {}

        def work(db: sqlite3.Connection) -> None:
            over.clear()
            if lacking > 0:
                over[None] = lacking
            for whose, limit in limits.items():
                used = int(db.execute(*_bytes_used(whose)).fetchone()[0])
                if used + num_bytes > limit:
                    over[whose] = max(over.get(whose, 0), used + num_bytes - limit)
            if not over:
                row = (name, num_bytes, tenant)
                db.execute("INSERT OR REPLACE INTO reservations VALUES(?,?,?)", row)

        if not self.db.write(work) and not over and limits:
            self.release(name)
            raise StoreUnavailable("the index cannot be written, so no room can be reserved")
        return over

    def release(self, name: str) -> None:
        """Give a reservation back; a disk too full to take note of it gets it later."""
        self.db.write(lambda db: db.execute("DELETE FROM reservations WHERE name = ?", (name,)))

    def reserved(self) -> list[str]:
        """Names of all reservations."""
        return [str(name) for (name,) in self.db.read("SELECT name FROM reservations", ())]

    def touch(self, times: dict[str, float], ahead_s: float) -> None:
        """Note when segments were last read, unless one was read later. A time more than `ahead_s`
        from now is that of a clock that was ahead, and does not count."""
        query = "UPDATE segments SET used = ? WHERE id = ? AND used NOT BETWEEN ? AND ?"

        def work(db: sqlite3.Connection) -> None:  # perhaps later, when the file can be written
            latest = time.time() + ahead_s
            db.executemany(query, [(when, id_, when, latest) for id_, when in times.items()])

        self.db.write(work)

    def save_scores(self, segment_id: str, importance: np.ndarray, frequency: np.ndarray) -> None:
        """Keep importance float32 [groups, M] and frequency uint32 [groups, M] of what is there; of
        more than the database takes only the mean product."""
        score = float(np.mean(importance.astype(np.float64) * frequency))
        row = (segment_id, len(importance), importance.tobytes(), frequency.tobytes())

        def work(db: sqlite3.Connection) -> None:
            done = db.execute("UPDATE segments SET score = ? WHERE id = ?", (score, segment_id))
            if done.rowcount and importance.nbytes + frequency.nbytes < LARGEST - 1024:
                db.execute("INSERT OR REPLACE INTO scores VALUES(?,?,?,?)", row)

        self.db.write(work)

    def load_scores(self, segment_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the scores of `save_scores`, or None."""
        query = "SELECT rows, importance, frequency FROM scores WHERE id = ?"
        for groups, importance, frequency in self.db.read(query, (segment_id,)):
            try:
                return (
                    np.frombuffer(importance, np.float32).reshape(groups, -1).copy(),
                    np.frombuffer(frequency, np.uint32).reshape(groups, -1).copy(),
                )
            except (ValueError, TypeError):
                return None  # a damaged row is no row
        return None

    # -- quarantine ------------------------------------------------------------------------------

    def quarantine(self, segment_id: str, checksum: str, chunk: int, reason: str) -> None:
        """Mark a chunk as bad: the segment is served up to it from now on."""
        row = (segment_id, checksum, chunk, reason)
        self.db.write(
            lambda db: db.execute("INSERT OR IGNORE INTO quarantine VALUES(?,?,?,?)", row)
        )

    def quarantined(self, segment_id: str, checksum: str) -> set[int]:
        """Chunks of this very segment that are marked."""
        query = "SELECT chunk FROM quarantine WHERE id = ? AND checksum = ?"
        rows = self.db.read(query, (segment_id, checksum))
        return {chunk for (chunk,) in rows if isinstance(chunk, int)}

    def repaired(self, segment_id: str, checksum: str, left: dict[int, str]) -> None:
        """Note a segment's new checksum, and the chunks of it that are still marked."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("UPDATE segments SET checksum = ? WHERE id = ?", (checksum, segment_id))
            db.execute("DELETE FROM quarantine WHERE id = ?", (segment_id,))
            rows = [(segment_id, checksum, chunk, reason) for chunk, reason in left.items()]
            db.executemany("INSERT OR IGNORE INTO quarantine VALUES(?,?,?,?)", rows)

        self.db.write(work)

    def pardon(self, segment_id: str) -> None:
        """Remove the marks of a segment that was found to be whole."""
        self.db.write(lambda db: db.execute("DELETE FROM quarantine WHERE id = ?", (segment_id,)))


def _row_of(described: Described) -> tuple[object, ...]:
    manifest, checksum, size = described
    links = manifest.links
    return (
        manifest.segment_id,
        checksum,
        manifest.start.hex(),
        links[0].hex(),
        links[-1].hex(),
        manifest.parent,
        b"".join(link[:LINK] for link in links),
        size,
        max(manifest.created, 0.0) if manifest.created < time.time() + 1 else time.time(),
        manifest.tenant,
    )


def _bytes_used(tenant: str | None) -> tuple[str, tuple[str | None, ...]]:
    """The query for the bytes in use, and its values."""
    mine = f"{_SANE} AND (? IS NULL OR tenant = ?)"
    parts = (f"(SELECT total(bytes) FROM {t} WHERE {mine})" for t in ("segments", "reservations"))
    return f"SELECT {' + '.join(parts)}", (tenant,) * 4


def _eviction(row: tuple[object, ...]) -> Eviction | None:
    """Decodes a row (prefix, time, bytes, reason); None for a damaged one."""
    prefix, when, size, reason = row
    if not isinstance(prefix, str) or not isinstance(reason, str) or not isinstance(size, int):
        return None
    if not isinstance(when, float) or not 0 <= when < _LATEST:
        return None
    return Eviction(prefix, when, size, reason)


def _sane(row: tuple[object, ...]) -> bool:
    id_, parent, size, used, score, tenant = row
    return (
        isinstance(id_, str)
        and isinstance(parent, str | None)
        and isinstance(size, int)
        and isinstance(used, float)
        and isinstance(score, float | None)
        and isinstance(tenant, str)
    )
