from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_support import small_engine, tokens
from engine_tiny import tiny_engine

from ckv_jax import Request
from ckv_jax.baselines.probe_keys import KeyProbes
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.pipeline.executor import guessed_chunks
from ckv_jax.prefix.packs import Packs


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_rows_share_what_is_guessed_beyond_their_limits(rows: int) -> None:
    limits = np.full(rows, 64, np.int32)
    more = guessed_chunks(limits, 1.25)
    assert more.dtype == np.int32
    assert more.tolist() == [64 + max(1, 16 // rows)] * rows


def test_nothing_is_guessed_for_padding_nor_without_overfetch() -> None:
    limits = np.array([16, 3, 0, 0], np.int32)
    np.testing.assert_array_equal(guessed_chunks(limits, 1.25), [17, 4, 0, 0])
    np.testing.assert_array_equal(guessed_chunks(limits, 1.0), limits)


def test_the_probe_of_a_period_is_asked_for_while_the_one_before_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    ahead, get = KeyProbes.ahead, KeyProbes.get

    def logged_ahead(self: KeyProbes, period: int) -> None:
        said.append(("ahead", period))
        ahead(self, period)

    def logged_get(self: KeyProbes, layers: Sequence[int], period: int) -> list[Probe]:
        said.append(("get", period))
        return get(self, layers, period)

    monkeypatch.setattr(KeyProbes, "ahead", logged_ahead)
    monkeypatch.setattr(KeyProbes, "get", logged_get)
    with small_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(100))
        said.clear()
        engine.reprefill([Request(prefix=prefix, suffix=tokens(5, 1), budget=0.2)])
        periods = len(engine.last_selection(prefix))
    assert periods > 1
    first = [said.index(("ahead", period)) for period in range(periods)]
    used = [said.index(("get", period)) for period in range(periods)]
    assert all(first[p] < used[p] for p in range(periods))
    assert all(used[p] < first[p + 1] for p in range(periods - 1))  # not sooner than it is free


@pytest.mark.parametrize(("lacking", "together"), [(0, True), (1, False)])
def test_a_period_that_just_fits_the_pool_is_asked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int, together: bool
) -> None:
    """One slot less, and each step asks for its own packs when it is due."""
    said: list[tuple[str, int]] = []
    demand, collect = Packs.demand, Packs.collect

    def logged_demand(self: Packs, which: int, group: np.ndarray, chunks: np.ndarray) -> int:
        said.extend(("demand", one) for one in np.unique(group).tolist())
        return demand(self, which, group, chunks)

    def logged_collect(
        self: Packs, which: int, group: np.ndarray, chunks: np.ndarray
    ) -> np.ndarray:
        said.extend(("collect", one) for one in np.unique(group).tolist())
        return collect(self, which, group, chunks)

    with tiny_engine(tmp_path) as plain:  # two groups a period
        prefix = plain.ingest(tokens(100))
        slots = 2 * prefix.num_chunks - lacking
        config = dataclasses.replace(
            plain.config,
            device_cache_bytes=0,
            prefetch_device_bytes=slots * plain.layout.pack_bytes,
        )
        with plain.variant(config) as engine:
            monkeypatch.setattr(Packs, "demand", logged_demand)
            monkeypatch.setattr(Packs, "collect", logged_collect)
            request = Request(prefix=prefix, suffix=tokens(5, 1), budget=1.0)
            engine.reprefill([request])[0].raise_for_error()
    for first in (0, 2):
        before = said[: said.index(("collect", first))]
        assert ("demand", first) in before
        assert (("demand", first + 1) in before) == together
