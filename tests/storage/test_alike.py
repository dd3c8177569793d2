"""Chunks of alike tokens: which token is in which, what is kept of that, what is lost with it."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import zarr
from segment_support import ALIKE, find, hurt, segment_folder
from segment_support import ALIKE as LAYOUT

from ckv_jax.storage import ChunkStore, Layout, Prefix, chain, pin_prefix
from ckv_jax.storage import layout as layouts
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.layout import RUN
from tests.support.truth import FINGERPRINT, ingest, kv_of, read_all, some_tokens

REORDERED = Layout(num_layers=2, num_kv_heads=2, head_dim=32, probe="none", reordered=True)
TOKENS = some_tokens(16 * 23 + 5)


@pytest.mark.parametrize("count", [RUN // 16 * 2 * 16 + 400, 16 * 23 + 5, 16 * 5 + 3, 7])
def test_what_is_stored_is_every_token_once(store: ChunkStore, count: int) -> None:
    tokens = some_tokens(count)
    prefix = ingest(store, tokens, layout=LAYOUT)
    assert read_all(store, prefix).right == LAYOUT.groups * prefix.num_chunks
    with store.reader(prefix) as reader:
        order = reader.order
    assert order.shape == (4, count)
    for start in range(0, count, RUN):
        part = order[:, start : start + RUN]
        np.testing.assert_array_equal(np.sort(part), np.tile(np.sort(part[0]), (4, 1)))
        assert part.min() == start and part.max() == min(start + RUN, count) - 1
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
    assert found.attrs["axes"] == ["layer_head", "token"] and found.attrs["run"] == RUN
    np.testing.assert_array_equal(np.argsort(found[:], axis=1, kind="stable"), order)


@pytest.mark.parametrize("layout", [LAYOUT, REORDERED], ids=["alike", "reordered"])
def test_no_id_leads_to_chunks_of_tokens_from_elsewhere(store: ChunkStore, layout: Layout) -> None:
    """A text that was stored once, and a longer one that is stored now: not the same chunks."""
    order = np.roll(np.arange(len(TOKENS)), 40) if layout.reordered else None
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=TOKENS, order=order) as writer:
        writer.write(0, kv_of(layout, TOKENS))
        prefix = writer.commit()
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


# -- a segment that continues a text -------------------------------------------------------------


BEGIN = 16 * 8
"""Where the second segment begins; of its twelve chunks and a part two runs of four are grouped."""
CONTINUED = some_tokens(BEGIN + 16 * 12 + 5)
KV = kv_of(ALIKE, CONTINUED)


@pytest.fixture
def prefix(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    monkeypatch.setattr(layouts, "RUN", 64)
    ingest(store, CONTINUED[:BEGIN], layout=ALIKE)
    made = ingest(store, CONTINUED, layout=ALIKE)
    assert [span.num_chunks for span in made.spans] == [8, 13]
    return made


def test_its_lost_assignment_and_packs_are_written_as_they_were(
    store: ChunkStore, folder: Path, prefix: Prefix
) -> None:
    files = [path for path in segment_folder(folder, prefix, 1).rglob("c.*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    lost(folder, prefix, [1, 2, 6, 12])
    assert [path.read_bytes() for path in files] != before
    assert store.replace_packs(prefix, BEGIN // 16, KV[:, :, BEGIN:]) == 5
    assert [path.read_bytes() for path in files] == before
    assert find(store, CONTINUED, ALIKE) == prefix


def lost(folder: Path, prefix: Prefix, bad: list[int]) -> None:
    """Flip a bit in the second segment's assignment of the third group, and in packs of it."""
    segment, tokens = segment_folder(folder, prefix, 1), len(CONTINUED) - BEGIN
    (path,) = segment.glob("assignment/c.*")
    hurt(path, 2 * tokens * 2 + 40)
    shards = sorted(segment.glob("packs/c.*"))
    shard, row = divmod(2, ALIKE.shard_groups)
    for chunk in bad:
        hurt(shards[shard], (row * 13 + chunk) * ALIKE.pack_bytes + 3)
