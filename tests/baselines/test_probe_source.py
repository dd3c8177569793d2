"""A prefix's probe keys as packs: read from a store, or made of keys that were computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.baselines.probe_keys import ProbeSource
from ckv_jax.prefix.open_prefix import ProbeView
from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.prefix import ProbePages
from tests.support.truth import ingest, kv_of, some_tokens

TOKENS = some_tokens(11 * 4 - 1)
"""Eleven chunks, of which five are in a segment of their own."""
LAYOUTS = {
    "all heads": Layout(num_layers=6, num_kv_heads=2, head_dim=8, pack_layers=2, chunk_tokens=4),
    "three of four": Layout(
        num_layers=3, num_kv_heads=4, head_dim=8, pack_layers=1, chunk_tokens=4,
        probe="heads", probe_width=3, dtype="float32",
    ),
}  # fmt: skip


class Recomputed:
    """All keys and values of the text."""

    def __init__(self, layout: Layout) -> None:
        self._kv = kv_of(layout, TOKENS)

    def keys(self, layer: int) -> np.ndarray:
        return self._kv[layer, 0]


@pytest.fixture(params=LAYOUTS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProbeSource]:
    layout = LAYOUTS[request.param]
    with ChunkStore.open(tmp_path) as store:
        ingest(store, TOKENS[: 5 * 4], layout=layout)
        held = ProbePages(ingest(store, TOKENS, layout=layout))
        first = 100 + np.arange(len(held))
        stride = np.where(held.span == 0, 10, 20)
        with store.reader(held.prefix) as reader:
            opened: Any = SimpleNamespace(
                prefix=held.prefix, reader=reader, recovered=Recomputed(layout)
            )
            yield ProbeSource(opened, ProbeView(held, first, stride))


def test_what_is_computed_again_is_what_was_stored(source: ProbeSource) -> None:
    """In every row, page by page and in any order, up to the last bit."""
    view, layout = source.view, source.prefix.layout
    assert source.kind == "probe"
    pages = np.random.default_rng(0).permutation(len(view.held))
    size = layout.probe_page_chunks * 4 * layout.probe_heads * layout.head_dim
    for group, layer in enumerate(layout.probe_layers):
        stored = np.ones((len(pages) + 3, *layout.pack_shape), layout.numpy_dtype)
        rows = np.random.default_rng(1).permutation(len(stored))[: len(pages)].astype(np.int32)
        assert source.reader.read_packs(group, pages, stored, rows=rows).all()
        again = source.recovered.packs(group, pages)
        assert again.shape == (len(pages), *layout.pack_shape)
        assert again.tobytes() == stored[rows].tobytes()
        keys = kv_of(layout, TOKENS)[layer, 0, :, : layout.probe_heads]
        for page, pack in zip(pages.tolist(), again, strict=True):
            start, count = int(view.held.start[page]), int(view.held.tokens[page])
            mine = pack.reshape(-1)[:size].reshape(-1, *keys.shape[1:])
            np.testing.assert_array_equal(mine[:count], keys[start : start + count])
            assert not pack.reshape(-1)[count * keys[0].size :].astype(np.float32).any()


def test_a_page_has_a_number_in_every_row_and_takes_its_tokens_bytes(source: ProbeSource) -> None:
    view = source.view
    every, layout = np.arange(len(view.held)), source.prefix.layout
    assert source.first_page.tolist() == (100 + every).tolist()
    assert source.page_stride.tolist() == [
        10 if view.held.span[page] == 0 else 20 for page in every
    ]
    token = layout.probe_heads * layout.head_dim * layout.disk_dtype.itemsize
    assert source.read_bytes(every) == len(TOKENS) * token
    assert source.read_bytes(every[:1]) == int(view.held.tokens[0]) * token
