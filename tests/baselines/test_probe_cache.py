"""Probe keys are entries of the caches: read once, evicted like packs, and never another answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from engine_support import SMALL, small_engine, tokens

from ckv_jax import Engine, Request
from ckv_jax.baselines.impress import Impress
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.request import Result
from ckv_jax.storage.prefix import Prefix, ProbePages
from ckv_jax.systems import SYSTEMS

MODEL = dataclasses.replace(SMALL, num_layers=4, num_heads=8, num_kv_heads=4)
LENGTH = 500
NO_CACHES = {"device_cache_bytes": 0, "host_cache_bytes": 0}
KV = 2 * 4 * 4 * 16 * 4 * LENGTH  # bytes of the prefix's keys and values

Sizes = Mapping[str, int]


def probe_bytes(result: Result) -> int:
    """Bytes of probe keys that came from the store."""
    return sum(s.args["bytes"] for s in result.trace.spans if s.name == "probe_read")


def ask(engine: Engine, prefix: Prefix, seed: int = 1) -> Result:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=tokens(9, seed), budget=0.1)])
    return result


@pytest.fixture(
    scope="module", params=["impress", pytest.param("contiguous-kv", marks=pytest.mark.slow)]
)
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, system: str) -> Path:
    return tmp_path_factory.mktemp(system)


@pytest.fixture(scope="module")
def cold(folder: Path, system: str) -> Iterator[list[Result]]:
    """Answers to four questions without any cache."""
    with engine_over(folder, system, NO_CACHES) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        yield [ask(engine, prefix, seed) for seed in range(4)]


def engine_over(folder: Path, system: str, sizes: Sizes) -> Engine:
    preset = SYSTEMS[system]
    if system == "impress":
        preset = dataclasses.replace(preset, own=Impress(reorder_every=0).own())
    return small_engine(folder, system=preset, model=MODEL, **sizes)


def rows_read(system: str) -> int:
    """Bytes of all probe keys that one request needs."""
    layers, heads = (4, 2) if system == "impress" else (1, 4)  # a period of 8 layers: one probe
    return layers * heads * MODEL.head_dim * 4 * LENGTH


def test_without_caches_every_question_reads_all_of_them(cold: list[Result], system: str) -> None:
    assert [probe_bytes(result) for result in cold] == [rows_read(system)] * 4


@pytest.mark.parametrize(
    "sizes",
    [
        {"device_cache_bytes": 2 * KV, "host_cache_bytes": 0},
        {"device_cache_bytes": 0, "host_cache_bytes": 2 * KV},
        {"device_cache_bytes": KV // 20, "host_cache_bytes": KV // 20},
    ],
    ids=["device", "host", "tiny"],
)
def test_answers_are_the_same_bit_for_bit(
    folder: Path, system: str, cold: list[Result], sizes: Sizes
) -> None:
    with engine_over(folder, system, sizes) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        found = [ask(engine, prefix, seed) for seed in (0, 1, 2, 3, 0)]
        stats = engine.stats()
        tiers = engine.worker.memory.tiers
        assert tiers.device_pages <= tiers.device_slots  # within the budgets
        assert tiers.host_pages <= tiers.host_slots
        assert stats.device_hits + stats.host_hits > 0
    for result, expected in zip(found, [*cold, cold[0]], strict=True):
        np.testing.assert_array_equal(result.logits, expected.logits)
    read = [probe_bytes(result) for result in found]
    assert read[0] == rows_read(system)
    if sizes["device_cache_bytes"] + sizes["host_cache_bytes"] >= KV:
        assert read[1:] == [0] * 4
        kept = found[1].trace.bytes["device" if sizes["device_cache_bytes"] else "host"]
        assert kept >= rows_read(system)
    else:  # some were pushed out again
        assert 0 < sum(read[1:]) < 5 * rows_read(system)


def test_hints_bring_and_evict_them_with_the_packs(folder: Path, system: str) -> None:
    with engine_over(folder, system, NO_CACHES | {"device_cache_bytes": 2 * KV}) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        packs = prefix.num_chunks * prefix.layout.groups
        assert engine.prefetch(prefix, budget=1.0).result() > packs
        assert probe_bytes(ask(engine, prefix)) == 0
        assert engine.demote(prefix).result() > packs
        assert probe_bytes(ask(engine, prefix)) == rows_read(system)


@pytest.mark.parametrize("system", ["contiguous-kv"], indirect=True)
def test_a_pool_too_small_for_a_probe_is_refused(folder: Path, system: str) -> None:
    slots, pack = 3, 4 * 2 * 16 * 4 * 16 * 4  # a probe has four pages
    with engine_over(folder, system, NO_CACHES | {"prefetch_device_bytes": slots * pack}) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        assert engine.worker.memory.tiers.slots == slots < len(ProbePages(prefix))
        with pytest.raises(PoolExhausted):
            ask(engine, prefix, 0).raise_for_error()
