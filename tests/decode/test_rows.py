"""Rows that join and leave the buffers of a decode batch: each keeps its own keys and values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import SMALL, compiled_layers
from kernel_targets import CPU

from ckv_jax.decode.decoder import Decoder, KvRows, Row
from ckv_jax.model.decoder import Transformer
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.plan import Plan
from ckv_jax.systems import SYSTEMS

LAYERS = 2
"""Both of one step."""
WIDTH = SMALL.num_kv_heads * SMALL.head_dim


@pytest.fixture
def decoder() -> Decoder:
    layers, _ = compiled_layers(SMALL, "float32", 0)
    nothing: Any = None  # no token is decoded
    return Decoder(layers, nothing, nothing, KvRows(layers))


def suffixes(batch: int, size: int, seed: int = 0) -> np.ndarray:
    """Keys and values [L, 2, b, S, K*D] of a batch of suffixes."""
    shape = (LAYERS, 2, batch, size, WIDTH)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def steps(kv: np.ndarray) -> list[LayerKv]:
    """The one step of a model of two layers."""
    return [tuple((keys.copy(), values.copy()) for keys, values in kv)]


def row(length: int, start: int = 100) -> Row:
    return Row(start=start, length=length, window=None)


class Batch:
    """A decoder, and what its rows should hold by their places: [L, 2, n, K*D] each."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.held: dict[int, np.ndarray] = {}

    def join(self, kv: np.ndarray, *joining: tuple[int, int]) -> list[int]:
        """Rows of so many tokens, each with its place in `kv`."""
        rows = [(source, row(length)) for source, length in joining]
        places = self.decoder.join(steps(kv), rows)
        for place, (source, length) in zip(places, joining, strict=True):
            self.held[place] = kv[:, :, source, :length]
        self.check()
        return places

    def leave(self, *places: int) -> dict[int, int]:
        moved = self.decoder.leave(places)
        self.held = {new: self.held[old] for old, new in moved.items()}
        self.check()
        return moved

    def check(self) -> None:
        assert self.decoder.live == sorted(self.held)
        for place, kv in self.held.items():
            mine = self.decoder.rows[place]
            assert mine is not None and mine.length == kv.shape[2]
            found = self.decoder.kv(place, mine.start)
            assert found.shape[3:] == (SMALL.num_kv_heads, SMALL.head_dim)
            np.testing.assert_array_equal(found.reshape(kv.shape), kv)


@pytest.fixture
def batch(decoder: Decoder) -> Batch:
    return Batch(decoder)


def test_a_whole_batch_of_suffixes_is_the_batch(batch: Batch) -> None:
    """Places of padding stay free."""
    assert batch.join(suffixes(4, 16), (0, 7), (3, 16), (1, 1)) == [0, 3, 1]
    assert len(batch.decoder.rows) == 4 and batch.decoder.capacity == 64
    assert batch.join(suffixes(2, 32, 1), (1, 20)) == [2]
    assert len(batch.decoder.rows) == 4


def test_a_batch_of_the_same_size_joins_those_that_are_there(batch: Batch) -> None:
    batch.join(suffixes(2, 16), (0, 5), (1, 6))
    assert batch.join(suffixes(2, 16, 1), (0, 3), (1, 4)) == [2, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_some_of_a_batch_of_suffixes_begin_a_smaller_one(batch: Batch, count: int) -> None:
    joining = [(6, 9), (1, 16), (7, 2)][:count]
    assert batch.join(suffixes(8, 16), *joining) == [*range(count)]
    assert len(batch.decoder.rows) == {1: 1, 2: 2, 3: 4}[count]
    assert batch.decoder.capacity == 64


def test_a_batch_grows_by_powers_of_two_when_its_places_are_taken(batch: Batch) -> None:
    sizes = []
    for seed, joining in enumerate(([(1, 9)], [(0, 3)], [(1, 5), (0, 16)], [(1, 4)])):
        batch.join(suffixes(2, 16, seed), *joining)
        sizes.append(len(batch.decoder.rows))
    assert sizes == [1, 2, 4, 8] and batch.decoder.live == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("size", "length", "capacity"),
    [(16, 16, 64), (64, 5, 64), (64, 63, 64), (64, 64, 128), (128, 5, 128), (128, 128, 256)],
)
def test_buffers_hold_every_row_and_a_token_more(
    decoder: Decoder, size: int, length: int, capacity: int
) -> None:
    """Whether it comes first or joins others."""
    for first in (True, False):
        batch = Batch(decoder)
        if not first:
            decoder.leave(decoder.live)
            batch.join(suffixes(1, 16, 1), (0, 8))
        batch.join(suffixes(2, size), (1, length))
        assert decoder.capacity == capacity


def test_a_short_row_joins_long_ones(batch: Batch) -> None:
    batch.join(suffixes(1, 256), (0, 200))
    batch.join(suffixes(2, 16, 1), (1, 3))
    assert batch.decoder.capacity == 256


def test_a_batch_halves_as_often_as_those_left_fit(batch: Batch) -> None:
    batch.join(suffixes(8, 16), *((source, 4 + source) for source in range(7)))
    assert len(batch.decoder.rows) == 8
    assert batch.leave(0, 2) == {1: 1, 3: 3, 4: 4, 5: 5, 6: 6}  # five need eight
    assert len(batch.decoder.rows) == 8
    assert batch.leave(4) == {1: 0, 3: 1, 5: 2, 6: 3}
    assert len(batch.decoder.rows) == 4
    assert batch.join(suffixes(1, 16, 1), (0, 9)) == [4]
    assert batch.leave(0, 1, 2, 4) == {3: 0}
    assert len(batch.decoder.rows) == 1
    assert batch.leave(0) == {}
    assert batch.decoder.rows == [] and batch.decoder.capacity == 0


def test_who_joins_takes_the_place_of_who_has_left(batch: Batch) -> None:
    batch.join(suffixes(4, 16), *((source, 8) for source in range(4)))
    assert batch.leave(1) == {0: 0, 2: 2, 3: 3}
    assert batch.join(suffixes(1, 16, 1), (0, 5)) == [1]


def test_buffers_grow_by_doubling_and_keep_what_they_hold(batch: Batch) -> None:
    batch.decoder.reserve(1000)  # there are none yet
    assert batch.decoder.capacity == 0
    batch.join(suffixes(2, 16), (0, 16), (1, 7))
    for tokens, capacity in ((1, 64), (64, 64), (65, 128), (513, 1024), (64, 1024)):
        batch.decoder.reserve(tokens)
        assert batch.decoder.capacity == capacity
        batch.check()


@pytest.mark.parametrize(("tokens", "capacity"), [(10, 256), (86, 128), (137, 64), (136, 128)])
def test_tokens_that_went_into_packs_leave_the_buffers(
    batch: Batch, tokens: int, capacity: int
) -> None:
    """Which shrink to what the longest row needs for one more token."""
    batch.join(suffixes(2, 256), (0, 50), (1, 200))
    before = batch.held[1]
    batch.decoder.shift(1, tokens)
    batch.held[1] = before[:, :, tokens:]
    moved = batch.decoder.rows[1]
    assert moved is not None and (moved.start, moved.length) == (100 + tokens, 200 - tokens)
    assert batch.decoder.capacity == capacity
    batch.check()


def test_keys_and_values_are_told_from_a_position_on(batch: Batch) -> None:
    batch.join(suffixes(2, 16), (0, 9), (1, 12))
    every = batch.decoder.kv(1, 100)
    np.testing.assert_array_equal(batch.decoder.kv(1, 105), every[:, :, 5:])
    np.testing.assert_array_equal(batch.decoder.kv(1, 111), every[:, :, 11:])
    assert every.shape[2] == 12


def of_one_row() -> tuple[Layers, Decoder]:
    """A batch of one row, and layers of which nothing else is compiled."""
    layers = Layers(Transformer.abstract(SMALL, dtype="float32", target=CPU))
    plan = Plan.of(LAYERS, replace(SYSTEMS["ckv"], period=2, subperiod=2, pack_layers=2))
    memory: Any = SimpleNamespace(pool=SimpleNamespace(pages=jnp.zeros(1)))
    decoder = Decoder(layers, memory, plan, KvRows(layers))
    decoder.join(steps(suffixes(1, 16)), [(0, row(9))])
    return layers, decoder


@pytest.mark.parametrize(("most", "cold"), [(4, 1), (2, 2), (3, 2)])
def test_a_batch_that_was_warmed_up_compiles_only_what_writes_a_row(most: int, cold: int) -> None:
    """For each size to which it grows, of those that were asked for."""
    layers, decoder = of_one_row()
    compiled = []
    for place, length in ((1, 16), (0, 3), (1, 1)):
        decoder.warm_join(2, 16, most)
        before = layers.programs.made
        decoder.join(steps(suffixes(2, 16)), [(place, row(length))])
        compiled.append(layers.programs.made - before)
    assert compiled == [1, cold, 0] and len(decoder.rows) == 4  # the last finds a free place


def test_a_batch_that_was_warmed_up_may_grow_by_more_than_one_size() -> None:
    layers, decoder = of_one_row()
    decoder.warm_join(2, 16, 4)
    before = layers.programs.made
    decoder.join(steps(suffixes(2, 16)), [(0, row(3)), (1, row(4))])
    assert len(decoder.rows) == 4
    assert layers.programs.made == before + 1  # what writes a row of a batch of four
