"""IMPRESS in a batch of which one row's probe heads disagree: nobody's answer changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from engine_support import SMALL, TIGHT, scale_error, small_engine, tokens
from numpy_qwen import NumpyQwen

from ckv_jax import Engine, Request
from ckv_jax.identity import random_fingerprint
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

MODEL = dataclasses.replace(
    SMALL,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    tie_word_embeddings=False,
)
ODD = 127
"""A token whose embedding is zero: its queries are biases alone, another one in every head."""
BUDGET = 0.1


def agreeing_heads() -> NumpyQwen:
    """All heads look for the same, but for biases that only the odd token shows."""
    model = NumpyQwen(MODEL, seed=8)
    model.weights["model.embed_tokens.weight"][ODD] = 0
    for layer in range(MODEL.num_layers):
        for name in "qk":
            proj = f"model.layers.{layer}.self_attn.{name}_proj"
            heads = model.weights[f"{proj}.weight"].reshape(4, MODEL.head_dim, -1)
            heads[:] = heads[0]
            model.weights[f"{proj}.bias"] *= 1e-2 if name == "q" else 0
    return model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("fallback")
    with small_engine(folder / "unused", system="impress", model=MODEL) as unused:
        config = dataclasses.replace(unused.config, device_cache_bytes=0, host_cache_bytes=0)
    agreeing_heads().save(folder / "model")
    model = load_pretrained(folder / "model", dtype="float32")
    store = ChunkStore.open(folder / "store")
    with Engine(model, None, store, random_fingerprint(model), config) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(np.where(tokens(250) == ODD, 0, tokens(250)))


def test_one_row_falls_back(engine: Engine, prefix: Prefix) -> None:
    requests = [
        Request(prefix=prefix, suffix=suffix, budget=BUDGET) for suffix in ([5, 9, 2], [ODD])
    ]
    alone = [engine.reprefill([request])[0] for request in requests]
    agreed = [result.trace.counters.get("layers_agreed", 0) for result in alone]
    assert agreed[0] == MODEL.num_layers
    assert agreed[1] < MODEL.num_layers, "the odd row's heads agree as well"
    together = engine.reprefill(requests)
    for batched, single in zip(together, alone, strict=True):
        assert scale_error(batched.logits, single.logits) < TIGHT
    odd, other = together[1], together[0]
    assert odd.trace.attention_mass == pytest.approx(alone[1].trace.attention_mass, abs=1e-4)
    assert 0 < odd.trace.attention_mass < 1 and 0 < other.trace.attention_mass < 1
