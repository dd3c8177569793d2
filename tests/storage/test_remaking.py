"""Probes and digests that are bad are made anew from packs, without any model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    StoreError,
    StoreFull,
    StoreUnavailable,
    verify_store,
)
from ckv_jax.storage.layout import LANDMARKS
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.segment import repair
from ckv_jax.storage.segment.segment import Segment
from tests.faults.tally import read_prefix
from tests.support.truth import SMALL, ingest, read_all, some_tokens

TOKENS = some_tokens(16 * 30 + 5)


def layout_of(kind: str, **more: object) -> Layout:
    return dataclasses.replace(SMALL, head_dim=16, digest=kind, **more)


def digest(store: ChunkStore, prefix: Prefix) -> bytes | None:
    """All that a digest holds."""
    with store.reader(prefix) as reader:
        found = reader.read_digest()
    return None if found is None else b"".join(a.tobytes() for a in found.arrays.values())


@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind in ("int8", "int4", "pq") for part in ("params", "codes", "file")]
    + [(kind, part) for kind in LANDMARKS for part in ("codes", "file")],
)
def test_a_digest_is_made_anew(folder: Path, kind: str, part: str) -> None:
    layout = layout_of(kind)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=layout, block=64)
        before, usage = digest(store, prefix), store.usage()
        (path,) = segment_folder(folder, prefix).glob("digest/c.*")
        if part == "file":
            path.unlink()
        else:
            place = {"params": 0, "codes": sum(layout.digest_record(len(TOKENS))) - 1}
            hurt(path, place[part])
        assert digest(store, prefix) is None and find(store, TOKENS, layout).num_tokens == 0
        marked = find(store, TOKENS, layout, marked=True)
        assert store.remake_probes(marked) == (1 if part == "codes" else 4)
        again = find(store, TOKENS, layout)
        assert again.num_tokens == len(TOKENS) and store.usage() == usage
        assert verify_store(store).ok
        if kind != "pq":
            assert read_prefix(store, again).whole and not read_prefix(store, again).wrong
        if part == "codes":
            assert again == prefix and digest(store, again) == before
        assert store.remake_probes(again) == 0


@pytest.mark.parametrize("kind", ["int8", "means", "bounds"])
@pytest.mark.parametrize("chunks", [0, 7], ids=["chunk by chunk", "seven at a time"])
def test_a_digest_is_made_anew_of_packs_that_are_read_in_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunks: int
) -> None:
    layout = layout_of(kind)
    block = max(1, chunks * layout.groups * layout.pack_bytes)
    monkeypatch.setattr(repair, "_BLOCK_BYTES", block)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=layout)
        before = digest(store, prefix)
        (path,) = segment_folder(folder, prefix).glob("digest/c.*")
        record = sum(layout.digest_record(len(TOKENS)))
        for row in range(layout.num_layers):
            hurt(path, (row + 1) * record - 1)
        assert digest(store, prefix) is None
        assert store.remake_probes(find(store, TOKENS, layout, marked=True)) == layout.num_layers
        assert find(store, TOKENS, layout) == prefix and digest(store, prefix) == before


def test_lost_parameters_are_those_of_what_continues_it(folder: Path) -> None:
    layout = layout_of("int8")
    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:160], layout=layout, block=16)
        child = ingest(store, TOKENS, layout=layout)
        before = digest(store, child)
        for span in (0, 1):
            (path,) = segment_folder(folder, child, span).glob("digest/c.*")
            hurt(path, 0)
            assert digest(store, child) is None
            store.remake_probes(find(store, TOKENS, layout, marked=True))
            found = find(store, TOKENS, layout)
            assert found.spans[0].segment_id == parent.spans[0].segment_id
            assert digest(store, found) == before
        assert store.stats()["mixed_digests"] == 0


@pytest.mark.parametrize("together", [True, False])
def test_probes_are_made_anew_with_a_digest_whose_packs_are_bad(
    folder: Path, together: bool
) -> None:
    more: dict[str, object] = {} if together else {"kv_together": False, "pack_layers": 1}
    layout = layout_of("int8", **more)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=layout)
        (probe,) = segment_folder(folder, prefix).glob("probe/c.*")
        for chunk in (2, 7, 30):
            hurt(probe, chunk * 16 * layout.probe_heads * 16 * 2)
        (shard,) = segment_folder(folder, prefix).glob("packs/c.0.*")
        hurt(shard, 7 * layout.pack_bytes)
        hurt(next(segment_folder(folder, prefix).glob("digest/c.*")), 0)
        assert not read_prefix(store, prefix).whole
        # The probe of chunk 7 and the digest need a pack that is bad.
        assert store.remake_probes(find(store, TOKENS, layout, marked=True)) == 2
        assert find(store, TOKENS, layout).num_tokens == 0


def test_a_repair_gives_up_no_segment_for_its_digest(folder: Path) -> None:
    layout = layout_of("int8")
    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:160], layout=layout)
        child = ingest(store, TOKENS, layout=layout)
        lost = ingest(store, some_tokens(64, 9), layout=layout)
        hurt(next(segment_folder(folder, parent).glob("digest/c.*")), 0)
        hurt(next(segment_folder(folder, lost).glob("packs/c.0.*")), 0)
        report = verify_store(store, repair=True)
        assert report.remade == [parent.spans[0].segment_id]
        assert report.removed == [lost.spans[0].segment_id]
        assert find(store, TOKENS, layout).num_tokens == child.num_tokens == len(TOKENS)
        assert verify_store(store).ok


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (LocalFiles, "mending", StoreUnavailable("somebody else is mending it")),
        (LocalFiles, "mend", StoreFull("no room on the disk")),
        (Segment, "whole", StoreUnavailable("no answer")),
    ],
)
def test_what_could_not_be_mended_just_now_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: type, name: str, error: StoreError
) -> None:
    """And so does what continues it: no pack of either is bad."""
    layout = layout_of("int8")

    def fail(*_: object, **__: object) -> None:
        raise error

    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:160], layout=layout)
        child = ingest(store, TOKENS, layout=layout)
        lost = ingest(store, some_tokens(64, 9), layout=layout)
        hurt(next(segment_folder(folder, parent).glob("digest/c.*")), 0)
        hurt(next(segment_folder(folder, lost).glob("packs/c.0.*")), 0)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail)
            report = verify_store(store, repair=True)
        id_ = parent.spans[0].segment_id
        assert report.unrepaired == report.quarantined == [id_] and not report.remade
        assert report.removed == [lost.spans[0].segment_id]
        assert find(store, TOKENS, layout).num_tokens == 0
        verify_store(store, repair=True)
        assert find(store, TOKENS, layout).num_tokens == child.num_tokens == len(TOKENS)
        report = verify_store(store)
        assert report.ok and not report.unrepaired


def test_a_repair_keeps_the_chunks_before_a_bad_pack_when_their_probes_are_made_anew(
    folder: Path,
) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=SMALL)
        hurt(next(segment_folder(folder, prefix).glob("probe/c.*")), 0)
        hurt(next(segment_folder(folder, prefix).glob("packs/c.0.*")), 5 * SMALL.pack_bytes)
        report = verify_store(store, repair=True)
        assert report.quarantined == [prefix.spans[0].segment_id] and not report.removed
        found = find(store, TOKENS, SMALL)
        assert found.num_tokens == 5 * 16 and read_all(store, found).refused == 0


def test_a_segment_that_is_mended_and_continues_nothing_goes(folder: Path) -> None:
    layout = layout_of("int8")
    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:160], layout=layout)
        child = ingest(store, TOKENS, layout=layout)
        hurt(next(segment_folder(folder, parent).glob("packs/c.0.*")), 0)
        hurt(next(segment_folder(folder, child, 1).glob("digest/c.*")), 0)
        report = verify_store(store, repair=True)
        assert sorted(report.removed) == sorted(s.segment_id for s in child.spans)
        assert not report.remade  # each is told of once
        assert verify_store(store).ok and not np.any(find(store, TOKENS, layout).tokens)
