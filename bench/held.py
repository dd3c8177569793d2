"""What a process and its engine hold, again and again, and whether that grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.common import Json, table
from bench.memory import status_mb
from ckv_jax import Engine
from ckv_jax.pipeline import mappings

MORE = 0.10


def held(engine: Engine) -> Json:
    """Now: memory of the process and the digests' part of it, device packs that texts pin and that
    caches have, compiled programs, memory mappings."""
    stats = engine.stats()
    return {
        "rss_mb": status_mb("VmRSS"),
        "digest_mb": stats.digest_bytes / 1e6,
        "pinned_packs": stats.pinned_packs,
        "device_packs": stats.device_packs,
        "programs": stats.programs,
        "mappings": mappings.held(),
    }


def growth(early: Sequence[Json], late: Sequence[Json], bars: Mapping[str, float]) -> Json:
    """Each of `bars` at most in early rows and at most in late ones, and whether that is met.
    Memory is counted without digests, which have an entry for every chunk of a text."""
    found = {}
    for name, bar in bars.items():
        first, most = (max(_held(row, name) for row in rows) for rows in (early, late))
        more = (most - first) / max(1.0, first)
        found[name] = {"first": first, "most": most, "more": more, "met": more <= bar}
    return found


def show(found: Json, when: str) -> str:
    """`growth` as a table; `when` the early rows end."""
    cells = [
        [name, one["first"], one["most"], f"{one['more']:+.1%}", "met" if one["met"] else "missed"]
        for name, one in found.items()
    ]
    return table(cells, ["", when, "at most later", "grew", "bar"])


def _held(row: Json, name: str) -> float:
    value = float(row[name])
    return value - float(row["digest_mb"]) if name == "rss_mb" else value
