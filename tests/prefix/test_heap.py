"""A tier's lazy order against a full sort; what a request's bookkeeping costs."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.prefix.policy import POLICIES
from ckv_jax.prefix.tiers import PageTable, Tier, Tiers

PAGES = 40


def lowest(tier: Tier, table: PageTable, rivals: list[float]) -> list[int]:
    free = np.flatnonzero((tier.slot_of >= 0) & (table.pins == 0))
    order = sorted(free.tolist(), key=lambda page: (table.score[page], -page))
    victims = []
    for rival, page in zip(rivals, order, strict=False):
        if rival <= table.score[page]:
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
    """With few entries, so that they are made again and again."""
    table = PageTable(POLICIES["attention"])
    table.extend(np.zeros(PAGES), np.zeros(PAGES, np.uint32))
    tier = Tier(PAGES, table, 0, share=share, least=least)
    for kind, chosen, score in steps:
        ids = np.array(chosen, np.int64)
        members = ids[tier.slot_of[ids] >= 0]
        if kind == "insert":
            new = ids[tier.slot_of[ids] < 0]
            tier.enter(new, tier.take(len(new)))
        elif kind == "score":
            fell = members[table.score[members] > score]
            table.score[ids] = score
            tier.note(fell)
        elif kind == "pin":
            table.pins[ids] = 1 - table.pins[ids]
        elif kind == "leave":
            tier.leave(members)
        else:
            rivals = sorted((score * (1 + i % 2) for i in range(len(chosen))), reverse=True)
            popped = tier.pop_below(np.array(rivals))
            assert popped.tolist() == lowest(tier, table, rivals)
            tier.leave(popped)
        assert len(tier._run) + len(tier._heap) <= 2 * PAGES + 64 + len(chosen)


def test_a_request_over_600_of_100_000_pages_makes_no_array_as_long_as_the_table() -> None:
    """Victims' order is made anew now and then, over everything that is cached; never by each
    request, whose time would then grow with the caches (0.3 ms beside first tokens of 64 ms)."""
    count, used = 100_000, 600
    rng = np.random.default_rng(0)
    tiers = Tiers(15_000, 36_000, used, POLICIES["attention"])
    tiers.register(count)
    weight = 1 / np.arange(1, count + 1) ** 0.7
    edges, order = np.cumsum(weight) / weight.sum(), rng.permutation(count)
    peaks = []
    for _ in range(300):
        drawn = np.unique(np.searchsorted(edges, rng.random(2 * used)))
        pages = order[rng.permutation(drawn)[:used]]
        attention = rng.random(used)
        tracemalloc.start()
        device, host = tiers.lookup(pages)
        cached = pages[(device >= 0) | (host >= 0)]
        tiers.pin(cached)
        missing = device < 0
        device[missing] = tiers.take(int(missing.sum()))
        tiers.record(pages, attention)
        tiers.unpin(cached)
        tiers.admit(pages, device)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert tiers.device_pages == 15_000 and tiers.host_pages == 36_000, "both tiers are full"
    # A byte a page would be an array over all of them; nine requests in ten need less than that.
    assert np.percentile(peaks[150:], 90) < count
