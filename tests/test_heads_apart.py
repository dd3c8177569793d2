"""Every KV head selects for itself: what it attends to, and that nothing else decides about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_sharp import MODEL, POOL_BYTES, Sharp
from engine_support import TIGHT, check_kv, kept_kv, scale_error, tokens
from greedy import greedy_tokens
from heads_oracle import Oracle
from pipeline_support import UnsteadyStore
from transformers import AutoModelForCausalLM

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.decoding import HoldNothing, SelectFirst, decoding, heads_apart, lfu, lru
from ckv_jax.baselines.kvdrive import NearMisses
from ckv_jax.baselines.window_widths import ProfiledSelections
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.decode.selection import DecodeSelection
from ckv_jax.decode.window import Keep, lookahead
from ckv_jax.selection.select import NOTHING, Coarse, Select
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

pytestmark = pytest.mark.slow

BUDGET = 0.2
LENGTH = 20
CHUNK = 16
HEADS = MODEL.num_kv_heads
KVDRIVE = SYSTEMS["kvdrive"]
BY_POSITION = dataclasses.replace(
    KVDRIVE, own=OwnParts(layout=heads_apart, decoding=ProfiledSelections), always=NOTHING,
    window=2.0,
)  # fmt: skip
SHARED = dataclasses.replace(
    BY_POSITION, period=4, subperiod=2, pack_layers=2, decode=Select(queries=3)
)
"""Layers share selections, and tokens: each head's own."""


def own(kind: type[DecodeSelection], keep: Keep) -> tuple[type[DecodeSelection], Keep]:
    """A decode of the baselines', over packs of the engine's own system."""
    return kind, keep


@pytest.fixture(scope="module", params=["kvdrive", "shared"])
def engine(
    sharp: Sharp, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    system = KVDRIVE if request.param == "kvdrive" else SHARED
    with sharp.fresh(tmp_path_factory.mktemp("store"), system=system) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(250 - 20 * i, i)) for i in range(2)]


def asked(prefixes: list[Prefix], budget: float = BUDGET) -> list[Request]:
    """Three rows, two of them on one prefix."""
    return [
        Request(prefix=prefixes[i // 2], suffix=tokens(7, 40 + i).tolist(), budget=budget)
        for i in range(3)
    ]


told = partial(kept_kv, max_tokens=LENGTH)


@pytest.fixture(scope="module")
def plain(engine: Engine, prefixes: list[Prefix]) -> list[np.ndarray]:
    return told(engine, asked(prefixes))


def variant(engine: Engine, failing: float = 0.0, **config: object) -> Engine:
    names = ("window", "own", "decode")
    system = {name: config.pop(name) for name in names if name in config}
    assert isinstance(engine.config.system, SystemConfig)
    if "own" in system:
        kind, keep = system["own"]  # type: ignore[misc]
        system["own"] = dataclasses.replace(engine.system.own, decoding=decoding(kind, keep=keep))
    changed = dataclasses.replace(engine.config.system, **system)  # type: ignore[arg-type]
    room = POOL_BYTES - int(str(config.get("device_cache_bytes", 2**20)))
    values: dict[str, object] = {"prefetch_device_bytes": room} | config
    settings = dataclasses.replace(engine.config, system=changed, **values)  # type: ignore[arg-type]
    return engine.variant(settings, store=UnsteadyStore(engine.store, failing))


@pytest.mark.parametrize(
    ("config", "failing"),
    [
        ({"window": 1.0}, 0.0),
        ({"own": own(HoldNothing, lru), "device_cache_bytes": 0}, 0.1),
        ({"own": own(SelectFirst, lfu), "device_cache_bytes": 0, "host_cache_bytes": 0}, 0.0),
        ({"window": 1.5, "own": own(NearMisses, lookahead), "host_cache_bytes": 2**15}, 0.2),
    ],
)
def test_logits_are_the_same_bits_whatever_is_kept_where(
    engine: Engine,
    prefixes: list[Prefix],
    plain: list[np.ndarray],
    config: dict[str, object],
    failing: float,
) -> None:
    with variant(engine, failing, **config) as other:
        for _ in range(2):  # cold, then warm
            for mine, theirs in zip(plain, told(other, asked(prefixes)), strict=True):
                assert (mine == theirs).all()
        assert other.stats().pinned_packs == other.stats().running == 0


def test_greedy_equals_transformers(
    engine: Engine, prefixes: list[Prefix], sharp: Sharp, tmp_path: Path
) -> None:
    sharp.model.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    requests = [
        Request(prefix=prefixes[i], suffix=tokens(7, seed).tolist(), budget=1.0)
        for i, seed in ((0, 43), (0, 56), (1, 40))
    ]
    texts = engine.generate(requests, SamplingParams(max_tokens=LENGTH)).results()
    for request, text in zip(requests, texts, strict=True):
        assert isinstance(request.prefix, Prefix) and request.suffix is not None
        prompt = [*request.prefix.tokens.tolist(), *request.suffix]
        assert text.token_ids.tolist() == greedy_tokens(theirs, prompt, LENGTH)


@pytest.mark.parametrize("system", [BY_POSITION, KVDRIVE], ids=["position", "alike"])
def test_every_head_selects_its_own_best(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    with sharp.fresh(tmp_path, system=system) as engine:
        prefix = engine.ingest(tokens(250, 5))
        request = Request(prefix=prefix, suffix=tokens(7, 41).tolist(), budget=BUDGET)
        sampling = SamplingParams(max_tokens=LENGTH)
        [text] = engine.generate(request, sampling, keep_kv=True).results()
        selected = engine.last_selection(prefix)
        oracle = Oracle(sharp.model, engine, prefix, budget=BUDGET)
    oracle.step(tokens(7, 41))
    for token in text.token_ids:
        oracle.step(np.array([token]))
    check_kv(text, oracle.own)
    assert len(selected) == len(oracle.ids) == MODEL.num_layers * HEADS
    by_layer = np.array(oracle.ids).reshape(MODEL.num_layers, HEADS, -1)
    assert (by_layer[:, 0] != by_layer[:, 1]).any(axis=1).all()  # or nothing would be shown
    for mine, theirs in zip(selected, oracle.ids, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("system", [BY_POSITION, KVDRIVE], ids=["position", "alike"])
def test_what_continues_a_text_stands_on_all_of_it(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    """Stored by ingest, and as a text that was generated: its last chunk is not whole."""
    with sharp.fresh(tmp_path, system=system) as engine:
        first = engine.ingest(tokens(250))
        longer = engine.ingest(np.concatenate([tokens(250), tokens(150, 7)]))
        assert len(longer.spans) == 2
        request = Request(prefix=first, suffix=tokens(7, 41).tolist(), budget=1.0)
        [text] = engine.generate(request, SamplingParams(max_tokens=9), keep_kv=True).results()
        grown = engine.append(text)
        assert grown.num_tokens == 250 + 7 + 9
        for prefix in (longer, grown):
            again = Request(prefix=prefix, suffix=tokens(7, 42).tolist(), budget=1.0)
            dense = engine.recompute(again)
            [result] = engine.reprefill([again])
            assert scale_error(np.asarray(result.logits), np.asarray(dense.logits)) < TIGHT


def test_steady_tokens_are_attended_to_whatever_share_is_asked_for(
    sharp: Sharp, tmp_path: Path
) -> None:
    with sharp.fresh(tmp_path, system=KVDRIVE) as engine:
        prefix = engine.ingest(tokens(250))
        suffix = tokens(7, 41).tolist()
        engine.reprefill([Request(prefix=prefix, suffix=suffix, budget="mass:0.3")])
        selected = engine.last_selection(prefix)
        steady = {0, *range((250 - 64) // CHUNK, prefix.num_chunks)}
        assert all(steady <= set(ids.tolist()) for ids in selected)
        assert len({len(ids) for ids in selected}) > 1  # and some heads took more
        engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=BUDGET)])
        limit = math.ceil(BUDGET * prefix.num_chunks)
        assert {len(ids) for ids in engine.last_selection(prefix)} == {limit + len(steady)}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"digest": "none", "decode": None}, "got digest='none'"),
        ({"digest": "int4"}, "got digest='int4'"),
        ({"chunk_tokens": 6}, "chunk_tokens=6"),
        ({"codec": "int8"}, "codec: got 'int8"),
        ({"reprefill": Select(coarse=Coarse())}, "got 2 selections per period"),
        ({"reprefill": Select(peaks=True)}, "got 2 selections per period"),
        ({"decode": Select(peaks=True)}, "got 2 selections per period"),
        ({"decode": Select(coarse=Coarse())}, "got 2 selections per period"),
    ],
    ids=str,
)
def test_what_heads_cannot_do_apart_is_refused(
    engine: Engine, wrong: dict[str, object], says: str
) -> None:
    system = dataclasses.replace(SYSTEMS["kvdrive"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        engine.variant(dataclasses.replace(engine.config, system=system))
