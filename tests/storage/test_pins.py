"""A pin holds what it names and all that stands under it, whatever else goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckv_jax.storage import (
    ChunkStore,
    StoreConfig,
    StoreFull,
    inspect_store,
    pin_prefix,
    prune_store,
)
from ckv_jax.storage.segment.segment import OpenSegments, Segment
from tests.support.truth import SMALL, ingest, read_all, some_tokens

TOKENS = some_tokens(192)


@pytest.mark.parametrize("policy", ["attention", "lru"])
def test_a_pinned_parent_stays_when_its_child_goes(folder: Path, policy: str) -> None:
    """With the child gone the parent is a leaf like any other, but for its pin."""
    with ChunkStore.open(folder, config=StoreConfig(eviction=policy)) as store:
        parent = ingest(store, TOKENS[:64])
        child = ingest(store, TOKENS[:128])
        grandchild = ingest(store, TOKENS)
        other = ingest(store, some_tokens(64, 1))
        assert len(grandchild.spans) == 3
        pin_prefix(store, parent.id)
        kept = parent.spans[0].segment_id
        assert prune_store(store, 0).removed == 3
        assert store.files.segment_ids() == {kept}
        assert [segment.pinned for segment in inspect_store(store).segments] == [True]
        assert read_all(store, parent).right == SMALL.groups * parent.num_chunks
        assert read_all(store, other).right == 0
        assert read_all(store, child).right == SMALL.groups * parent.num_chunks
        again = ingest(store, TOKENS)  # goes on from what was kept
        assert again.spans[0] == parent.spans[0] and len(again.spans) == 2
        pin_prefix(store, parent.id, pinned=False)
        assert not any(segment.pinned for segment in inspect_store(store).segments)
        assert prune_store(store, 0).removed == 2
        assert store.files.segment_ids() == set()


def test_a_pin_holds_every_segment_that_its_prefix_needs(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        ingest(store, TOKENS[:64])
        middle = ingest(store, TOKENS[:128])
        leaf = ingest(store, TOKENS)
        pin_prefix(store, middle.id)
    with ChunkStore.open(folder) as store:  # by another process
        assert prune_store(store, 0).removed == 1
        assert read_all(store, middle).right == SMALL.groups * middle.num_chunks
        assert store.files.segment_ids() == {span.segment_id for span in middle.spans}
        assert leaf.spans[:2] == middle.spans


def test_a_pin_on_what_is_gone_keeps_nothing_else(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        gone, other = ingest(store, TOKENS[:64]), ingest(store, some_tokens(64, 1))
        pin_prefix(store, gone.id)
    (id_,) = (span.segment_id for span in gone.spans)
    shutil.rmtree(folder / "segments" / id_[:2] / id_)
    with ChunkStore.open(folder) as store:
        assert [prefix.id for prefix in store.prefixes()] == [other.id]
        assert prune_store(store, 0).removed == 1 and store.usage() == 0
        assert not store.wishes()  # it went with its prefix


def test_room_is_made_above_a_pin_and_no_further(folder: Path) -> None:
    room = SMALL.segment_bytes(64)
    with ChunkStore.open(folder) as store:
        parent, child = ingest(store, TOKENS[:64]), ingest(store, TOKENS[:128])
        pin_prefix(store, parent.id)
        usage = store.usage()
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=usage + room - 1)) as store:
        new = ingest(store, some_tokens(64, 1))  # a byte too much: the child goes
        assert read_all(store, child).refused == SMALL.groups * 4
        assert read_all(store, parent).right == SMALL.groups * 4
        assert read_all(store, new).right == SMALL.groups * 4
        with pytest.raises(StoreFull, match="pinned"):
            ingest(store, some_tokens(160, 2))
        assert read_all(store, parent).right == SMALL.groups * 4


def test_of_two_that_open_a_segment_at_once_one_is_held(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread opens it between our look and our opening."""
    (span,) = ingest(store, TOKENS[:64]).spans
    make, others = OpenSegments._make, []

    def late(segments: OpenSegments, segment_id: str, checksum: str) -> Segment:
        monkeypatch.setattr(OpenSegments, "_make", make)
        others.append(segments.acquire(span))
        return make(segments, segment_id, checksum)

    monkeypatch.setattr(OpenSegments, "_make", late)
    mine = store._segments.acquire(span)
    assert [mine] == others and mine.users == 2
    store._segments.release([mine, mine])
    assert prune_store(store, 0).removed == 1  # nobody holds it
