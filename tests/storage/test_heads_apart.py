"""Packs of one KV head: where they lie, what they refuse, what is written anew."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, inspect_store, verify_store
from tests.support.truth import ingest, kv_of, read_all, some_tokens

LAYOUT = Layout(
    num_layers=5, num_kv_heads=3, head_dim=32, pack_layers=2, heads_apart=True, probe="none",
    digest="means",
)  # fmt: skip
"""Packs of a page of memory, which are read directly where that is possible."""
TOKENS = some_tokens(16 * 20 + 5)


def test_a_group_is_one_head_of_some_layers() -> None:
    assert LAYOUT.groups == 9 and LAYOUT.pack_shape == (2, 2, 16, 1, 32)
    assert [LAYOUT.group_layers(group) for group in (0, 2, 3, 8)] == [
        range(0, 2), range(0, 2), range(2, 4), range(4, 5),
    ]  # fmt: skip
    assert [LAYOUT.group_heads(group).start for group in range(4)] == [0, 1, 2, 0]
    together = dataclasses.replace(LAYOUT, heads_apart=False)
    assert LAYOUT.groups * LAYOUT.pack_bytes == together.groups * together.pack_bytes


def test_others_read_it_as_any_other(folder: Path) -> None:
    """For zarr nothing has changed but how the array is cut: a head is a slice of it."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
    packs = zarr.open_group(segment_folder(folder, prefix), mode="r")["packs"]
    assert packs.shape == (6, 21, 2, 16, 3, 32) and packs.chunks[4] == 1
    kv = kv_of(LAYOUT, TOKENS)
    found = np.asarray(packs[4, 7, :, :, 2]).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, kv[4, :, 7 * 16 : 8 * 16, 2])


def test_a_head_of_a_layer_lies_in_one_piece(folder: Path) -> None:
    """Row after row, a row being one head of the layers of a pack: chunk after chunk."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
    shard = sorted(segment_folder(folder, prefix).glob("packs/c.1.*"))[0].read_bytes()
    chunks, row = prefix.num_chunks, 16 * 32 * 2
    at = (2 * chunks + 9) * LAYOUT.pack_bytes  # the last head of layers 2 and 3, chunk 9
    kv = kv_of(LAYOUT, TOKENS)
    for place, (layer, kind) in enumerate([(2, 0), (2, 1), (3, 0), (3, 1)]):
        want = np.ascontiguousarray(kv[layer, kind, 9 * 16 : 10 * 16, 2]).tobytes()
        assert shard[at + place * row : at + (place + 1) * row] == want


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


def test_a_digest_is_made_again_of_every_head_s_packs(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
        (shard,) = segment_folder(folder, prefix).glob("digest/c.*")
        written = shard.read_bytes()
        hurt(shard, 40)
        with store.reader(prefix) as reader:
            assert reader.read_digest() is None
        assert len(verify_store(store, repair=True).remade) == 1
        assert shard.read_bytes() == written and verify_store(store).ok


def test_inspection_tells_of_whole_layers(store: ChunkStore) -> None:
    together = dataclasses.replace(LAYOUT, heads_apart=False)
    told = [
        inspect_store(store, ingest(store, TOKENS, layout=layout).id).prefix
        for layout in (LAYOUT, together)
    ]
    for one, other in zip(told[0].layers, told[1].layers, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=1e-5)
    assert len(told[0].layers) == 5


def test_it_is_of_a_version_of_its_own(store: ChunkStore) -> None:
    together = dataclasses.replace(LAYOUT, heads_apart=False)
    assert LAYOUT.to_dict()["version"] == 9 and together.to_dict()["version"] == 4
    assert Layout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT
    assert "heads_apart" not in together.to_dict() and LAYOUT.hex != together.hex
    with pytest.raises(ValueError, match="got fields"):
        Layout.from_dict(LAYOUT.to_dict() | {"version": 8})
    ingest(store, TOKENS, layout=together)
    assert find(store, TOKENS, LAYOUT).num_tokens == 0  # of another layout


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_together": False, "pack_layers": 1},
        {"reordered": True},
        {"codec": "int8:1", "codec_bytes": 512},
        {"heads_apart": 1},
    ],
    ids=str,
)
def test_what_it_does_not_go_with_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        dataclasses.replace(LAYOUT, **wrong)  # type: ignore[arg-type]
