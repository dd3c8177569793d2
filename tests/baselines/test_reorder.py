"""IMPRESS's reordering: again and again, by layer, with what the caches know carried over."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from engine_support import SMALL, TIGHT, scale_error, small_engine, tokens
from numpy_qwen import NumpyQwen

from ckv_jax import Engine, Request, Result
from ckv_jax.baselines.impress import REORDER_EVERY
from ckv_jax.baselines.reordering import reordered
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.verify import verify_store

MODEL = dataclasses.replace(
    SMALL, num_layers=3, num_heads=8, num_kv_heads=4, tie_word_embeddings=False
)
LENGTH = 250


def ask(engine: Engine, prefix: Prefix, seed: int, budget: float = 0.1) -> Result:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=tokens(9, seed), budget=budget)])
    result.raise_for_error()
    return result


def stored(engine: Engine) -> Prefix:
    return engine.store.longest_prefix(
        tokens(LENGTH), fingerprint=engine.fingerprint, layout=reordered(engine.layout)
    )


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    NumpyQwen(MODEL, seed=3).save(tmp_path / "model")
    weights = load_pretrained(tmp_path / "model", dtype="float32")
    return small_engine(tmp_path / "store", system="impress", weights=weights)


def test_it_is_repeated_and_answers_stay(engine: Engine) -> None:
    with engine:
        prefix = engine.ingest(tokens(LENGTH))
        asked = [ask(engine, prefix, 1) for _ in range(REORDER_EVERY)]
        engine.settle()
        first = stored(engine)
        assert first.num_tokens == LENGTH
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
