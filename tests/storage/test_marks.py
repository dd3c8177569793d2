"""What is marked as bad, what is counted, and how far a marked segment is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from segment_support import find

from ckv_jax.storage import ChunkStore, Prefix, SegmentDamaged
from tests.support.truth import SMALL, ingest, some_tokens

TOKENS = some_tokens(16 * 7)


def two_segments(store: ChunkStore) -> Prefix:
    """Of 3 chunks and 4."""
    ingest(store, TOKENS[: 16 * 3])
    prefix = ingest(store, TOKENS)
    assert len(prefix.spans) == 2
    return prefix


def test_a_segment_is_served_up_to_its_first_mark(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store)
        first, second = prefix.spans
        assert store.marked_chunks(prefix).tolist() == []
        for chunk in (-1, 4, 99):  # which it does not have
            store.index.quarantine(second.segment_id, second.checksum, chunk, "x")
        assert find(store, TOKENS, SMALL) == prefix
        store.index.quarantine(second.segment_id, "0" * 64, 0, "another that was there")
        assert find(store, TOKENS, SMALL) == prefix
        for chunk in (3, 1):
            store.index.quarantine(second.segment_id, second.checksum, chunk, "x")
        assert find(store, TOKENS, SMALL).num_tokens == 16 * 4
    with ChunkStore.open(folder) as store:  # another process knows it
        assert find(store, TOKENS, SMALL).num_tokens == 16 * 4
        marked = find(store, TOKENS, SMALL, marked=True)
        assert marked == prefix and store.marked_chunks(marked).tolist() == [4, 6]
        assert store.marked_chunks(find(store, TOKENS[: 16 * 5], SMALL, marked=True)).tolist() == [
            4
        ]
        store.index.quarantine(first.segment_id, first.checksum, 2, "x")
        assert store.marked_chunks(prefix).tolist() == [2, 4, 6]
        assert find(store, TOKENS, SMALL).num_tokens == 16 * 2
        store.index.pardon(first.segment_id)
        assert store.marked_chunks(prefix).tolist() == [4, 6]
        store.index.pardon(second.segment_id)
        assert find(store, TOKENS, SMALL) == prefix
        assert store.prefixes() == [prefix]
    with ChunkStore.open(folder) as store:
        assert find(store, TOKENS, SMALL) == prefix


def test_marks_of_a_manifest_that_was_replaced_are_of_nothing(store: ChunkStore) -> None:
    prefix = two_segments(store)
    second = prefix.spans[1]
    manifest = store.index.manifest(second.segment_id, second.checksum)
    assert manifest.segment_id == second.segment_id
    with pytest.raises(SegmentDamaged, match="replaced"):
        store.index.manifest(second.segment_id, "0" * 64)
    store.index.quarantine(second.segment_id, second.checksum, 1, "x")
    store.index.add(manifest, second.checksum)  # the same one: what was bad is bad
    assert store.index.marks(manifest, second.checksum) == {1}
    store.index.add(manifest, "0" * 64)  # another in its place
    assert store.index.marks(manifest, second.checksum) == set()
    store.index.quarantine(second.segment_id, second.checksum, 1, "x")
    store.index.drop(second.segment_id, "removed")
    assert store.index.marks(manifest, second.checksum) == set()
