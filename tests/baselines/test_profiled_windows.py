"""Window widths by layer and head: the greedy spread against the best one; made of what texts
selected, part of no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_sharp import POOL_BYTES
from engine_support import tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.window_widths import (
    TIMES,
    ProfiledSelections,
    in_engine,
    profile_windows,
    selections_of,
    slots_of,
    spread,
)
from ckv_jax.buckets import chunk_bucket
from ckv_jax.config import OwnParts
from ckv_jax.decode import selection
from ckv_jax.storage.prefix import Prefix

BUDGET = 0.2
LENGTH = 24
PERIODS = 2


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(tokens(250))


def asked(prefix: Prefix) -> Request:
    return Request(prefix=prefix, suffix=tokens(7, 40).tolist(), budget=BUDGET)


def generated(engine: Engine, prefix: Prefix) -> tuple[np.ndarray, int]:
    """Keys and values that a text computed, and the most packs that it held meanwhile."""
    sampling = SamplingParams(max_tokens=LENGTH)
    held = 0
    with engine.generate(asked(prefix), sampling, keep_kv=True) as stream:
        for _ in stream:
            held = max(held, engine.stats().pinned_packs)
        [text] = stream.results()
    return np.asarray(text.completion().kv), held


@pytest.fixture(scope="module")
def plain(engine: Engine, prefix: Prefix) -> tuple[np.ndarray, int]:
    return generated(engine, prefix)


def without_caches(engine: Engine, **system: object) -> Engine:
    """Its windows have profiled widths."""
    own = OwnParts(decoding=ProfiledSelections)
    values = replace(
        engine.config, system=replace(engine.system, own=own, **system), device_cache_bytes=0,
        prefetch_device_bytes=POOL_BYTES,
    )  # fmt: skip
    return engine.variant(values)


@pytest.mark.slow
def test_no_width_changes_what_is_attended_to(
    engine: Engine, prefix: Prefix, plain: tuple[np.ndarray, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one period has all of the room, and a batch's arrays no more than they need."""
    packs = [len(engine.worker.plan.groups(period)) for period in range(PERIODS)]
    most = 4 * 2 * sum(packs)  # a fifth of 16 chunks, twice
    assert most // 2 < plain[1] <= most
    exact = lambda count, chunks: count  # noqa: E731
    for widths, room in (((1.0, 4.0), chunk_bucket), ((1.0, 4.0), exact), ((4.0, 1.0), exact)):
        monkeypatch.setattr(selection, "chunk_bucket", room)
        with without_caches(engine) as other:
            selections = selections_of(other, ProfiledSelections)
            in_engine(other, selections, widths=np.array(widths)[:, None])
            mine, held = generated(other, prefix)
            assert other.stats().pinned_packs == 0
        assert (mine == plain[0]).all()
        assert most // 2 < held <= most


@pytest.mark.slow
def test_a_profile_is_made_of_what_was_selected(
    engine: Engine, prefix: Prefix, plain: tuple[np.ndarray, int]
) -> None:
    packs = np.array([len(engine.worker.plan.groups(p)) for p in range(PERIODS)])
    with without_caches(engine, window=3.0) as other:
        widths = profile_windows(other, asked(prefix), SamplingParams(max_tokens=40))
        assert {*widths.reshape(-1)} <= {*TIMES}
        assert 2 * packs.sum() < widths[:, 0] @ packs <= 3 * packs.sum()
        assert selections_of(other, ProfiledSelections).widths is widths
        assert (generated(other, prefix)[0] == plain[0]).all()  # the engine uses these widths


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
    widths, packs = np.array([[1.0, 1.5], [2.0, 3.5]]), np.array([1, 1])
    np.testing.assert_array_equal(slots_of(widths, 10, 2.0, packs), [[10, 15], [20, 35]])
    np.testing.assert_array_equal(slots_of(widths, 10, 1.0, packs), np.full((2, 2), 10))
    # Where all are of one selection, nothing says which is to have more.
    np.testing.assert_array_equal(slots_of(np.ones((2, 1)), 7, 3.0, packs), [[21], [21]])
    rng = np.random.default_rng(0)
    for _ in range(200):
        packs, limit = rng.integers(1, 5, 4), int(rng.integers(1, 40))
        times = float(rng.uniform(1, 5))
        slots = slots_of(rng.choice([1.0, 1.5, 2.0, 4.0], (4, 1)), limit, times, packs)
        assert slots.min() >= limit
        assert (slots[:, 0] * packs).sum() <= limit * times * packs.sum() + 1e-3
