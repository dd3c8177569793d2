"""IMPRESS where probe heads disagree: every head selects by itself, in that row alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from engine_support import SMALL, TIGHT, compiled_layers, scale_error, small_engine, tokens
from numpy_qwen import NumpyQwen

from ckv_jax import Engine, Request
from ckv_jax.baselines import layerwise
from ckv_jax.baselines.impress import _by_heads_of
from ckv_jax.baselines.layerwise import TokenSelection, _attend_tokens_of, column_sums
from ckv_jax.kernels_pallas.attend import attend_rows
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.prefix import Prefix

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
    agreeing_heads().save(folder / "model")
    model = load_pretrained(folder / "model", dtype="float32")
    with small_engine(
        folder / "store", system="impress", weights=model, device_cache_bytes=0, host_cache_bytes=0
    ) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(np.where(tokens(250) == ODD, 0, tokens(250)))


def test_one_row_falls_back(engine: Engine, prefix: Prefix) -> None:
    requests = [
        Request(prefix=prefix, suffix=suffix, budget=BUDGET) for suffix in ([5, 9, 2], [ODD])
    ]
    alone = [engine.reprefill([request])[0] for request in requests]
    counters = [result.trace.counters for result in alone]
    assert counters[0]["layers_agreed"] == MODEL.num_layers
    fell_back = counters[1]["layers_fell_back"]
    assert fell_back + counters[1].get("layers_agreed", 0) == MODEL.num_layers
    assert counters[1]["ssd_tokens"] >= fell_back * prefix.num_tokens, "all keys are read"
    together = engine.reprefill(requests)
    for batched, single in zip(together, alone, strict=True):
        assert scale_error(batched.logits, single.logits) < TIGHT
    odd, other = together[1], together[0]
    assert odd.trace.attention_mass == pytest.approx(alone[1].trace.attention_mass, abs=1e-4)
    assert 0 < odd.trace.attention_mass < 1 and 0 < other.trace.attention_mass < 1


def test_each_head_has_its_own_tokens_where_it_falls_back() -> None:
    rng = np.random.default_rng(11)
    chunks, size, heads, dim, n = 3, 8, 2, 4, 5
    pages = rng.normal(size=(chunks, 1, 1, size, heads * dim)).astype(np.float32)
    q = rng.normal(size=(2, 6, 2 * heads, dim)).astype(np.float32) * 3
    k = rng.normal(size=(2, 6, heads, dim)).astype(np.float32)
    slots = np.array([2, 0, 1], np.int32)
    trusted = TokenSelection(
        ids=np.arange(2 * n, dtype=np.int32).reshape(2, n),
        counts=np.full((2, chunks), 7, np.int32),
        mass=np.array([0.5, 0.25], np.float32),
        similarity=np.array([0.9, 0.1], np.float32),
        importance=np.zeros(chunks * size, np.float32),
    )
    by_heads = jax.jit(_by_heads_of(Target.here()), static_argnames="n")
    found = by_heads(
        (q, k, k), np.array([6, 6], np.int32), pages, slots, np.int32(20),
        np.array([n, n], np.int32), trusted, np.array([True, False]), n=n,
    )  # fmt: skip
    ids, counts, mass, _, _ = map(np.asarray, found)
    keys = pages[slots].reshape(-1, heads, dim)
    sums = np.asarray(jax.jit(column_sums)(q[1], keys, k[1], np.arange(24) < 20, np.int32(6)))
    own = np.argsort(-sums, axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(ids[1], np.sort(own, axis=1))
    assert set(own[0].tolist()) != set(own[1].tolist())
    held = sum(float(sums[head, token]) for head in range(heads) for token in own[head])
    valid = sums[:, :20]
    assert float(mass[1]) == pytest.approx(held / valid.sum(), rel=1e-5)
    expected = np.mean([np.bincount(one // size, minlength=chunks) for one in own], axis=0)
    np.testing.assert_allclose(counts[1], expected)
    np.testing.assert_array_equal(ids[0], np.broadcast_to(np.arange(n), (heads, n)))
    assert float(mass[0]) == 0.5 and set(counts[0].tolist()) == {7.0}


def test_a_device_gathers_whole_rows_for_tokens_of_single_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen as a row a head, a TPU's pool would be copied; what is attended is the same."""
    layers, _ = compiled_layers(MODEL, "float32", 0)
    slots, chunk, heads, dim = 8, 4, MODEL.num_kv_heads, MODEL.head_dim
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    pages, hidden = normal(slots, 1, 1, chunk, heads * dim), normal(2, 3, MODEL.hidden_size)
    qkv = (normal(2, 3, MODEL.num_heads, dim), normal(2, 3, heads, dim), normal(2, 3, heads, dim))
    keys, values = np.array([5, 1, 7], np.int32), np.array([0, 2, 4], np.int32)
    ids = np.sort(np.stack([[rng.permutation(12)[:5] for _ in range(heads)] for _ in range(2)]))
    ids[1, :, 4] = -1
    cpu, gathered = Target(platform="cpu"), list[tuple[int, ...]]()

    def plain(rows: jax.Array, table: jax.Array, *, target: Target) -> jax.Array:
        gathered.append(rows.shape)
        return gather(rows, table, target=cpu)

    monkeypatch.setattr(layerwise, "gather", plain)
    monkeypatch.setattr(
        layerwise, "attend_rows", lambda *args, target: attend_rows(*args, target=cpu)
    )
    there, here = (
        jax.jit(_attend_tokens_of(layers.layer_of, target))(
            layers.state(0), hidden, qkv, pages, keys, values, ids.astype(np.int32)
        )
        for target in (Target(platform="tpu"), cpu)
    )
    np.testing.assert_array_equal(there, here)
    assert gathered == [(slots * chunk, heads * dim)] * 2 + [(slots * chunk * heads, dim)] * 2
