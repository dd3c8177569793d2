"""A reordered prefix that cannot be read is computed again, each token where it was stored."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import SMALL, TIGHT, scale_error, small_engine, tokens
from numpy_qwen import NumpyQwen

from ckv_jax import Engine, Request, Result
from ckv_jax.baselines.reordering import reordered
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.prefix import Prefix

MODEL = dataclasses.replace(
    SMALL, num_layers=3, num_heads=8, num_kv_heads=4, tie_word_embeddings=False
)
"""Of sharp attention, so that a token that is missing changes the answer."""
LENGTH, CHUNKS = 250, 4
COLD = {"device_cache_bytes": 0, "host_cache_bytes": 0}


def ask(engine: Engine, prefix: Prefix, budget: float) -> Result:
    request = Request(prefix=prefix, suffix=tokens(9, 1), budget=budget)
    (result,) = engine.reprefill([request])
    result.raise_for_error()
    return result


def reordered_segments(engine: Engine, folder: Path) -> list[Path]:
    """Folders of the segments that hold a mapping list."""
    layout = reordered(engine.layout)
    stored = engine.store.longest_prefix(
        tokens(LENGTH), fingerprint=engine.fingerprint, layout=layout
    )
    assert stored.num_tokens == LENGTH
    with engine.store.reader(stored) as reader:
        orders = {tuple(order) for order in reader.order.tolist()}
        assert len(orders) == MODEL.num_layers  # a layer has its own
    ids = [span.segment_id for span in stored.spans]
    return [folder / "segments" / id_[:2] / id_ for id_ in ids]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Engine, Prefix]]:
    """An engine that serves the prefix from its reordered segments."""
    NumpyQwen(MODEL, seed=3).save(tmp_path / "model")
    weights = load_pretrained(tmp_path / "model", dtype="float32")
    store = tmp_path / "store"
    with small_engine(store, system="impress", weights=weights, **COLD) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        for _ in range(6):
            ask(engine, prefix, 0.1)
        engine.settle()
        ask(engine, prefix, 0.1)
        yield engine, prefix


@pytest.mark.parametrize("lost", [("packs",), ("packs", "probe")], ids=" and ".join)
def test_reads_that_all_fail(
    served: tuple[Engine, Prefix], tmp_path: Path, lost: tuple[str, ...]
) -> None:
    engine, prefix = served
    sparse = ask(engine, prefix, 0.1)
    assert not sparse.trace.counters.get("recomputed_packs")
    shards = [
        shard
        for home in reordered_segments(engine, tmp_path / "store")
        for array in lost
        for shard in home.glob(f"{array}/c.*")
    ]
    assert shards
    for shard in shards:  # the manifest, and with it the order, is still there
        os.truncate(shard, 0)
    again = ask(engine, prefix, 0.1)
    assert again.trace.counters["recomputed_packs"] > 0
    assert scale_error(again.logits, sparse.logits) < TIGHT
    full = ask(engine, prefix, 1.0)
    assert scale_error(full.logits, engine.recompute(full.request).logits) < TIGHT


def test_reads_of_the_first_chunk_alone_fail(served: tuple[Engine, Prefix], tmp_path: Path) -> None:
    """Its tokens are not those that came first, and the other chunks lie as they were stored:
    without the mapping list some tokens would be there twice and others not at all."""
    engine, prefix = served
    before = [ask(engine, prefix, budget) for budget in (0.1, 1.0)]
    layout = engine.layout
    [home] = reordered_segments(engine, tmp_path / "store")
    for shard in home.glob("packs/c.*"):
        data = bytearray(shard.read_bytes())
        for group in range(min(layout.shard_groups, len(data) // (CHUNKS * layout.pack_bytes))):
            data[group * CHUNKS * layout.pack_bytes] ^= 1
        shard.write_bytes(data)
    for expected in before:
        budget = expected.request.budget
        assert budget is not None
        again = ask(engine, prefix, budget)
        recomputed = again.trace.counters["recomputed_packs"]
        assert 0 < recomputed <= layout.groups  # of the first chunk, in each group
        assert scale_error(again.logits, expected.logits) < TIGHT
