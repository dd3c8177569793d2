"""IMPRESS's reordering: again and again, by layer, with what the caches know carried over. What
cannot be read is computed again, each token where it was stored."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_support import SMALL, TIGHT, scale_error, small_engine, tokens
from numpy_qwen import NumpyQwen
from segment_support import hurt

from ckv_jax import Engine, Request, Result
from ckv_jax.baselines.impress import REORDER_EVERY
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.verify import verify_store

MODEL = dataclasses.replace(
    SMALL, num_layers=3, num_heads=8, num_kv_heads=4, tie_word_embeddings=False
)
LENGTH, CHUNKS = 250, 4


def ask(engine: Engine, prefix: Prefix, seed: int, budget: float = 0.1) -> Result:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=tokens(9, seed), budget=budget)])
    result.raise_for_error()
    return result


def stored(engine: Engine, ids: np.ndarray | None = None) -> Prefix:
    layout = dataclasses.replace(engine.layout, reordered=True)
    ids = tokens(LENGTH) if ids is None else ids
    return engine.store.longest_prefix(ids, fingerprint=engine.fingerprint, layout=layout)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    NumpyQwen(MODEL, seed=3).save(tmp_path / "model")
    weights = load_pretrained(tmp_path / "model", dtype="float32")
    return small_engine(tmp_path / "store", system="impress", weights=weights)


def check_mapped(engine: Engine, prefix: Prefix, new: Prefix) -> None:
    """The mapping lists of `new`, one for each layer, say where its tokens were in `prefix`."""
    packs = np.empty((2, CHUNKS, *engine.layout.pack_shape), np.float32)
    with engine.store.reader(prefix) as first, engine.store.reader(new) as second:
        assert second.order.shape == (MODEL.num_layers, LENGTH)
        assert len({tuple(order) for order in second.order.tolist()}) == MODEL.num_layers
        for group in range(engine.layout.groups):
            for reader, out in zip((first, second), packs, strict=True):
                assert reader.read_packs(group, np.arange(CHUNKS), out).all()
            old, rows = packs.reshape(2, -1, MODEL.num_kv_heads, MODEL.head_dim)
            np.testing.assert_array_equal(rows[:LENGTH], old[second.order[group // 2]])


@pytest.mark.slow
def test_it_is_repeated_and_answers_stay(engine: Engine) -> None:
    with engine:
        prefix = engine.ingest(tokens(LENGTH))
        asked = [ask(engine, prefix, 1) for _ in range(REORDER_EVERY)]
        engine.settle()
        first = stored(engine)
        assert first.num_tokens == LENGTH
        check_mapped(engine, prefix, first)
        expected = {seed: ask(engine, prefix, seed).logits for seed in (1, 2)}
        assert scale_error(expected[1], asked[0].logits) < TIGHT
        usage, spans = engine.store.usage(), [first.spans]
        for _ in range(8):  # another question, that other tokens matter to
            for _ in range(REORDER_EVERY):
                ask(engine, prefix, 2)
            engine.settle()
            spans.append(stored(engine).spans)
        changed = [old != new for old, new in itertools.pairwise(spans)]
        assert changed[0] and not all(changed)  # what is in order, nearly, is not written again
        assert abs(engine.store.usage() - usage) < 100  # older orders are gone; a time is written
        for seed, logits in expected.items():
            assert scale_error(ask(engine, prefix, seed).logits, logits) < TIGHT
        full = ask(engine, prefix, 1, budget=1.0)
        assert scale_error(full.logits, engine.recompute(full.request).logits) < TIGHT
        assert verify_store(engine.store).ok


def test_an_order_that_another_prefix_is_served_from_stays(engine: Engine) -> None:
    """The longer of two prefixes is written again, and shares the shorter one's segment."""

    def ask_often(prefix: Prefix, seed: int) -> Prefix:
        for _ in range(REORDER_EVERY + 1):
            ask(engine, prefix, seed)
        engine.settle()
        ask(engine, prefix, seed)
        return stored(engine, prefix.tokens)

    with engine:
        shorter, longer = engine.ingest(tokens(LENGTH)[:128]), engine.ingest(tokens(LENGTH))
        served, first = ask_often(shorter, 1), ask_often(longer, 1)
        assert first.spans[:1] == served.spans and len(first.spans) == 2
        for _ in range(8):
            again = ask_often(longer, 2)
        assert again.spans != first.spans
        with engine.store.reader(served) as reader:
            packs = np.empty((2, *engine.layout.pack_shape), np.float32)
            assert reader.read_packs(0, np.arange(2), packs).all()


def test_scores_and_cached_slots_are_carried_over(engine: Engine) -> None:
    with engine:
        prefix = engine.ingest(tokens(LENGTH))
        for _ in range(REORDER_EVERY - 1):
            ask(engine, prefix, 1)
        tiers, prefixes = engine.worker.memory.tiers, engine.worker.prefixes
        cached = tiers.device_pages + tiers.host_pages
        before = tiers.history(prefixes.known(prefix).all_pages())
        ask(engine, prefix, 1)
        engine.settle()
        assert tiers.device_pages + tiers.host_pages == cached > 0
        again = ask(engine, prefix, 1)
        assert again.trace.bytes["ssd"] == 0  # nothing has to be read anew
        new = prefixes.known(stored(engine))
        every = np.arange(new.num_chunks)
        for group in range(prefix.layout.groups):
            importance, frequency = tiers.history(new.pages(group, every))
            old = before[0][group * len(every) : (group + 1) * len(every)]
            weights = new.chunk_lengths / LENGTH
            assert frequency.min() >= 1
            # The mean over tokens is what it was, but for the request after.
            assert (importance @ weights) == pytest.approx(old @ weights, rel=0.35, abs=0.02)


def test_averages_are_of_the_latest_prefixes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckv_jax.baselines.reordering.MOST_KNOWN", 2)
    with engine:
        prefixes = [engine.ingest(tokens(LENGTH, seed)) for seed in range(3)]
        for which in (0, 1, 0, 2):
            ask(engine, prefixes[which], 1)
        known = engine.worker.executor._reorderer._known  # type: ignore[attr-defined]
        assert list(known) == [prefixes[0].id, prefixes[2].id]


@pytest.mark.slow
def test_an_order_that_another_engine_gave_up_is_looked_up_again(engine: Engine) -> None:
    config = dataclasses.replace(engine.config, device_cache_bytes=0, host_cache_bytes=0)
    with engine, engine.variant(config) as other:
        prefix = engine.ingest(tokens(LENGTH))
        for _ in range(REORDER_EVERY):
            expected = ask(engine, prefix, 1).logits
        engine.settle()
        ask(other, prefix, 1)
        served = stored(engine)
        for _ in range(8):
            for _ in range(REORDER_EVERY):
                ask(engine, prefix, 2)
            engine.settle()
        assert stored(engine).spans != served.spans  # and what `other` knows of is gone
        assert scale_error(ask(other, prefix, 1).logits, expected) < TIGHT


def reordered_segments(engine: Engine, folder: Path) -> list[Path]:
    """Folders of the segments that hold a mapping list."""
    ids = [span.segment_id for span in stored(engine).spans]
    assert ids
    return [folder / "segments" / id_[:2] / id_ for id_ in ids]


@pytest.fixture
def served(engine: Engine) -> Iterator[tuple[Engine, Prefix]]:
    """An engine without caches that serves the prefix from its reordered segments."""
    config = dataclasses.replace(engine.config, device_cache_bytes=0, host_cache_bytes=0)
    with engine, engine.variant(config) as cold:
        prefix = cold.ingest(tokens(LENGTH))
        read = [ask(cold, prefix, 1).trace.counters["ssd_tokens"] for _ in range(6)]
        cold.settle()
        assert ask(cold, prefix, 1).trace.counters["ssd_tokens"] <= read[0]
        yield cold, prefix


def test_reads_that_all_fail(served: tuple[Engine, Prefix], tmp_path: Path) -> None:
    engine, prefix = served
    sparse = ask(engine, prefix, 1)
    assert not sparse.trace.counters.get("recomputed_packs")
    homes = reordered_segments(engine, tmp_path / "store")
    for shard in [
        one for home in homes for one in (*home.glob("packs/c.*"), *home.glob("probe/c.*"))
    ]:
        os.truncate(shard, 0)  # the manifest, and with it the order, is still there
    again = ask(engine, prefix, 1)
    assert again.trace.counters["recomputed_packs"] > 0
    assert scale_error(again.logits, sparse.logits) < TIGHT
    full = ask(engine, prefix, 1, 1.0)
    assert scale_error(full.logits, engine.recompute(full.request).logits) < TIGHT


def test_reads_of_the_first_chunk_alone_fail(served: tuple[Engine, Prefix], tmp_path: Path) -> None:
    """Its tokens are not those that came first, and the other chunks lie as they were stored:
    without the mapping list some tokens would be there twice and others not at all."""
    engine, prefix = served
    before = [ask(engine, prefix, 1, budget) for budget in (0.1, 1.0)]
    layout = engine.layout
    [home] = reordered_segments(engine, tmp_path / "store")
    for shard in home.glob("packs/c.*"):
        size = CHUNKS * layout.pack_bytes
        for group in range(min(layout.shard_groups, shard.stat().st_size // size)):
            hurt(shard, group * size)
    for expected in before:
        budget = expected.request.budget
        assert budget is not None
        again = ask(engine, prefix, 1, budget)
        recomputed = again.trace.counters["recomputed_packs"]
        assert 0 < recomputed <= layout.groups  # of the first chunk, in each group
        assert scale_error(again.logits, expected.logits) < TIGHT
