"""Window widths by period: made of what texts selected, part of no answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engine_sharp import POOL_BYTES, Sharp
from engine_support import tokens

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.window_widths import (
    TIMES,
    ProfiledSelections,
    Widths,
    in_engine,
    profile_windows,
    selections_of,
)
from ckv_jax.buckets import chunk_bucket
from ckv_jax.config import OwnParts
from ckv_jax.decode import selection
from ckv_jax.storage.prefix import Prefix

BUDGET = 0.2
LENGTH = 24
PERIODS = 2


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(tokens(250))


def asked(prefix: Prefix) -> Request:
    return Request(prefix=prefix, suffix=tokens(7, 40).tolist(), budget=BUDGET)


def told(engine: Engine, prefix: Prefix) -> tuple[np.ndarray, int]:
    """Keys and values that a text computed, and the most packs that it held meanwhile."""
    sampling = SamplingParams(max_tokens=LENGTH)
    held = 0
    with engine.generate(asked(prefix), sampling, keep_kv=True) as stream:
        for _ in stream:
            held = max(held, engine.stats().pinned_packs)
        [text] = stream.results()
    return np.asarray(text.completion().kv), held


def without_caches(engine: Engine, **system: object) -> Engine:
    """Its windows have profiled widths."""
    own = OwnParts(decoding=ProfiledSelections)
    values = replace(
        engine.config, system=replace(engine.system, own=own, **system), device_cache_bytes=0,
        prefetch_device_bytes=POOL_BYTES,
    )  # fmt: skip
    return engine.variant(values)


def test_no_width_changes_what_is_attended_to(engine: Engine, prefix: Prefix) -> None:
    plain, even = told(engine, prefix)
    packs = np.array([len(engine._worker.plan.groups(p)) for p in range(PERIODS)])
    most = 4 * 2 * int(packs.sum())  # a fifth of 16 chunks, twice
    assert most // 2 < even <= most
    for times in (((1.0,), (4.0,)), ((4.0,), (1.0,)), ((1.5,), (1.0,))):
        with without_caches(engine) as other:
            selections = selections_of(other, ProfiledSelections)
            in_engine(other, partial(setattr, selections, "widths", Widths(times=times)))
            mine, held = told(other, prefix)
        assert (mine == plain).all()
        assert most // 2 < held <= most


def test_a_window_may_be_wider_than_the_average_allows(
    engine: Engine, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One period has all of the room, also where a batch's arrays have no more than they need."""
    plain, _ = told(engine, prefix)
    held = []
    for room in (chunk_bucket, lambda n, chunks: n):
        monkeypatch.setattr(selection, "chunk_bucket", room)
        with without_caches(engine) as other:
            widths = Widths(times=((1.0,), (4.0,)))
            selections = selections_of(other, ProfiledSelections)
            in_engine(other, partial(setattr, selections, "widths", widths))
            mine, most = told(other, prefix)
            assert other.stats().pinned_packs == 0
        assert (mine == plain).all()
        held.append(most)
    assert held[0] == held[1]


def test_a_profile_is_made_of_what_was_selected(engine: Engine, prefix: Prefix) -> None:
    plain, _ = told(engine, prefix)
    packs = np.array([len(engine._worker.plan.groups(p)) for p in range(PERIODS)])
    with without_caches(engine, window=3.0) as other:
        widths = profile_windows(other, asked(prefix), SamplingParams(max_tokens=40))
        assert {time for group in widths.times for time in group} <= set(TIMES)
        assert 2 * packs.sum() < np.array(widths.times)[:, 0] @ packs <= 3 * packs.sum()
        assert selections_of(other, ProfiledSelections).widths == widths
        assert (told(other, prefix)[0] == plain).all()  # and they are used from now on
