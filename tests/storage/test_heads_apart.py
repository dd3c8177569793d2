"""Packs of one KV head: what they refuse, and what is written again."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import zarr
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, verify_store
from tests.support.truth import ingest, kv_of, read_all, some_tokens

LAYOUT = Layout(
    num_layers=5, num_kv_heads=3, head_dim=32, pack_layers=2, heads_apart=True, probe="none",
    digest="means",
)  # fmt: skip
"""Packs of a page of memory, which are read directly where that is possible."""
TOKENS = some_tokens(16 * 20 + 5)


def test_others_read_it_as_any_other(folder: Path) -> None:
    """For zarr nothing has changed but how the array is cut: a head is a slice of it."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
    packs = zarr.open_group(segment_folder(folder, prefix), mode="r")["packs"]
    assert packs.shape == (6, 21, 2, 16, 3, 32) and packs.chunks[4] == 1
    kv = kv_of(LAYOUT, TOKENS)
    found = np.asarray(packs[4, 7, :, :, 2]).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, kv[4, :, 7 * 16 : 8 * 16, 2])


def test_a_bad_pack_is_one_head_s(folder: Path) -> None:
    """The other heads of its chunk keep their bytes, and it is replaced where it lies."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
        shard = sorted(segment_folder(folder, prefix).glob("packs/c.1.*"))[0]
        written = shard.read_bytes()
        hurt(shard, (prefix.num_chunks + 9) * LAYOUT.pack_bytes + 5)
        outcome = read_all(store, prefix)
        assert (outcome.refused, outcome.wrong) == (1, 0)
        marked = find(store, TOKENS, LAYOUT, marked=True)
        assert store.marked_chunks(marked).tolist() == [9]
        part = slice(9 * 16, 10 * 16)
        assert store.replace_packs(marked, 9, kv_of(LAYOUT, TOKENS)[:, :, part]) == 1
        assert shard.read_bytes() == written and verify_store(store).ok
