"""Prefetch, caches, threads and failing reads change when bytes arrive, never what is answered."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine_support import preset_of, small_engine, tokens
from engine_tiny import TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_support import UnsteadyStore

from ckv_jax import Engine, Request
from ckv_jax.baselines.impress import IMPRESS
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.recovery import Recovered, Recoveries
from ckv_jax.storage import ChunkStore, Fingerprint, Layout, Prefix, StoreConfig
from ckv_jax.storage.errors import StoreUnavailable

MODEL = dataclasses.replace(TINY, num_layers=7)
SHAPE = {"period": 4, "subperiod": 2, "pack_layers": 2}
"""Periods of four layers and of three, in two calls each; the last call and pack have one."""
PREFIX = tokens(400)
SUFFIXES = [tokens(6, seed) for seed in range(1, 5)]
BUDGET = 0.2
SLOTS = [24, 120]
"""Device slots in all: too few for what is read ahead, and enough for every pack of the prefix.

Few values, since every one has programs of its own; how they are shared out is drawn freely.
"""
WORK = 8
"""Slots at least that are not of the cache."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    made = {
        name: small_engine(
            tmp_path_factory.mktemp(name),
            system=name,
            model=MODEL,
            overrides={**SHAPE, "prefetch": "none"},
            device_cache_bytes=0,
            host_cache_bytes=0,
        )
        for name in ("contiguous-kv", "ckv")
    }
    for engine in made.values():
        engine.ingest(PREFIX)
    yield made
    for engine in made.values():
        engine.close()


def answers(engine: Engine) -> list[np.ndarray]:
    """Logits of four requests, one after the other, so that caches fill and are used."""
    prefix = engine.ingest(PREFIX)
    return [
        engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=BUDGET)])[0].logits
        for suffix in SUFFIXES
    ]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["contiguous-kv", "ckv"]),
    prefetch=st.sampled_from(["none", "intra", "previous"]),
    policy=st.sampled_from(["attention", "frequency-attention", "lru", "lfu", IMPRESS.policy]),
    slots=st.sampled_from(SLOTS),
    cached=st.integers(0, 80),
    host_packs=st.integers(0, 80),
    buffer_packs=st.sampled_from([1, 20, 300]),
    threads=st.integers(1, 6),
    mapped=st.booleans(),
)
def test_logits_are_bit_identical(
    engines: dict[str, Engine],
    name: str,
    prefetch: str,
    policy: str,
    slots: int,
    cached: int,
    host_packs: int,
    buffer_packs: int,
    threads: int,
    mapped: bool,
) -> None:
    """`mapped`: reads land in the page pool; otherwise in a buffer that is copied, as for a GPU."""
    plain = engines[name]
    pack = plain.layout.pack_bytes
    cached = min(cached, slots - WORK)
    system = dataclasses.replace(
        preset_of(name),
        **SHAPE,
        prefetch=prefetch,
        policy=policy,
    )
    config = dataclasses.replace(
        plain.config,
        system=system,
        device_cache_bytes=cached * pack,
        host_cache_bytes=host_packs * pack,
        prefetch_device_bytes=(slots - cached) * pack,
        prefetch_host_bytes=buffer_packs * pack,
        io_threads=threads,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "in_host_memory", mapped)
        engine = plain.variant(config, store=UnsteadyStore(plain.store))
        with engine:
            found = answers(engine)
    for got, expected in zip(found, answers(plain), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("name", "failing"), [("contiguous-kv", 1.0), ("ckv", 0.1)])
def test_failed_reads_are_recomputed(engines: dict[str, Engine], name: str, failing: float) -> None:
    plain = engines[name]
    unsteady = UnsteadyStore(plain.store, failing)
    system = dataclasses.replace(preset_of(name), **SHAPE)
    with plain.variant(dataclasses.replace(plain.config, system=system), store=unsteady) as engine:
        results = []
        for suffix in SUFFIXES:
            request = Request(prefix=plain.ingest(PREFIX), suffix=suffix, budget=BUDGET)
            results += engine.reprefill([request])
        for result, expected in zip(results, answers(plain), strict=True):
            assert np.abs(result.logits - expected).max() < 1e-4 * np.abs(expected).max()
        assert any(result.trace.counters.get("recomputed_packs") for result in results)


def test_an_encrypted_store_leaves_no_recomputed_kv_in_files(
    engines: dict[str, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engines["ckv"]
    (tmp_path / "key").write_text("ab" * 32)
    settings = StoreConfig(encrypt_key_file=tmp_path / "key")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    for config, name in ((settings, "sealed"), (StoreConfig(), "clear")):
        store = UnsteadyStore(ChunkStore.open(tmp_path / name, config=config), 1.0)
        with plain.variant(plain.config, store=store) as engine:
            request = Request(prefix=engine.ingest(PREFIX), suffix=SUFFIXES[0], budget=1.0)
            if name == "clear":
                with pytest.raises(StoreUnavailable, match="set TMPDIR"):
                    engine.reprefill([request])[0].raise_for_error()
                continue
            found = engine.reprefill([request])[0]
            assert found.trace.counters["recomputed_packs"]
            expected = plain.recompute(request).logits
            assert np.abs(found.logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("bound", "stays"), [(None, [1, 2, 3, 4]), (8, [1, 2, 3, 4]), (2, [3, 4]), (0, [4])]
)
def test_recomputed_kv_in_memory_has_a_bound(bound: int | None, stays: list[int]) -> None:
    layout = Layout(num_layers=4, num_kv_heads=2, head_dim=64)
    text, model = np.zeros(100, np.int32), Fingerprint({})
    prefixes = [
        Prefix(id=str(i), tokens=text, spans=(), layout=layout, fingerprint=model) for i in range(5)
    ]
    one = Recovered(prefixes[0], cast("Any", None), lambda kv: None)
    assert one.num_bytes == 4 * 2 * 100 * 2 * 64 * 2
    known = Recoveries(cast("Any", None), None if bound is None else bound * one.num_bytes)
    before = [known.of(prefix, lambda kv: None) for prefix in prefixes]
    assert known.of(prefixes[4], lambda kv: None) is before[4]
    assert [prefix.id for prefix in known._known] == [str(i) for i in stays]


@pytest.mark.parametrize("prefetch", ["none", "intra", "previous"])
def test_no_pack_is_read_twice_for_a_request(engines: dict[str, Engine], prefetch: str) -> None:
    """Nor one that is being read ahead when it is demanded."""
    plain = engines["ckv"]
    store = UnsteadyStore(plain.store)
    system = dataclasses.replace(preset_of("ckv"), **SHAPE, prefetch=prefetch)
    config = dataclasses.replace(plain.config, system=system)
    with plain.variant(config, store=store) as engine:
        prefix = engine.ingest(PREFIX)
        for suffix in SUFFIXES:
            store.reads.clear()
            request = Request(prefix=prefix, suffix=suffix, budget=BUDGET)
            engine.reprefill([request])[0].raise_for_error()
            assert store.reads and len(store.reads) == len(set(store.reads))
