"""A pin holds what it names and all that stands under it, whatever else goes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from segment_support import at_most, failing, lose_index, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    PrefixNotFound,
    PrefixRecord,
    StoreConfig,
    StoreError,
    StoreFull,
    inspect_store,
    pin_prefix,
    prune_store,
    verify_store,
)
from ckv_jax.storage.place.local import LocalFiles
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens

TOKENS = some_tokens(192)


def test_a_pinned_parent_stays_when_its_child_goes(folder: Path) -> None:
    """With the child gone the parent is a leaf like any other, but for its pin."""
    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:64])
        child = ingest(store, TOKENS[:128])
        grandchild = ingest(store, TOKENS)
        other = ingest(store, some_tokens(64, 1))
        assert len(grandchild.spans) == 3
        assert pin_prefix(store, parent.id[:10]) == parent.id
        with pytest.raises(PrefixNotFound):
            pin_prefix(store, "f" * 32)
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


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_pin_holds_the_copy_of_its_prefix_that_is_whole(folder: Path, chunk: int) -> None:
    """A longer text was stored after a chunk of the shorter one turned out bad."""
    with ChunkStore.open(folder) as store:
        damaged = ingest(store, TOKENS[:64])
        (span,) = damaged.spans
        store.index.quarantine(span.segment_id, span.checksum, chunk, "test")
        longer = ingest(store, TOKENS[:128])
        assert pin_prefix(store, damaged.id) == damaged.id
        whole = store.prefix(damaged.id)
        assert whole.spans[-1].segment_id == longer.spans[-1].segment_id
        prune_store(store, 0)
        assert store.files.segment_ids() == {span.segment_id for span in whole.spans}
        found = store.longest_prefix(TOKENS[:64], **ASKED)
        assert found == whole and read_all(store, found).right == SMALL.groups * 4


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_damaged_copy_of_a_prefix_goes_with_the_whole_one(folder: Path, chunk: int) -> None:
    with ChunkStore.open(folder) as store:
        damaged = ingest(store, TOKENS[:64])
        (span,) = damaged.spans
        store.index.quarantine(span.segment_id, span.checksum, chunk, "test")
        ingest(store, TOKENS[:128])
        pin_prefix(store, damaged.id)
        assert store.delete(store.prefix(damaged.id)) > 0
        assert noted(folder) == set() == store.files.segment_ids()


def test_its_own_pin_does_not_hold_what_is_deleted(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        parent, child = ingest(store, TOKENS[:64]), ingest(store, TOKENS[:128])
        for prefix in (parent, child):
            pin_prefix(store, prefix.id)
        assert store.delete(parent) == 0  # the child needs it
        assert store.record_of(parent).pinned
        assert store.delete(child) > 0
        assert noted(folder) == {parent.id}
        assert store.delete(parent) > 0
        assert noted(folder) == set() == store.files.segment_ids()


@pytest.mark.parametrize("named", [True, False])
def test_a_shorter_prefix_with_a_record_outlives_a_longer_one(folder: Path, named: bool) -> None:
    with ChunkStore.open(folder) as store:
        first, shorter, longer = (ingest(store, TOKENS[:end]) for end in (40, 100, 192))
        assert len(longer.spans) == 3
        if named:
            store.set_record(shorter.id, PrefixRecord(name="handbook"))
        assert store.delete(longer) > 0
        left = {first.id, shorter.id} if named else set()
        assert {prefix.id for prefix in store.prefixes()} == left
        assert noted(folder) == left - {first.id}
        assert read_all(store, shorter).right == (SMALL.groups * shorter.num_chunks if named else 0)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_pin_that_meets_an_eviction_holds_or_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """It is set after the eviction was planned, before or after the segments are claimed."""
    impatient = StoreConfig(wait_s=0.2)
    with ChunkStore.open(folder) as store, ChunkStore.open(folder, config=impatient) as other:
        ingest(store, TOKENS[:64])
        prefix, claim, pinned = ingest(store, TOKENS[:128]), store.files.claim, set[str]()

        def pin() -> None:
            with contextlib.suppress(StoreError):
                pinned.add(pin_prefix(other, prefix.id))

        def late(segment_id: str) -> object:
            if not claimed:
                pin()
            found = claim(segment_id)
            if claimed:
                pin()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(store.files, "claim", late)
            assert prune_store(store, 0).removed == (2 if claimed else 0)
        assert pinned == noted(folder) == (set() if claimed else {prefix.id})
        assert read_all(store, prefix).refused == (SMALL.groups * 8 if claimed else 0)
        assert prune_store(store, 0).removed == 0


def store_with_circle(folder: Path, child: int, parent: int) -> tuple[ChunkStore, list[str]]:
    """A store with a line of four segments, whose index says that number `child` continues number
    `parent`; and their ids. Another text continues the first, and one stands alone."""
    tokens = some_tokens(256)
    store = ChunkStore.open(folder, config=StoreConfig(wait_s=5.0, write_s=5.0))
    for end in (64, 128, 192, 256):
        last = ingest(store, tokens[:end])
    sibling = ingest(store, np.concatenate([tokens[:64], some_tokens(64, 1)]))
    ingest(store, some_tokens(64, 2))
    ids = [span.segment_id for span in last.spans]
    assert len(ids) == 4 and sibling.spans[0].segment_id == ids[0]
    query = "UPDATE segments SET parent = ? WHERE id = ?"
    with contextlib.closing(sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)) as db:
        assert db.execute(query, (ids[parent], ids[child])).rowcount == 1
    return store, ids


@pytest.mark.parametrize(("child", "parent"), [(2, 3), (1, 2), (1, 1), (0, 3)])
def test_what_stands_on_a_circle_of_parents_is_deleted_once_the_index_is_repaired(
    folder: Path, child: int, parent: int
) -> None:
    """A damaged index may say that a segment continues what continues it, or itself. A look finds
    out, and the repair reports what it has found."""
    store, ids = store_with_circle(folder, child, parent)
    with store:
        middle = store.longest_prefix(some_tokens(256)[:192], **ASKED)
        assert [span.segment_id for span in middle.spans] == ids[:3]
        there, prefixes = store.files.segment_ids(), {prefix.id for prefix in store.prefixes()}
        with pytest.raises(StoreError, match=r"its parent;.*run: ckv verify STORE --repair"):
            store.delete(middle)
        assert store.files.segment_ids() == there
        assert {prefix.id for prefix in store.prefixes()} == prefixes
        for repair in (False, True):
            report = verify_store(store, repair)
            assert report.unindexed == [ids[child]] and not report.ok and not report.damages
        assert verify_store(store).ok
        assert store.delete(middle) > 0
        assert store.files.segment_ids() == there - set(ids[1:])


def test_a_circle_below_what_is_deleted_stays_until_the_repair(folder: Path) -> None:
    """Nothing in the index says that the last segment continues what goes: it is of no use then."""
    store, ids = store_with_circle(folder, 3, 3)
    with store:
        there = store.files.segment_ids()
        assert store.delete(store.longest_prefix(some_tokens(256)[:192], **ASKED)) > 0
        assert store.files.segment_ids() == there - {ids[1], ids[2]}
        assert store.longest_prefix(some_tokens(256), **ASKED).num_tokens == 64
        assert verify_store(store, repair=True).removed == [ids[3]]
        assert store.files.segment_ids() == there - set(ids[1:])


# -- records of prefixes -------------------------------------------------------------------------


ASKED = {"fingerprint": FINGERPRINT, "layout": SMALL}
MAKE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda path: os.symlink(path, path),
}  # fmt: skip
"""What may be where a file should be."""


def noted(folder: Path) -> set[str]:
    return set(os.listdir(folder / "pins"))


@pytest.mark.parametrize("way", ["expired", "pruned", "deleted", "room", "removed"])
def test_a_record_goes_with_its_prefix(folder: Path, way: str) -> None:
    bound = SMALL.segment_bytes(64) * 7 // 4 if way == "room" else None
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=bound)) as store:
        first = ingest(store, some_tokens(64))
        store.set_record(first.id, PrefixRecord(retain_s=0.0, name="first"))
        assert store.record_of(first).name == "first"
        other = ingest(store, some_tokens(32, 9))
        store.set_record(other.id, PrefixRecord(priority=9))
        match way:
            case "expired":
                time.sleep(0.01)
                store.evict_expired()
            case "pruned":
                store.evict_to(store.usage() - 1)
            case "deleted":
                store.delete(first)
            case "room":
                ingest(store, some_tokens(64, 1))
            case "removed":
                store.remove_segment(first.spans[0].segment_id)
        assert noted(folder) == {other.id}
        if way != "room":
            again = ingest(store, some_tokens(64))
            assert again.id == first.id
            assert store.record_of(again) == PrefixRecord()  # it inherits nothing


def test_a_record_stays_while_any_segment_holds_its_prefix(folder: Path) -> None:
    """The middle of a longer segment is the same prefix as the whole of a shorter one."""
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        long = ingest(store, tokens)
        short = store.longest_prefix(tokens[:64], **ASKED)
        assert short.spans[0].segment_id == long.spans[0].segment_id
        store.set_record(short.id, PrefixRecord(retain_s=3600.0))
        child = ingest(store, some_tokens(64, 3))
        store.delete(child)
        assert noted(folder) == {short.id}
    with ChunkStore.open(folder) as store:  # nothing to sweep
        assert store.record_of(short).retain_s == 3600.0
        store.delete(long)
        assert noted(folder) == set()


@pytest.mark.parametrize("repair", [False, True])
def test_records_of_what_vanished_are_swept(folder: Path, repair: bool) -> None:
    with ChunkStore.open(folder) as store:
        gone, left = ingest(store, some_tokens(64)), ingest(store, some_tokens(64, 1))
        for prefix in (gone, left):
            store.set_record(prefix.id, PrefixRecord(pinned=True))
        id_ = gone.spans[0].segment_id
        shutil.rmtree(folder / "segments" / id_[:2] / id_)
        if repair:
            verify_store(store, repair=True)
            assert noted(folder) == {left.id}
    with ChunkStore.open(folder, readonly=True):
        assert len(noted(folder)) == (1 if repair else 2)  # looking changes nothing
    with ChunkStore.open(folder):
        assert noted(folder) == {left.id}


def test_a_sweep_leaves_a_record_that_is_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix was gone when the sweep looked, and has been stored and pinned again since."""
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as other:
        prefix, holders = ingest(store, some_tokens(64)), store.index.catalog.holders
        pin_prefix(store, prefix.id)
        shutil.rmtree(segment_folder(folder, prefix))

        def late(*asked: Any) -> object:
            found = holders(*asked)
            pin_prefix(other, ingest(other, some_tokens(64)).id)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(store.index.catalog, "holders", late)
            store.bounds.sweep()
        assert store.record_of(prefix).pinned and noted(folder) == {prefix.id}


def test_no_record_is_swept_while_a_segment_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        store.set_record(prefix.id, PrefixRecord(pinned=True))
    lose_index(folder)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "_open_manifest", Mock(side_effect=OSError(5, "broken")))
        with ChunkStore.open(folder) as store:
            assert store.longest_prefix(prefix.tokens, **ASKED).num_tokens == 0
            assert noted(folder) == {prefix.id}
    with ChunkStore.open(folder) as store:
        assert store.record_of(prefix).pinned


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_where_one_should_be_blocks_nothing(folder: Path, kind: str) -> None:
    """A record that cannot be one keeps its own prefix, and no other; an index is made anew."""
    with ChunkStore.open(folder) as store:
        kept, other = ingest(store, some_tokens(64)), ingest(store, some_tokens(64, 1))
    lose_index(folder)
    MAKE[kind](folder / "catalog.sqlite")
    MAKE[kind](folder / "pins" / kept.id)
    MAKE[kind](folder / "pins" / ("ab" * 16))  # of nothing that is stored
    with at_most(10), ChunkStore.open(folder) as store:
        assert {prefix.id for prefix in store.prefixes()} == {kept.id, other.id}
        assert store.record_of(kept).pinned
        assert prune_store(store, 0).removed == 1
        assert [prefix.id for prefix in store.prefixes()] == [kept.id]


def test_a_file_system_without_locks_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", Mock(side_effect=OSError(errno.EINVAL, "no such call")))
        with pytest.raises(StoreError, match="no open file description locks"):
            ChunkStore.open(folder)
    ChunkStore.open(folder).close()


# -- the disk --------------------------------------------------------------------------------------


def test_a_full_disk_is_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk smaller than the bound, or none: what is worth least goes, what is held stays."""
    size = SMALL.segment_bytes(64)
    room = [1 << 40]

    def free(self: LocalFiles) -> int:
        used = sum(
            file.stat().st_size for file in (folder / "segments").rglob("*") if file.is_file()
        )
        return room[0] - used

    monkeypatch.setattr(LocalFiles, "free_bytes", free)
    with ChunkStore.open(folder) as store:
        first = ingest(store, some_tokens(64))
        second = ingest(store, some_tokens(64, 1))
        room[0] = store.usage() + (1 << 20) + size // 2  # not for a third
        third = ingest(store, some_tokens(64, 2))
        left = {p.id for p in store.prefixes()}
        assert left == {second.id, third.id}
        why = store.why_evicted(first.id)
        assert why is not None and "room on the disk" in why.reason
        with store.reader(second), store.reader(third), pytest.raises(StoreFull, match="the disk"):
            ingest(store, some_tokens(64, 3))
        assert {p.id for p in store.prefixes()} == left
        room[0] = 0
        with pytest.raises(StoreFull):
            ingest(store, some_tokens(640, 4))
        assert {p.id for p in store.prefixes()} == left  # it would not have helped


def test_a_tenant_who_is_refused_costs_no_other_tenant(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room either, and what others have would make some."""
    size = SMALL.segment_bytes(64)
    with ChunkStore.open(folder, config=StoreConfig(tenant_bytes=size * 3 // 2)) as store:
        other = ingest(store, some_tokens(64), salt="b")
        mine = ingest(store, some_tokens(64), salt="a")
        pin_prefix(store, mine.id)
        monkeypatch.setattr(LocalFiles, "free_bytes", lambda _: (1 << 20) + size // 2)
        with pytest.raises(StoreFull, match="tenant_bytes"):
            ingest(store, some_tokens(64, 1), salt="a")
        assert {prefix.id for prefix in store.prefixes()} == {mine.id, other.id}


@pytest.mark.parametrize(
    ("code", "evictable"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.ENOSPC, False)]
)
def test_a_disk_that_fills_up_meanwhile_is_a_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, evictable: bool
) -> None:
    """The kernel refuses a write that was reserved: what is worth least goes, if that helps."""
    real, tokens = os.pwrite, some_tokens(64, 2)

    def used() -> int:
        total = 0
        for path, _, names in os.walk(folder / "segments"):  # passes over what another write evicts
            for name in (name for name in names if name.startswith("c.")):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(path, name)).st_size
        return total

    with ChunkStore.open(folder) as store:
        first, second = ingest(store, some_tokens(64)), ingest(store, some_tokens(64, 1))
        room = used() - 1

        def pwrite(fd: int, data: memoryview, at: int) -> int:
            if used() > room:
                raise OSError(code, os.strerror(code))
            return real(fd, data, at)

        if not evictable:
            pin_prefix(store, first.id)
            pin_prefix(store, second.id)
        with store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer:
            monkeypatch.setattr(os, "pwrite", pwrite)
            monkeypatch.setattr(LocalFiles, "free_bytes", lambda _: max(0, room - used()))
            writer.write(0, kv_of(SMALL, tokens))
            if evictable:
                third = writer.commit()
            else:
                with pytest.raises(StoreFull, match="no room on the disk"):
                    writer.commit()
        if evictable:
            assert read_all(store, third).refused == 0
            assert {p.id for p in store.prefixes()} == {second.id, third.id}
            why = store.why_evicted(first.id)
            assert why is not None and "the disk was full" in why.reason
        else:
            assert {p.id for p in store.prefixes()} == {first.id, second.id}
        assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize("free", [0, 1 << 40], ids=["full", "without inodes"])
def test_a_disk_that_stays_full_costs_no_whole_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Room is made twice at most for a write; and not at all where the disk says it has some."""
    tokens = some_tokens(16, 99)
    with ChunkStore.open(folder) as store:
        for seed in range(20):
            ingest(store, some_tokens(16, seed))
        with (
            store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer,
            failing(monkeypatch, "pwrite", errno.ENOSPC),
        ):
            monkeypatch.setattr(LocalFiles, "free_bytes", lambda _: free)
            writer.write(0, kv_of(SMALL, tokens))
            with pytest.raises(StoreFull):
                writer.commit()
        left = len(store.prefixes())
        assert left == 20 if free else 12 <= left < 20  # a few writes were in flight


@pytest.mark.parametrize("kind", MAKE)
def test_a_store_whose_locks_are_no_file_is_refused(folder: Path, kind: str) -> None:
    """Nothing could be read, and nothing evicted, for good: that is said at once."""
    with ChunkStore.open(folder) as store:
        ingest(store, some_tokens(64))
    (folder / "holds").unlink()
    MAKE[kind](folder / "holds")
    with pytest.raises(StoreError, match="holds is not a regular file"):
        ChunkStore.open(folder)
    assert (folder / "holds").is_dir() == (kind == "folder")


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("fifo", "fan"), ("loop", "segment"), ("fifo", "manifest"), ("folder", "manifest"),
        ("loop", "array"), ("fifo", "shard"), ("folder", "shard"), ("fifo", "entry"),
    ],
)  # fmt: skip
def test_what_is_no_file_among_segments_costs_that_segment_alone(
    folder: Path, kind: str, where: str
) -> None:
    """Other prefixes are served, written and evicted as ever."""
    with ChunkStore.open(folder) as store:
        lost, kept = ingest(store, some_tokens(64)), ingest(store, some_tokens(64, 1))
    segment = segment_folder(folder, lost)
    path = {
        "fan": segment.parent, "segment": segment, "manifest": segment / "manifest.json",
        "array": segment / "packs", "shard": next(segment.glob("packs/c.*")),
        "entry": folder / "tmp" / ("ab" * 16),
    }[where]  # fmt: skip
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    MAKE[kind](path)
    with at_most(10), ChunkStore.open(folder) as store:
        assert read_all(store, kept).refused == 0
        found = store.longest_prefix(lost.tokens, fingerprint=FINGERPRINT, layout=SMALL)
        assert read_all(store, found).wrong == 0
        assert read_all(store, ingest(store, some_tokens(64, 2))).refused == 0
        assert store.evict_to(0) > 0 and not store.prefixes()
