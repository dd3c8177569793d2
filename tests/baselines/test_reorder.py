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
from ckv_jax.baselines.impress import REORDER_EVERY, Impress
from ckv_jax.baselines.reordering import AverageImportance, reordered
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
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


def order_of(engine: Engine) -> np.ndarray:
    with engine.store.reader(stored(engine)) as reader:
        return reader.order


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


def test_importance_is_averaged_by_layer_in_original_positions() -> None:
    average = AverageImportance(2, 4)
    average.add([np.array([8.0, 0, 2, 0, 9]), np.array([0, 0.3, 0.1, 0])], None)
    order = np.array([[3, 0, 1, 2], [0, 1, 2, 3]])
    average.add([np.array([1.0, 0, 0, 0]), np.array([0, 0, 1.0, 0])], order)
    np.testing.assert_array_equal(average.order(0, 4), [[3, 0, 2, 1], [2, 1, 0, 3]])
    np.testing.assert_array_equal(average.order(2, 4), [[1, 0], [0, 1]])


def test_a_store_with_one_order_for_all_layers_opens(tmp_path: Path) -> None:
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "chunk_tokens": 16}
    old = Layout(**shape, pack_layers=1, kv_together=False, probe="none", reordered=True)
    new = dataclasses.replace(old, layer_orders=True)
    assert old.to_dict()["version"] == 2 and "layer_orders" not in old.to_dict()
    assert Layout.from_dict(new.to_dict()) == new and new.to_dict()["version"] == 7
    rng = np.random.default_rng(0)
    text = rng.integers(0, 99, 40).astype(np.int32)
    kv = rng.normal(size=(3, 2, 40, 2, 8)).astype(new.numpy_dtype)
    orders = np.stack([rng.permutation(40) for _ in range(3)])
    made = Fingerprint({"weights": "some"})
    with ChunkStore.open(tmp_path) as store:
        for layout, order in ((old, orders[0]), (new, orders)):
            by_layer = np.broadcast_to(order, (3, 40))
            with store.writer(fingerprint=made, layout=layout, tokens=text, order=order) as writer:
                writer.write(0, np.take_along_axis(kv, by_layer[:, None, :, None, None], axis=2))
                writer.commit()
        with pytest.raises(ValueError, match="order"):
            store.writer(fingerprint=made, layout=new, tokens=text, order=orders[0])
    with ChunkStore.open(tmp_path) as store:
        for layout, order in ((old, orders[0]), (new, orders)):
            found = store.longest_prefix(text, fingerprint=made, layout=layout)
            assert found.num_tokens == 40
            with store.reader(found) as reader:
                by_layer = np.broadcast_to(order, (3, 40))
                np.testing.assert_array_equal(reader.order, by_layer)
                out = np.empty((3, *layout.pack_shape), layout.numpy_dtype)
                for group in range(layout.groups):
                    assert reader.read_packs(group, np.arange(3), out).all()
                    rows = out.reshape(-1, 2, 8)[:40]
                    layer, kind = divmod(group, 2)
                    np.testing.assert_array_equal(rows, kv[layer, kind, by_layer[layer]])


def test_a_number_of_requests_is_asked_for() -> None:
    with pytest.raises(ValueError, match="reorder_every"):
        Impress(reorder_every=-1)


def test_a_segment_of_one_token_is_in_order(tmp_path: Path) -> None:
    layout = Layout(
        num_layers=3, num_kv_heads=2, head_dim=8, chunk_tokens=16, pack_layers=1,
        kv_together=False, probe="none",
    )  # fmt: skip
    text = np.arange(17, dtype=np.int32)
    kv = np.random.default_rng(0).normal(size=(3, 2, 17, 2, 8)).astype(layout.numpy_dtype)
    made, prefix = Fingerprint({"weights": "some"}), None
    with ChunkStore.open(tmp_path) as store:
        for start, end in ((0, 16), (16, 17)):
            with store.writer(
                fingerprint=made, layout=layout, tokens=text[start:end], parent=prefix
            ) as writer:
                writer.write(0, kv[:, :, start:end])
                prefix = writer.commit()
    average = AverageImportance(3, 17)
    average.add([np.arange(17, 0, -1.0)] * 3, None)
    assert average.settled(np.tile(np.arange(17), (3, 1)), prefix)
    assert not average.settled(np.tile(np.r_[np.arange(15, -1, -1), 16], (3, 1)), prefix)
