"""Systems that attend in their own way: Quest's dense layers, RetroInfer's estimation zone and
ShadowKV's keys of low rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from engine_sharp import COLD, MODEL, Sharp
from engine_support import (
    TIGHT,
    check_alone,
    check_kv,
    kept_kv,
    scale_error,
    small_engine,
    tokens,
)  # fmt: skip
from engine_tiny import TINY
from heads_oracle import HEADS, Oracle
from segment_support import hurt, segment_folder

from ckv_jax import Request, SamplingParams
from ckv_jax.baselines import decoding as shared
from ckv_jax.baselines.decoding import Seen, decoding, heads_apart, lru
from ckv_jax.baselines.quest import DENSE_LAYERS, DenseFirst
from ckv_jax.baselines.retroinfer import next_best
from ckv_jax.baselines.shadowkv import Outliers, Rebuilt, by_rebuilt
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.layers import over_pages_and_rows
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.storage.layout import PLAIN
from ckv_jax.systems import SYSTEMS

LENGTH = 12
BUDGET = 0.2
# Dense layers are no matter of the index: here that of the oracle.
DENSE = dataclasses.replace(
    SYSTEMS["quest"], digest="means+cosines", always=Outliers(0.125),
    own=OwnParts(layout=heads_apart, decoding=decoding(DenseFirst, keep=lru)),
)  # fmt: skip
LOW = dataclasses.replace(SYSTEMS["shadowkv"], always=Outliers(0.125))
WIDTH = MODEL.num_kv_heads * MODEL.head_dim
SYSTEMS_OF = {
    "dense": (DENSE, {"outliers": 4, "dense": DENSE_LAYERS}),
    "estimated": (SYSTEMS["retroinfer"], {"estimated": 4}),  # of 16 chunks
    "low rank": (LOW, {"outliers": 4, "rank": WIDTH * 160 // 1024}),
}


def asked(prefix: Any, seed: int = 41, budget: float = BUDGET) -> Request:
    return Request(prefix=prefix, suffix=tokens(7, seed).tolist(), budget=budget)


@pytest.fixture(params=SYSTEMS_OF)
def system(request: pytest.FixtureRequest) -> SystemConfig:
    found: SystemConfig = SYSTEMS_OF[request.param][0]
    return found


@pytest.mark.parametrize("length", [250, 256], ids=["part of a chunk", "whole chunks"])
@pytest.mark.parametrize("name", SYSTEMS_OF)
def test_a_text_is_that_of_numpy(sharp: Sharp, tmp_path: Path, name: str, length: int) -> None:
    system, more = SYSTEMS_OF[name]
    with sharp.fresh(tmp_path, system=system) as engine:
        prefix = engine.ingest(tokens(length, 5))
        [text] = engine.generate(
            asked(prefix), SamplingParams(max_tokens=LENGTH), keep_kv=True
        ).results()
        oracle = Oracle(sharp.model, engine, prefix, budget=BUDGET, **more)
    oracle.step(tokens(7, 41))
    for token in text.token_ids:
        oracle.step(np.array([token]))
    check_kv(text, oracle.own)


def test_a_batch_says_what_each_says_alone(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    """Three of one prefix make a bucket of four, whose padding is the row of the other; and one at
    a budget of 1."""
    with sharp.fresh(tmp_path, system=system) as engine:
        prefixes = [engine.ingest(tokens(250 - 60 * i, i)) for i in range(2)]
        requests = [asked(prefixes[i > 0], 41 + i) for i in range(4)]
        check_alone(engine, [*requests, asked(prefixes[1], 45, 1.0)], max_tokens=LENGTH // 2)


def test_caches_and_failing_reads_change_no_bit(
    sharp: Sharp, tmp_path: Path, system: SystemConfig
) -> None:
    with sharp.fresh(tmp_path, system=system) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [plain] = kept_kv(engine, [asked(prefix)], max_tokens=LENGTH)
        cold = dataclasses.replace(engine.config, **COLD)
        with engine.variant(cold) as other:
            for _ in range(2):
                [found] = kept_kv(other, [asked(prefix)], max_tokens=LENGTH)
                assert (found == plain).all()
            assert other.stats().pinned_packs == 0
        shard = sorted(segment_folder(tmp_path, prefix).glob("packs/c.0.*"))[0]
        hurt(shard, 3 * engine.layout.pack_bytes + 9)  # of the first layer's first head
        with engine.variant(cold) as other:
            [found] = kept_kv(other, [asked(prefix)], max_tokens=LENGTH)
        assert scale_error(found, plain) < TIGHT


def test_a_text_goes_on_over_its_own_segments(sharp: Sharp, tmp_path: Path) -> None:
    """What was generated is selected, estimated and attended to like the prefix."""
    with sharp.fresh(tmp_path, system=SYSTEMS["retroinfer"], segment_tokens=32) as engine:
        prefix = engine.ingest(tokens(150))
        [text] = engine.generate(asked(prefix), SamplingParams(max_tokens=150)).results()
        text.raise_for_error()
    assert text.trace.segments == 2


def test_a_warm_engine_compiles_nothing(tmp_path: Path, system: SystemConfig) -> None:
    """In 16 bits: a CPU has no product of such numbers that is wider than they are."""
    model = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2)
    with small_engine(
        tmp_path, system=system, model=model, nothing_compiled=True, dtype="bfloat16"
    ) as engine:
        prefix = engine.ingest(tokens(250))
        engine.warmup(prefix, max_batch=2, max_suffix=8, budgets=[BUDGET], max_tokens=LENGTH)
        warm = compilations()
        kept_kv(engine, [asked(prefix), asked(prefix, 42)], max_tokens=LENGTH)
        assert compilations() == warm


def test_a_token_says_what_dense_layers_attend_to(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, system=DENSE, **COLD) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [text] = engine.generate(asked(prefix), SamplingParams(max_tokens=4)).results()
        selected = engine.last_selection(prefix)
    packs = sum(len(ids) for ids in selected[DENSE_LAYERS * HEADS :])
    everything = DENSE_LAYERS * HEADS * prefix.num_chunks
    for token in text.trace.tokens:
        assert token.device_hits + token.host_hits + token.ssd_reads == packs + everything
        assert token.ssd_reads >= everything  # nothing is cached
    assert len(selected) == MODEL.num_layers * HEADS


def test_a_pool_without_room_for_a_dense_layer_is_refused(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, system=DENSE) as engine:
        prefix = engine.ingest(tokens(960, 5))
        room = 200 * engine.layout.pack_bytes  # of 240 packs, where a selection takes 28
        small = dataclasses.replace(engine.config, device_cache_bytes=0, prefetch_device_bytes=room)
        with engine.variant(small) as other:
            [text] = other.generate(
                asked(prefix, budget=0.01), SamplingParams(max_tokens=4)
            ).results()
            with pytest.raises(PoolExhausted, match="packs of dense layer 0"):
                text.raise_for_error()


@pytest.mark.parametrize("name", ["estimated", "low rank"])
def test_a_window_that_is_not_held_says_the_same(sharp: Sharp, tmp_path: Path, name: str) -> None:
    """A layer's selection after the other; where not even that fits, it is refused."""
    system = SYSTEMS_OF[name][0]
    with sharp.fresh(tmp_path, system=system) as engine:
        prefix = engine.ingest(tokens(250))
        [expected] = kept_kv(engine, [asked(prefix)], max_tokens=LENGTH)
        selected = max(map(len, engine.last_selection(prefix)))
        size = HEADS * engine.layout.pack_bytes
        for slots in (2 * selected, selected - 1):
            room = dataclasses.replace(
                engine.config, device_cache_bytes=0, host_cache_bytes=0,
                prefetch_device_bytes=slots * size,
            )  # fmt: skip
            with engine.variant(room) as small:
                if slots > selected:
                    [found] = kept_kv(small, [asked(prefix)], max_tokens=LENGTH)
                    assert scale_error(found, expected) < TIGHT
                    continue
                [text] = small.generate(asked(prefix), SamplingParams(max_tokens=4)).results()
                with pytest.raises(PoolExhausted, match="raise device_cache_bytes"):
                    text.raise_for_error()


def test_a_device_has_the_products_of_rebuilt_keys() -> None:
    """In 16 bits, of a 7B model's shape; exact keys would weigh the second token of each chunk."""
    dtype, shape = jnp.bfloat16, (4, 4, 40)
    ones = jnp.ones((*shape, 8, 128), dtype)
    packs = jnp.stack([ones.at[..., 1, :].set(9), ones.at[..., 1, :].set(3)], axis=3)
    slots = jnp.arange(640, dtype=jnp.int32).reshape(shape)
    none, q = jnp.zeros((4, 0, 512), dtype), jnp.ones((4, 1, 28, 128), dtype)

    @jax.jit
    def attend(pages: jax.Array, exact: jax.Array) -> jax.Array:
        seen = by_rebuilt(
            Seen(pages, slots, jnp.full(shape, 8, jnp.int32)), Rebuilt(ones, exact), dtype
        )
        return over_pages_and_rows(
            q, seen.pages, seen.slots, seen.lengths, 0, none, none, jnp.zeros(4, jnp.int32),
            target=Target.here(),
        )  # fmt: skip

    pages = packs.reshape(640, 1, 2, 8, 128)
    for own, expected in ((False, 1.25), (True, 3.0)):
        out = attend(pages, jnp.full(shape, own))
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2)


def test_the_zone_is_what_comes_after_a_selection() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((2, 3, 40)).astype(np.float32)
    ids = np.argsort(-scores, axis=2)[:, :, :5].astype(np.int32)
    ids[0, 0, 3:] = -1
    count = 33
    seen = np.asarray(next_best(jnp.asarray(scores), jnp.asarray(ids), jnp.int32(count)))
    assert (seen.sum(axis=2) == 8).all()  # 23.2% of 33
    for row, head in np.ndindex(2, 3):
        left = [c for c in range(count) if c not in ids[row, head]]
        best = sorted(left, key=lambda c: -scores[row, head, c])[:8]
        assert sorted(best) == np.flatnonzero(seen[row, head]).tolist()
    few = next_best(jnp.asarray(scores), jnp.asarray(ids), jnp.int32(0))
    assert not np.asarray(few).any()


@pytest.mark.parametrize("name", ["estimated", "low rank"])
def test_an_index_is_made_once(
    sharp: Sharp, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch a generation is in; of each layer."""
    made = []
    read = shared._read

    def counted(opened: OpenPrefix, layer: int) -> Any:
        made.append(layer)
        return read(opened, layer)

    monkeypatch.setattr(shared, "_read", counted)
    with sharp.fresh(tmp_path, system=SYSTEMS_OF[name][0]) as engine:
        prefix = engine.ingest(tokens(250, 5))
        for _ in range(2):
            kept_kv(engine, [asked(prefix)], max_tokens=4)
    assert made == [*range(MODEL.num_layers)]


def test_indices_take_no_more_bytes_than_digests_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those in use; what was used last stays longest."""
    made = []

    def make(config: Any, opened: Any, *_: Any) -> np.ndarray:
        made.append(opened.prefix.id)
        return np.zeros(100, np.uint8)

    monkeypatch.setattr(shared, "_read", lambda opened, layer: (None, None))
    layout = SimpleNamespace(pack_layers=1, kv_together=True, codec=PLAIN, num_layers=2)
    layers, prefixes = SimpleNamespace(config=None), SimpleNamespace(digest_budget=600)
    runtime = SimpleNamespace(layout=layout, layers=layers, prefixes=prefixes)
    index = shared.SideIndex(make, cast("Any", SimpleNamespace(runtime=runtime)))
    opened = [
        cast("Any", SimpleNamespace(probe_chunks=4, prefix=SimpleNamespace(
            id=name, spans=[], layout=layout
        )))
        for name in "abcd"
    ]  # fmt: skip
    for one in (*opened[:3], opened[0], opened[3]):
        index.of([one])
    assert made == [*"aabbccdd"]
    index.of(opened[:1])
    assert len(made) == 8, "a was used after b"
    index.of(opened)
    assert made[8:] == ["b", "b"]
    index.of(opened)
    assert len(made) == 10, "all are in use"


@pytest.mark.slow
def test_a_lost_digest_is_made_again(sharp: Sharp, tmp_path: Path) -> None:
    """And at a budget of 1 there is nothing beside a selection."""
    with sharp.fresh(tmp_path, system=LOW, **COLD) as engine:
        prefix = engine.ingest(tokens(250, 5))
        [expected] = kept_kv(engine, [asked(prefix)], max_tokens=LENGTH)
        [whole] = engine.reprefill([asked(prefix, budget=1.0)])
        dense = engine.recompute(asked(prefix, budget=1.0))
        assert scale_error(whole.logits, dense.logits) < TIGHT
        with engine.variant(engine.config) as other:
            (path,) = segment_folder(tmp_path, prefix).glob("digest/c.*")
            hurt(path, 9)
            sampling = SamplingParams(max_tokens=LENGTH)
            [text] = other.generate(asked(prefix), sampling, keep_kv=True).results()
        assert text.trace.counters["recomputed_probes"] == MODEL.num_layers
        assert scale_error(np.asarray(text.completion().kv), expected) < TIGHT
