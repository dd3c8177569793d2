"""What the index keeps: its tables, and its rows of segments, as the manifests say."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckv_jax.storage.segment.manifest import Manifest

LINK = 8  # bytes of each chain link in `links`; what is found through it is compared in full
SCHEMA = """
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
VERSION = 4  # of the schema
MOST_EVICTIONS = 10_000  # that are remembered
_LATEST = float(1 << 36)  # seconds since 1970: a time that calendars can write
SANE = "typeof(bytes) = 'integer' AND bytes BETWEEN 0 AND 1 << 50"


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment as the index knows it; `score` is None until somebody read it."""

    id: str
    parent: str | None
    bytes: int
    used: float
    score: float | None
    tenant: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """What became of a prefix: when the segment that it ended with left, and why."""

    prefix_id: str
    time: float
    bytes: int
    reason: str


Described = tuple[Manifest, str, int]
"""A manifest, its checksum, and the segment's bytes on disk."""


def row_of(described: Described) -> tuple[object, ...]:
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


def used(tenant: str | None) -> tuple[str, tuple[str | None, ...]]:
    """The query for the bytes in use, and its values."""
    mine = f"{SANE} AND (? IS NULL OR tenant = ?)"
    parts = (f"(SELECT total(bytes) FROM {t} WHERE {mine})" for t in ("segments", "reservations"))
    return f"SELECT {' + '.join(parts)}", (tenant,) * 4


def eviction(row: tuple[object, ...]) -> Eviction | None:
    """What (prefix, time, bytes, reason) say; None for a damaged row."""
    prefix, when, size, reason = row
    if not isinstance(prefix, str) or not isinstance(reason, str) or not isinstance(size, int):
        return None
    if not isinstance(when, float) or not 0 <= when < _LATEST:
        return None
    return Eviction(prefix, when, size, reason)


def sane(row: tuple[object, ...]) -> bool:
    id_, parent, size, used, score, tenant = row
    return (
        isinstance(id_, str)
        and isinstance(parent, str | None)
        and isinstance(size, int)
        and isinstance(used, float)
        and isinstance(score, float | None)
        and isinstance(tenant, str)
    )
