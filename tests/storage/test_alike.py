"""Chunks of alike tokens: which token is in which, what is kept of that, what is lost with it."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr
from segment_support import ALIKE as LAYOUT
from segment_support import segment_folder, write

from ckv_jax.storage import ChunkStore, Layout, chain, pin_prefix
from ckv_jax.storage import layout as layouts
from ckv_jax.storage.errors import PrefixNotFound, StoreUnavailable
from ckv_jax.storage.layout import RUN
from tests.support.truth import FINGERPRINT, ingest, kv_of, read_all, some_tokens

REORDERED = Layout(num_layers=2, num_kv_heads=2, head_dim=32, probe="none", reordered=True)
TOKENS = some_tokens(16 * 23 + 5)


@pytest.mark.parametrize(
    ("run", "count"),
    [(RUN, RUN + 400), (1024, 2448), (1024, 16 * 23 + 5), (1024, 16 * 5 + 3), (1024, 7)],
)
def test_what_is_stored_is_every_token_once(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, run: int, count: int
) -> None:
    monkeypatch.setattr(layouts, "RUN", run)
    tokens = some_tokens(count)
    prefix = ingest(store, tokens, layout=LAYOUT)
    assert read_all(store, prefix).right == LAYOUT.groups * prefix.num_chunks
    with store.reader(prefix) as reader:
        order = reader.order
    assert order.shape == (4, count)
    for start in range(0, count, run):
        part = order[:, start : start + run]
        np.testing.assert_array_equal(np.sort(part), np.tile(np.sort(part[0]), (4, 1)))
        assert part.min() == start and part.max() == min(start + run, count) - 1
    steady = np.r_[0 : min(16, count), max(0, (count - 64) // 16 * 16) : count]
    np.testing.assert_array_equal(order[:, steady], np.tile(steady, (4, 1)))
    if count > 200:  # heads and layers have groups of their own
        assert len({row.tobytes() for row in order}) == 4
        chunks = order[:, 16 : count // 16 * 16].reshape(4, -1, 16)
        assert (np.diff(chunks) > 0).mean() > 0.9  # in their order within a chunk, but for runs'


def test_others_read_the_assignment(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
        with store.reader(prefix) as reader:
            order = reader.order
    found = zarr.open_group(segment_folder(folder, prefix), mode="r")["assignment"]
    assert found.shape == (4, len(TOKENS)) and found.dtype == np.uint16
    assert found.attrs["axes"] == ["layer_head", "token"] and found.attrs["run"] == 8192
    np.testing.assert_array_equal(np.argsort(found[:], axis=1, kind="stable"), order)


def test_an_assignment_that_is_late_is_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, arrives = os.pread, threading.Event()

    def late(fd: int, count: int, offset: int) -> bytes:
        arrives.wait(30)
        return real(fd, count, offset)

    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
        with store.reader(prefix, deadline_s=0.2) as reader:
            monkeypatch.setattr(os, "pread", late)
            with pytest.raises(StoreUnavailable, match="has not answered"):
                _ = reader.order
            arrives.set()
        assert store.stats()["quarantined"] == 0 and store.prefix(prefix.id) == prefix


@pytest.mark.parametrize("layout", [LAYOUT, REORDERED], ids=["alike", "reordered"])
def test_no_id_leads_to_chunks_of_tokens_from_elsewhere(store: ChunkStore, layout: Layout) -> None:
    """A text that was stored once, and a longer one that is stored now: not the same chunks."""
    order = np.tile(np.roll(np.arange(len(TOKENS)), 40), (2, 1)) if layout.reordered else None
    prefix = write(store, layout, TOKENS, kv_of(layout, TOKENS), order=order)
    seed = chain.seed(FINGERPRINT, layout, "")
    links = [link.hex() for link in chain.links(seed, TOKENS, 16)]
    assert links[-1] == prefix.id and store.prefix(prefix.id) == prefix
    for use in (store.prefix, functools.partial(pin_prefix, store)):
        with pytest.raises(PrefixNotFound, match=f"ends inside of {prefix.id}") as error:
            use(links[9])
        assert error.value.close == (prefix.id,)
    assert store.bounds.pinned() == set() and not store.records()
    pin_prefix(store, prefix.id)
    assert store.bounds.pinned() == {prefix.spans[0].segment_id}
    if layout.alike:  # in the last 64
        assert store.prefix(links[-2]).num_tokens == 16 * 23
