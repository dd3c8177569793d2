"""Outliers, which are always attended to beside a selection."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_sharp import COLD, MODEL, POOL_BYTES, Sharp
from engine_support import TIGHT, scale_error, tokens
from heads_oracle import HEADS, Oracle
from pipeline_support import UnsteadyStore
from segment_support import hurt, segment_folder

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.decoding import HoldNothing, SelectFirst, decoding, heads_apart, lfu, lru
from ckv_jax.baselines.shadowkv import Outliers
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.decode.eviction import Keep
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

pytestmark = pytest.mark.slow

LENGTH = 12
# With keys as they are: those of low rank are in baselines/test_own_attention.py.
ODD = dataclasses.replace(
    SYSTEMS["shadowkv"], always=Outliers(0.125),
    own=OwnParts(layout=heads_apart, decoding=decoding(SelectFirst, keep=lru)),
)  # fmt: skip
BUDGET = 0.2


def own(kind: type[SelectFirst], keep: Keep) -> OwnParts:
    return OwnParts(layout=heads_apart, decoding=decoding(kind, keep=keep))


def values(system: SystemConfig, **more: object) -> dict[str, object]:
    return {f.name: getattr(system, f.name) for f in dataclasses.fields(system)} | more


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), system=values(ODD)) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(250 - 20 * i, i)) for i in range(2)]


def asked(prefixes: list[Prefix], budget: float = BUDGET) -> list[Request]:
    """Three rows, two of them on one prefix."""
    return [
        Request(prefix=one, suffix=tokens(7, 40 + i).tolist(), budget=budget)
        for i, one in enumerate((prefixes[0], prefixes[0], prefixes[-1]))
    ]


def told(engine: Engine, requests: list[Request]) -> list[np.ndarray]:
    """Keys and values of all that each text computed, which every attention has been through."""
    texts = engine.generate(requests, SamplingParams(max_tokens=LENGTH), keep_kv=True).results()
    for text in texts:
        text.raise_for_error()
    return [np.asarray(text.completion().kv) for text in texts]


def variant(engine: Engine, failing: float = 0.0, **config: object) -> Engine:
    system = {name: config.pop(name) for name in ("window", "own") if name in config}
    assert isinstance(engine.config.system, SystemConfig)
    changed = dataclasses.replace(engine.config.system, **system)  # type: ignore[arg-type]
    room = POOL_BYTES - int(str(config.get("device_cache_bytes", 2**20)))
    settings = dataclasses.replace(
        engine.config, system=changed, **({"prefetch_device_bytes": room} | config)  # type: ignore[arg-type]
    )  # fmt: skip
    return engine.variant(settings, store=UnsteadyStore(engine.store, failing))


@pytest.mark.parametrize("length", [250, 256], ids=["part of a chunk", "whole chunks"])
def test_a_text_is_that_of_numpy(sharp: Sharp, tmp_path: Path, length: int) -> None:
    with sharp.fresh(tmp_path, system=values(ODD)) as engine:
        prefix = engine.ingest(tokens(length, 5))
        request = Request(prefix=prefix, suffix=tokens(7, 41).tolist(), budget=BUDGET)
        [text] = engine.generate(request, SamplingParams(max_tokens=LENGTH), keep_kv=True).results()
        selected = engine.last_selection(prefix)
        oracle = Oracle(sharp.model, engine, prefix, budget=BUDGET, outliers=4)  # of 32
    oracle.step(tokens(7, 41))
    for token in text.token_ids:
        oracle.step(np.array([token]))
    found = np.asarray(text.completion().kv)
    for layer, (keys, rows) in enumerate(oracle.own):
        assert scale_error(found[layer, 0, : len(keys)], keys) < TIGHT
        assert scale_error(found[layer, 1, : len(keys)], rows) < TIGHT
    assert len(selected) == len(oracle.ids) == MODEL.num_layers * HEADS
    for mine, theirs in zip(selected, oracle.ids, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("config", "failing"),
    [
        ({"window": 4.0, "own": OwnParts(layout=heads_apart)}, 0.0),
        ({"own": own(HoldNothing, lru), "device_cache_bytes": 0}, 0.1),
        ({"own": own(SelectFirst, lfu), "device_cache_bytes": 0, "host_cache_bytes": 0}, 0.2),
    ],
)
def test_logits_are_the_same_bits_whatever_is_kept_where(
    engine: Engine, prefixes: list[Prefix], config: dict[str, object], failing: float
) -> None:
    plain = told(engine, asked(prefixes))
    with variant(engine, failing, **config) as other:
        for mine, theirs in zip(plain, told(other, asked(prefixes)), strict=True):
            assert (mine == theirs).all()


def test_a_budget_of_one_has_nothing_beside_it(engine: Engine, prefixes: list[Prefix]) -> None:
    """Also in a batch with a text that has outliers."""
    [alone] = told(engine, asked(prefixes, 1.0)[:1])
    assert isinstance(engine.config.system, SystemConfig)
    request = asked(prefixes, 1.0)[0]
    [result] = engine.reprefill([request])
    dense = engine.recompute(request)
    assert scale_error(np.asarray(result.logits), np.asarray(dense.logits)) < TIGHT
    both = told(engine, [request, asked(prefixes)[1]])
    assert scale_error(both[0], alone) < TIGHT


def test_texts_together_say_what_each_says_alone(engine: Engine, prefixes: list[Prefix]) -> None:
    """On two prefixes, and on one, where three rows are filled up to four that select."""
    for some in (prefixes, prefixes[:1]):
        requests = asked(some)
        for request, together in zip(requests, told(engine, requests), strict=True):
            [alone] = told(engine, [request])
            assert scale_error(together, alone) < TIGHT


def test_a_lost_digest_is_made_again(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, system=values(ODD), **COLD) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [expected] = told(engine, asked([prefix])[:1])
        with engine.variant(engine.config) as other:
            (path,) = segment_folder(tmp_path, prefix).glob("digest/c.*")
            hurt(path, 9)
            texts = other.generate(
                asked([prefix])[:1], SamplingParams(max_tokens=LENGTH), keep_kv=True
            ).results()
        assert texts[0].trace.counters["recomputed_probes"] == MODEL.num_layers
        assert scale_error(np.asarray(texts[0].completion().kv), expected) < TIGHT
