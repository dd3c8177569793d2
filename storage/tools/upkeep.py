"""Finding, pinning and pruning what is stored."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.prefix import Prefix, PrefixRecord
from ckv_jax.storage.segment.manifest import is_id
from ckv_jax.storage.store import ChunkStore


def find_prefix(store: ChunkStore, name: str, *, salt: str | None = None) -> Prefix:
    """The stored prefix with this name, or whose id starts with it.

    A whole id comes before a name, and a name before the start of an id.

    Args:
      name: a name, an id, or the start of one.
      salt: of the tenant whose it must be; None, for tools: anybody's.

    Raises:
      PrefixNotFound: with similar ids or, if there are none, with what is stored.
      ValueError: several prefixes have this name; the error lists them.
    """
    if is_id(name):
        with contextlib.suppress(PrefixNotFound):
            return store.prefix(name, salt=salt)  # without reading all names
    known = store.records(salt=salt)
    mine = [
        id_
        for id_, record in known.items()
        if name and record.name == name and _belongs_to(store, id_, salt)
    ]
    if len(mine) > 1:
        raise ValueError(
            f"{len(mine)} prefixes have this name; say which by its id: "
            f"{listed(mine, known, called=False)}"
        )
    try:
        return store.prefix(mine[0] if mine else name, salt=salt)
    except PrefixNotFound as error:
        stored = [prefix.id for prefix in store.prefixes(salt=salt)]
        if error.several or error.close or not stored:
            raise
        raise PrefixNotFound(name, stored=listed(stored, known)) from error


def _belongs_to(store: ChunkStore, prefix_id: str, salt: str | None) -> bool:
    try:
        store.prefix(prefix_id, salt=salt)
    except PrefixNotFound:
        return False
    return True


_LISTED = 5


def listed(ids: Sequence[str], known: Mapping[str, PrefixRecord], *, called: bool = True) -> str:
    """The first ids, each with its name (if `called`), its first words or its source."""
    lines = []
    for id_ in ids[:_LISTED]:
        record = known.get(id_, PrefixRecord())
        begins = f"“{record.begins}”" if record.begins else record.source
        about = (called and record.name) or begins
        lines.append(f"{id_[:12]}{f' ({about})' if about else ''}")
    return ", ".join(lines) + (f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else "")


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune_store` did, in bytes and segments."""

    bytes_before: int
    bytes_after: int
    removed: int


def prune_store(
    store: ChunkStore, max_bytes: int | None = None, *, expired: bool = False
) -> PruneReport:
    """Evict what has expired, if asked to, then whole segments until `max_bytes` are used at most.

    Pinned segments, and those that are being read, stay, so that more may remain.
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes: got {max_bytes}, expected at least 0")
    if max_bytes is None and not expired:
        raise ValueError("max_bytes: got None, expected a bound, or expired=True")
    before, evicted = store.usage(), store.stats()["evicted"]
    if expired:
        store.evict_expired()
    if max_bytes is not None:
        store.evict_to(max_bytes)
    return PruneReport(before, store.usage(), store.stats()["evicted"] - evicted)


def pin_prefix(store: ChunkStore, prefix: str, pinned: bool = True) -> str:
    """Keep a prefix, named or by its id, from eviction, or let it go again; returns its whole id.

    Raises:
      PrefixNotFound: there is no such prefix.
      ValueError: several prefixes have this name.
    """
    return update_record(store, prefix, pinned=pinned)


def update_record(
    store: ChunkStore,
    prefix: str,
    *,
    pinned: bool | None = None,
    retain_s: float | None = None,
    priority: int | None = None,
) -> str:
    """Change what is wanted of a prefix, see `PrefixRecord`; None leaves a part as it is.

    `prefix`: a name, an id, or the start of one. Returns its whole id. Raises what `find_prefix`
    does.
    """
    found = find_prefix(store, prefix).id
    changes = {"pinned": pinned, "retain_s": retain_s, "priority": priority}
    given = {name: value for name, value in changes.items() if value is not None}
    record = replace(store.records().get(found, PrefixRecord()), **given)  # type: ignore[arg-type]
    return store.set_record(found, record)
