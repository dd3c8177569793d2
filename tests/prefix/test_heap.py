"""The lazy heap against a full sort."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.prefix.policy import Members, ScoreHeap, Slots

PAGES = 40


class Tier:
    """Pages in slots, each with a heap of few entries so that it is filled again and again."""

    def __init__(self, share: float, least: int) -> None:
        self.heap = ScoreHeap(share=share, least=least)
        self.slots = Slots(PAGES)
        self.slot_of = np.full(PAGES, -1, np.int32)
        self.scores = np.zeros(PAGES)
        self.pins = np.zeros(PAGES, np.int32)

    def members(self) -> Members:
        return Members(self.slots, self.slot_of, self.scores, self.pins)

    def insert(self, pages: list[int]) -> None:
        new = np.array([p for p in pages if self.slot_of[p] < 0], np.int64)
        self.slot_of[new] = self.slots.take(len(new))
        self.slots.assign(self.slot_of[new], new)
        self.heap.add(new, self.scores)

    def remove(self, pages: np.ndarray) -> None:
        self.slots.put_back(self.slot_of[pages])
        self.slot_of[pages] = -1

    def lowest(self, rivals: list[float]) -> list[int]:
        free = np.flatnonzero((self.slot_of >= 0) & (self.pins == 0))
        order = sorted(free.tolist(), key=lambda page: (self.scores[page], -page))
        victims = []
        for rival, page in zip(rivals, order, strict=False):
            if rival <= self.scores[page]:
                break
            victims.append(page)
        return victims


pages = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=12, unique=True)
value = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, 1e9])
step = st.one_of(
    st.tuples(st.just("insert"), pages, value),
    st.tuples(st.just("score"), pages, value),
    st.tuples(st.just("pin"), pages, value),
    st.tuples(st.just("leave"), pages, value),
    st.tuples(st.just("pop"), pages, value),
)


@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(step, max_size=40),
    share=st.sampled_from([0.01, 0.2, 1.0]),
    least=st.integers(1, 6),
)
def test_pops_what_a_sort_would(
    steps: list[tuple[str, list[int], float]], share: float, least: int
) -> None:
    tier = Tier(share, least)
    for kind, chosen, score in steps:
        ids = np.array(chosen, np.int64)
        members = ids[tier.slot_of[ids] >= 0]
        if kind == "insert":
            tier.insert(chosen)
        elif kind == "score":
            fell = members[tier.scores[members] > score]
            tier.scores[ids] = score
            tier.heap.add(fell, tier.scores)
        elif kind == "pin":
            tier.pins[ids] = 1 - tier.pins[ids]
        elif kind == "leave":
            tier.remove(members)
        else:
            rivals = sorted((score * (1 + i % 2) for i in range(len(chosen))), reverse=True)
            expected = tier.lowest(rivals)
            popped = tier.heap.pop_below(np.array(rivals), tier.members())
            assert popped.tolist() == expected
            tier.remove(popped)
        assert tier.heap.entries <= 2 * PAGES + 64 + len(chosen)
