"""Which whole segments leave when the store is over its bound: leaves first, worst first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ckv_jax.storage.index.rows import Entry
from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.place.files import Claim

_NONE = Wish()


class Plan:
    """Victims that are chosen and claimed, and not yet touched; used by one thread.

    A segment goes only after all that continue it. Those that have expired go first, then those of
    less priority. With "attention", those that were read compare by mean importance x frequency of
    their packs, and one that was never read yet counts as the average of them; ties, and "lru", go
    by time of use.

    Args:
      entries: all segments.
      policy: "attention" or "lru".
      keep: ids that stay: pinned ones.
      wishes: what people want of segments, by id.
      claim: takes a segment; None while somebody is reading it.
      now: seconds since the epoch.
    """

    def __init__(
        self,
        entries: Collection[Entry],
        *,
        policy: str,
        keep: Collection[str],
        wishes: Mapping[str, Wish],
        claim: Callable[[str], Claim | None],
        now: float,
    ) -> None:
        self._known = {e.id: e for e in entries}
        self._children = Counter(e.parent for e in entries if e.parent in self._known)
        self._policy = policy
        self._keep = set(keep)
        self._wishes = wishes
        self._claim = claim
        self._now = now
        scores = [e.score for e in entries if e.score is not None]
        self._fresh = sum(scores) / len(scores) if scores else 0.0
        self.victims: list[tuple[Entry, Claim, str]] = []
        """What is to go, in order, and why it in particular."""

    def take(self, excess: float, fits: Callable[[Entry], bool] = lambda _: True) -> int:
        """Claim segments until `excess` bytes would be free; returns the bytes that would be."""
        heap = [self._rank(e) for e in self._known.values() if self._leaf(e) and fits(e)]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < excess:
            entry = self._known[heapq.heappop(heap)[-1]]
            try:
                claim = self._claim(entry.id)
            except BaseException:
                self.drop()  # nobody will remove what was claimed so far
                raise
            if claim is None:
                continue
            self.victims.append((entry, claim, self._why(entry)))
            del self._known[entry.id]
            freed += entry.bytes
            parent = self._known.get(entry.parent or "")
            if parent is not None:
                self._children[parent.id] -= 1
                if self._leaf(parent) and fits(parent):
                    heapq.heappush(heap, self._rank(parent))
        return freed

    def drop(self) -> None:
        """Let all victims go again."""
        for _, claim, _ in self.victims:
            claim.release()
        self.victims.clear()

    def expired(self, entry: Entry) -> bool:
        """Whether a segment has outlived what was wanted of it."""
        seconds = self._wishes.get(entry.id, _NONE).retain_s
        return seconds is not None and entry.used + seconds <= self._now

    def _leaf(self, entry: Entry) -> bool:
        return not self._children[entry.id] and entry.id not in self._keep

    def _rank(self, entry: Entry) -> tuple[bool, int, float, float, str]:
        score = self._fresh if entry.score is None else entry.score
        return (
            not self.expired(entry),
            self._wishes.get(entry.id, _NONE).priority,
            score if self._policy == "attention" else 0.0,
            entry.used,
            entry.id,
        )

    def _why(self, entry: Entry) -> str:
        idle = max(0.0, self._now - entry.used)
        wish = self._wishes.get(entry.id, _NONE)
        if self.expired(entry):
            return f"expired: unused for {idle:.0f} s, retain_s={wish.retain_s:g}"
        score = "never read" if entry.score is None else f"score {entry.score:.3g}"
        return f"{score}, priority {wish.priority}, unused for {idle:.0f} s ({self._policy})"
