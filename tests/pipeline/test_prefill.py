"""The dense prefill in blocks equals the model's own dense pass."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import SMALL, small_engine, tokens
from engine_tiny import TINY
from flax import nnx

from ckv_jax.model.weights import random_model
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.prefill import (
    LONGER_BLOCKS,
    PIECE_BLOCKS,
    STEP_LAYERS,
    Block,
    Prefill,
    Prefills,
    window_within,
)
from ckv_jax.prefix.stored_kv import read_kv
from tests.model import small

MODEL = dataclasses.replace(SMALL, num_layers=STEP_LAYERS + 1, num_heads=2, num_kv_heads=1)
"""A call of every kind: of as many layers as there may be in one, and of fewer."""
WINDOW = 64
BLOCK = 32
LONG = tokens(240)
"""Past the window by more than what is read back at once."""
SHORT = tokens(100)


class Dense:
    """A model's own pass over a text, and prefills of its layers."""

    def __init__(self, dtype: str) -> None:
        model = random_model(MODEL, dtype=dtype, seed=0)
        passed = nnx.jit(small.dense)(model, jnp.asarray(SHORT[None]))
        self.logits = np.asarray(passed)[0]
        self.prefills = Prefills(Layers(model), block=BLOCK, window=WINDOW)
        self.tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]


class Kept:
    """The KV of a text, as a store would keep it."""

    def __init__(self, kv: np.ndarray) -> None:
        self.kv = kv
        self.read_from: list[int] = []
        self.asked: list[tuple[int, int]] = []

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        self.read_from.append(first)
        self.asked += [(layer, token) for layer in layers for token in range(first, stop)]
        return self.kv[layers.start : layers.stop, :, first:stop]


@pytest.fixture(scope="module")
def prefills() -> Prefills:
    layers = Layers(random_model(MODEL, dtype="float32", seed=0))
    return Prefills(layers, block=BLOCK, window=WINDOW)


@pytest.fixture(scope="module")
def whole(prefills: Prefills) -> np.ndarray:
    """The KV of `LONG`, computed in one go."""
    return kv_of(rest_of(prefills.begin(LONG, bounded=False)))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dense(request: pytest.FixtureRequest) -> Dense:
    return Dense(request.param)


def rest_of(prefill: Prefill) -> Iterator[Block]:
    while not prefill.done:
        yield prefill.advance()


def kv_of(blocks: Iterable[Block]) -> np.ndarray:
    return np.concatenate([block.tokens_kv(np.dtype(np.float32)) for block in blocks], axis=2)


@pytest.mark.parametrize("length", [1, 32, 100])
def test_logits_equal_the_dense_pass(dense: Dense, length: int) -> None:
    *_, block = rest_of(dense.prefills.begin(SHORT[:length], bounded=False))
    last = np.array([block.length - 1], np.int32)
    logits, token = dense.prefills.layers.head(block.hidden, last)
    expected = dense.logits[length - 1]
    assert np.abs(np.asarray(logits)[0] - expected).max() < dense.tolerance * np.abs(expected).max()
    assert int(token[0]) == int(np.asarray(logits)[0].argmax())


@pytest.mark.parametrize(
    ("window", "start"), [(WINDOW, 0), (WINDOW, 112), ((PIECE_BLOCKS + 2) * BLOCK, 16)]
)
def test_a_text_longer_than_the_window_comes_back_in_pieces(
    prefills: Prefills, whole: np.ndarray, start: int, window: int
) -> None:
    kept = Kept(whole)
    own = Prefills(prefills.layers, block=BLOCK, window=window)
    prefill = own.begin(LONG[start:], start=start, earlier=kept)
    blocks: list[Block] = []
    while not prefill.done:
        assert prefill.needs <= (blocks[-1].first + blocks[-1].length if blocks else start)
        del kept.asked[:]
        blocks.append(prefill.advance())
        assert len(kept.asked) == len(set(kept.asked))  # nothing twice
    assert kept.read_from.count(window) >= MODEL.num_layers  # each layer reads what is past it
    np.testing.assert_allclose(kv_of(blocks), whole[:, :, start:], atol=1e-5)


@pytest.mark.slow
def test_a_text_of_any_length_keeps_its_window_and_needs_the_same_programs() -> None:
    layers = Layers(random_model(MODEL, dtype="float32", seed=0))
    own = Prefills(layers, block=BLOCK, window=WINDOW)
    keys = (MODEL.num_layers, 2, WINDOW, MODEL.num_kv_heads, MODEL.head_dim)
    made = []
    for length in (256, 1024):
        text = tokens(length)
        before = live_bytes()
        earlier = Kept(np.zeros((*keys[:2], length, *keys[3:]), np.float32))
        prefill = own.begin(text, earlier=earlier)
        most = 0
        while not prefill.done:
            prefill.advance()
            most = max(most, live_bytes() - before)
        assert most == np.zeros(keys, np.float32).nbytes
        made.append(layers.programs.made)
        del prefill
    assert made[0] == made[1]
    assert "extend" not in {called.__name__ for called, _ in layers.programs.dispatched}


def live_bytes() -> int:
    """Of all arrays on devices."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("pack_layers", [2, 1])
def test_an_ingest_past_its_window_stores_what_a_wide_one_does(
    tmp_path: Path, pack_layers: int
) -> None:
    """Layers alone and in packs, of what is stored before and of what is being written."""
    text = tokens(230)
    system = {"period": 2, "subperiod": 2, "pack_layers": pack_layers}
    sizes = {"prefill_block": 16, "model": TINY, "overrides": system}
    with (
        small_engine(tmp_path / "wide", **sizes) as wide,
        small_engine(tmp_path / "narrow", **sizes, prefill_window=32) as narrow,
    ):
        narrow.ingest(text[:90])
        kept, expected = ((one.store, one.ingest(text)) for one in (narrow, wide))
        assert len(kept[1].spans) == 2
        np.testing.assert_allclose(read_kv(*kept), read_kv(*expected), atol=1e-5)


def test_a_window_leaves_room_for_its_buffers_and_for_a_blocks_arithmetic() -> None:
    config = dataclasses.replace(MODEL, num_layers=28, head_dim=64)
    token = 2 * 28 * 64 * 2
    widest = config.intermediate_size + config.num_heads * 64 + config.hidden_size
    block = 4 * 2 * BLOCK * widest

    def of(room: int | None, window: int = 512) -> int:
        return window_within(room, window, config, block=BLOCK, itemsize=2)

    assert of(None) == 512
    assert of(2**40) == 512
    blocks = 5
    assert of(block + (blocks + LONGER_BLOCKS) * BLOCK * token) == blocks * BLOCK
    assert of(block + (blocks + LONGER_BLOCKS) * BLOCK * token - 1) == (blocks - 1) * BLOCK
    assert of(0) == BLOCK  # it goes on, a block at a time
