"""Widths by layer and head: the greedy spread against the best one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.baselines.window_widths import Widths, spread


def best(benefit: np.ndarray, cost: np.ndarray, limit: int) -> float:
    """The greatest benefit there is, by dynamic programming over the cost."""
    most = np.full(limit + 1, -np.inf)
    most[0] = 0
    for values, prices in zip(benefit, cost, strict=True):
        fresh = np.full_like(most, -np.inf)
        for value, price in zip(values, prices, strict=True):
            if price <= limit:
                fresh[price:] = np.maximum(fresh[price:], most[: limit + 1 - price] + value)
        most = fresh
    return float(most.max())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 8),
    options=st.integers(1, 5),
    room=st.integers(0, 60),
    concave=st.booleans(),
)
def test_greedy_against_the_best(
    seed: int, rows: int, options: int, room: int, concave: bool
) -> None:
    rng = np.random.default_rng(seed)
    cost = np.cumsum(rng.integers(1, 9, (rows, options)), axis=1)
    steps = rng.exponential(size=(rows, options)) * rng.exponential(size=(rows, 1))
    if concave:
        steps = -np.sort(-steps, axis=1)
        cost = np.arange(1, options + 1) * rng.integers(1, 9, (rows, 1))
    benefit = np.cumsum(steps, axis=1)
    limit = int(cost[:, 0].sum()) + room
    option = spread(benefit, cost, limit)
    at = np.arange(rows), option
    assert cost[at].sum() <= limit
    base = benefit[:, 0].sum()
    found, most = benefit[at].sum() - base, best(benefit, cost, limit) - base
    assert found <= most + 1e-9 and found >= most / 2 - 1e-9


def test_slots_share_the_room_of_even_windows() -> None:
    """Whole, at least a selection, and together no more packs than even windows have."""
    widths, packs = Widths(times=((1.0, 1.5), (2.0, 3.5))), np.array([1, 1])
    np.testing.assert_array_equal(widths.slots(10, 2.0, packs), [[10, 15], [20, 35]])
    np.testing.assert_array_equal(widths.slots(10, 1.0, packs), np.full((2, 2), 10))
    np.testing.assert_array_equal(widths.slots(10, 1.5, packs), [[10, 12], [15, 22]])
    even = Widths.even(2.0, groups=3, rows=2)
    np.testing.assert_array_equal(even.slots(7, 2.0, np.ones(3, int)), np.full((3, 2), 14))
    alone = Widths.even(1.0, groups=2, rows=1)  # nothing says who is to have more
    np.testing.assert_array_equal(alone.slots(7, 3.0, packs), [[21], [21]])
    rng = np.random.default_rng(0)
    for _ in range(200):
        packs, limit = rng.integers(1, 5, 4), int(rng.integers(1, 40))
        times = float(rng.uniform(1, 5))
        widths = Widths(times=tuple((float(t),) for t in rng.choice([1.0, 1.5, 2.0, 4.0], 4)))
        slots = widths.slots(limit, times, packs)
        assert slots.min() >= limit
        assert (slots[:, 0] * packs).sum() <= limit * times * packs.sum() + 1e-3
