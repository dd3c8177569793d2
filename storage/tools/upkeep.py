"""Keeping a store in bounds: pruning it, and pinning what must stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.names import find_prefix


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
    return wish_for(store, prefix, pinned=pinned)


def wish_for(
    store: ChunkStore,
    prefix: str,
    *,
    pinned: bool | None = None,
    retain_s: float | None = None,
    priority: int | None = None,
) -> str:
    """Change what is wanted of a prefix, see `Wish`; None leaves a part as it is.

    `prefix`: a name, an id, or the start of one. Returns its whole id. Raises what `find_prefix`
    does.
    """
    found = find_prefix(store, prefix).id
    changes = {"pinned": pinned, "retain_s": retain_s, "priority": priority}
    given = {name: value for name, value in changes.items() if value is not None}
    wish = replace(store.wishes().get(found, Wish()), **given)  # type: ignore[arg-type]
    return store.set_wish(found, wish)
