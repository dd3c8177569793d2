"""The layer-by-layer baselines on a real store: what defines each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from compilations import compilations
from engine_support import SMALL, scale_error, small_engine, tokens
from engine_tiny import TINY
from pipeline_support import UnsteadyStore

from ckv_jax import Engine, Request, Result
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

MODEL = dataclasses.replace(SMALL, num_layers=3, num_heads=8, num_kv_heads=4)
BASELINES = ["as-lru", "as-h2o-lfu", "impress"]
LENGTH, CHUNKS = 250, 4
SUFFIX = tokens(9, 1)
COLD = {"device_cache_bytes": 0, "host_cache_bytes": 0}


@pytest.fixture(scope="module", params=BASELINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """An engine without a cache, and a prefix in it."""
    folder = tmp_path_factory.mktemp(request.param)
    with small_engine(folder, system=request.param, model=MODEL, **COLD) as engine:
        yield engine, engine.ingest(tokens(LENGTH))


def ask(engine: Engine, prefix: Prefix, budget: float, suffix: np.ndarray = SUFFIX) -> Result:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=budget)])
    return result


def test_what_a_small_budget_reads(served: tuple[Engine, Prefix]) -> None:
    engine, prefix = served
    result = ask(engine, prefix, 0.05)
    counters, layers, pack = result.trace.counters, MODEL.num_layers, engine.layout.pack_bytes
    if engine.system.own.selects == "all":  # AttentionStore prunes nothing, at any budget
        assert result.trace.bytes["ssd"] == 2 * layers * CHUNKS * pack
        assert scale_error(result.logits, engine.recompute(result.request).logits) < 1e-4
        return
    important = 13  # ceil(0.05 * 250), as keys and as values, in every layer
    assert counters["ssd_tokens_needed"] == 2 * layers * important
    if engine.system.name == "impress":
        decided = counters.get("layers_agreed", 0) + counters.get("layers_fell_back", 0)
        assert decided == layers
    assert 0 < result.trace.attention_mass < 1
    if engine.system.name.startswith("as-h2o"):  # all keys, and the chunks of values that matter
        keys = layers * LENGTH
        assert keys + layers * important <= counters["ssd_tokens"] <= 2 * keys
        packs = result.trace.bytes["ssd"] / pack
        assert layers * (CHUNKS + 1) <= packs <= 2 * layers * CHUNKS


@pytest.mark.parametrize(
    "system", [*[pytest.param(name, marks=pytest.mark.slow) for name in BASELINES[:2]], "impress"]
)
def test_a_warm_engine_compiles_nothing(tmp_path: Path, system: str) -> None:
    with small_engine(
        tmp_path, system=system, model=MODEL, nothing_compiled=True, **COLD
    ) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        engine.warmup(prefix, max_suffix=16, budgets=[0.1, 0.3])
        before = compilations()
        for seed, (budget, length) in enumerate([(0.1, 3), (0.3, 16), (0.1, 9)]):
            ask(engine, prefix, budget, tokens(length, 20 + seed))
        assert compilations() == before


def test_batch_equals_one_by_one(served: tuple[Engine, Prefix]) -> None:
    engine, prefix = served
    requests = [
        Request(prefix=prefix, suffix=tokens(3 + i, 30 + i), budget=(0.05, 0.2)[i]) for i in (0, 1)
    ]
    together = engine.reprefill(requests)
    for request, batched in zip(requests, together, strict=True):
        (alone,) = engine.reprefill([request])
        assert scale_error(batched.logits, alone.logits) < 1e-4
        assert batched.trace.attention_mass == pytest.approx(alone.trace.attention_mass, abs=1e-4)


def test_an_unreadable_store_costs_time_and_no_accuracy(served: tuple[Engine, Prefix]) -> None:
    engine, prefix = served
    expected = ask(engine, prefix, 0.25)
    with engine.variant(engine.config, store=UnsteadyStore(engine.store, 0.5)) as other:
        result = ask(other, prefix, 0.25)
    assert result.trace.counters["recomputed_packs"] > 0
    assert scale_error(result.logits, expected.logits) < 1e-4


@pytest.mark.parametrize("system", BASELINES)
def test_answers_do_not_depend_on_cache_or_prefetch(tmp_path: Path, system: str) -> None:
    preset = SYSTEMS[system]
    answers = []
    with small_engine(tmp_path, system=system, model=MODEL, **COLD) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        answers.append(ask(engine, prefix, 0.1).logits)
        alone = dataclasses.replace(preset, prefetch="none")
        for config in (
            dataclasses.replace(engine.config, system=alone),
            dataclasses.replace(engine.config, device_cache_bytes=2**20, io_threads=1),
        ):
            with engine.variant(config) as other:
                for _ in range(2):
                    result = ask(other, prefix, 0.1)
                    answers.append(result.logits)
        assert result.trace.bytes["device"] > 0
        assert result.trace.counters["ssd_tokens"] == 0
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


def test_cache_score_is_frequency_times_the_share_of_important_tokens(tmp_path: Path) -> None:
    with small_engine(tmp_path, system="impress", model=MODEL) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        for _ in range(2):
            ask(engine, prefix, 0.1)
    with small_engine(tmp_path, system="impress", model=MODEL) as engine:
        scores = engine.store.load_scores(prefix.spans[0].segment_id)
    assert scores is not None
    importance, frequency = scores
    values = slice(1, None, 2)  # every second group holds values: 25 important tokens per layer
    np.testing.assert_allclose(importance[values].sum(axis=1), 25 / 64)
    assert frequency.max() == 2
    assert ((importance <= 1) & (importance[...] >= 0)).all()


@pytest.mark.parametrize("system", ["as-lru", "as-h2o-lru", "impress"])
def test_packs_that_are_cached_never_take_the_room_of_the_layer_that_computes(
    tmp_path: Path, system: str
) -> None:
    """AttentionStore asks for layers ahead: what is cached of those is kept for them."""
    with small_engine(
        tmp_path, system=system, model=dataclasses.replace(TINY, num_layers=3)
    ) as one:
        prefix, pack = one.ingest(tokens(512)), one.layout.pack_bytes
        small = dataclasses.replace(  # keys or values of a layer have 16 packs, the pool 28
            one.config, device_cache_bytes=14 * pack, prefetch_device_bytes=14 * pack,
            host_cache_bytes=33 * pack,
        )  # fmt: skip
        with one.variant(small) as warm:
            for seed in range(4):
                expected, got = (ask(e, prefix, 0.25, tokens(16, seed)) for e in (one, warm))
                np.testing.assert_array_equal(got.logits, expected.logits)
        assert got.trace.bytes["device"] + got.trace.bytes["host"], "it is warm"
