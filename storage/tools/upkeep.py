"""Keeping a store in bounds: pruning it, and pinning what must stay."""

from __future__ import annotations

from dataclasses import dataclass

from ckv_jax.storage.store import ChunkStore


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune_store` did, in bytes and segments."""

    bytes_before: int
    bytes_after: int
    removed: int


def prune_store(store: ChunkStore, max_bytes: int) -> PruneReport:
    """Evict whole segments until at most `max_bytes` are used.

    Pinned segments, and those that are being read, stay, so that more may remain.
    """
    if max_bytes < 0:
        raise ValueError(f"max_bytes: got {max_bytes}, expected at least 0")
    before, evicted = store.usage(), store.stats()["evicted"]
    store.bounds.evict_to(max_bytes)
    return PruneReport(before, store.usage(), store.stats()["evicted"] - evicted)


def pin_prefix(store: ChunkStore, prefix_id: str, pinned: bool = True) -> str:
    """Keep a prefix from eviction, or let it go again; returns its whole id.

    Raises:
      PrefixNotFound: there is no such prefix.
    """
    found = store.prefix(prefix_id)
    store.files.set_pin(found.id, pinned)
    return found.id
