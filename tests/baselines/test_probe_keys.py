"""The keys of a prefix's probe, from the pages of a store to the device."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import SMALL, compiled_layers
from jax.experimental.pallas import tpu as pltpu
from kernel_targets import CPU, V5E

from ckv_jax.baselines.probe_keys import PagedKeys
from ckv_jax.model.decoder import Transformer
from ckv_jax.pipeline.layers import Layers
from ckv_jax.prefix.pools import slot_shape
from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.prefix import ProbePages
from tests.support.truth import ingest, kv_of, some_tokens

ROOM = 16
"""Chunks that the device's keys have room for."""
TOKENS = some_tokens(11 * 4 - 1)
"""Eleven chunks, of which five are in a segment of their own."""


def layout_of(probe: str, heads: int, width: int, dtype: str, dim: int = 8) -> Layout:
    return Layout(
        num_layers=3, num_kv_heads=heads, head_dim=dim, pack_layers=1, chunk_tokens=4,
        probe=probe, probe_width=width, dtype=dtype,
    )  # fmt: skip


LAYOUTS = [
    layout_of("keys", 2, 1, "float32"),
    layout_of("keys", 2, 1, "bfloat16"),
    layout_of("heads", 4, 3, "float32"),  # a page has room for two chunks and two thirds
    layout_of("heads", 3, 1, "bfloat16"),
]
NAMES = ["all heads", "all heads, 16 bit", "three of four", "one of three, 16 bit"]


def keys_over(layers: Layers) -> PagedKeys:
    return PagedKeys(Mock(layers=layers, **{"system.coder": None}))


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_keys_come_to_the_device_chunk_by_chunk(tmp_path: Path, layout: Layout) -> None:
    """Their pages lie anywhere in the pool; where no chunk is there are zeros."""
    layers, _ = compiled_layers(SMALL, layout.dtype, 0)
    layer = layout.probe_layers[1]
    with ChunkStore.open(tmp_path) as store:
        ingest(store, TOKENS[: 5 * 4], layout=layout)
        prefix = ingest(store, TOKENS, layout=layout)
        held = ProbePages(prefix)
        pool = np.ones((len(held) + 2, *layout.pack_shape), layout.numpy_dtype)
        slots = np.random.default_rng(0).permutation(len(pool))[: len(held)].astype(np.int32)
        every = np.arange(len(held))
        with store.reader(prefix) as reader:
            assert reader.read_probe_pages(layer, held, every, pool, rows=slots).all()
    assert len(prefix.spans) == 2 and slots.min() == 0
    pages = jnp.asarray(pool.view(layers.kv_dtype).reshape(-1, *slot_shape(layout)))
    place = np.full(ROOM, -1, np.int32)
    place[:11] = held.place
    wanted = np.zeros((ROOM * 4, layout.probe_heads, layout.head_dim), layout.numpy_dtype)
    wanted[: len(TOKENS)] = kv_of(layout, TOKENS)[layer, 0, :, : layout.probe_heads]
    found = np.asarray(keys_over(layers).bring(pages, slots, place, layout))
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == wanted.dtype


def test_a_tpu_brings_the_same_keys() -> None:
    """Its kernels move whole pages first, and then rows of them."""
    layout = layout_of("heads", 4, 3, "float32", dim=32)
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.normal(size=(8, *slot_shape(layout))).astype(np.float32))
    slots = np.array([5, 6, 0, 7, 1, 2, 3, 4], np.int32)
    place = np.array([0, 1, -1, 2, 4, 5, 6, 15], np.int32)
    here, there = (
        Layers(Transformer.abstract(SMALL, dtype="float32", target=target)) for target in (CPU, V5E)
    )
    wanted = keys_over(here).bring(pages, slots, place, layout)
    with pltpu.force_tpu_interpret_mode():
        found = keys_over(there).bring(pages, slots, place, layout)
    np.testing.assert_array_equal(found, wanted)
    gathers = [[one.kernel for one in made] for _, made in there.programs.dispatched]
    assert gathers == [["gather", "gather"]]
    assert [len(made) for _, made in here.programs.dispatched] == [1]
