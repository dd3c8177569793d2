"""Which whole segments leave when the store is over its bound: leaves first, worst first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection

from ckv_jax.storage.index.catalog import Entry


def evict(
    entries: Collection[Entry],
    *,
    excess: int,
    policy: str,
    keep: Collection[str],
    remove: Callable[[str], bool],
) -> int:
    """Remove segments until `excess` bytes are free; returns the bytes that were freed.

    A segment goes only after all that continue it. With "attention", those that were read compare
    by mean importance x frequency of their packs, and one that was never read yet counts as the
    average of them; ties, and "lru", go by time of use.

    Args:
      entries: all segments.
      excess: bytes to free.
      policy: "attention" or "lru".
      keep: ids that stay: pinned ones.
      remove: removes a segment; False when somebody is reading it.
    """
    known = {e.id: e for e in entries}
    children = Counter(e.parent for e in entries if e.parent in known)
    scores = [e.score for e in entries if e.score is not None]
    fresh = sum(scores) / len(scores) if scores else 0.0

    def rank(entry: Entry) -> tuple[float, float, str]:
        score = fresh if entry.score is None else entry.score
        return (score if policy == "attention" else 0.0, entry.used, entry.id)

    heap = [rank(e) for e in entries if not children[e.id] and e.id not in keep]
    heapq.heapify(heap)
    freed = 0
    while heap and freed < excess:
        entry = known[heapq.heappop(heap)[2]]
        if not remove(entry.id):
            continue
        freed += entry.bytes
        parent = entry.parent
        if parent in known:
            children[parent] -= 1
            if not children[parent] and parent not in keep:
                heapq.heappush(heap, rank(known[parent]))
    return freed
