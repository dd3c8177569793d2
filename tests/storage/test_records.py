"""What is noted of a prefix goes with it, costs its tenant alone, and is nobody else's."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from ckv_jax.storage import (
    ChunkStore,
    PrefixNotFound,
    StoreConfig,
    StoreError,
    StoreFull,
    Wish,
    prune_store,
    verify_store,
)
from ckv_jax.storage.place.local import LocalFiles
from tests.support.truth import FINGERPRINT, SMALL, ingest, some_tokens

ASKED = {"fingerprint": FINGERPRINT, "layout": SMALL}


def noted(folder: Path) -> set[str]:
    return set(os.listdir(folder / "pins"))


@pytest.mark.parametrize("way", ["expired", "pruned", "deleted", "room", "removed"])
def test_a_record_goes_with_its_prefix(folder: Path, way: str) -> None:
    bound = SMALL.segment_bytes(64) * 7 // 4 if way == "room" else None
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=bound)) as store:
        first = ingest(store, some_tokens(64))
        store.set_wish(first.id, Wish(retain_s=0.0, name="first"))
        assert store.wish_of(first).name == "first"
        other = ingest(store, some_tokens(32, 9))
        store.set_wish(other.id, Wish(priority=9))
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
            assert store.wish_of(again) == Wish()  # it inherits nothing


def test_a_record_stays_while_any_segment_holds_its_prefix(folder: Path) -> None:
    """The middle of a longer segment is the same prefix as the whole of a shorter one."""
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        long = ingest(store, tokens)
        short = store.longest_prefix(tokens[:64], **ASKED)
        assert short.spans[0].segment_id == long.spans[0].segment_id
        store.set_wish(short.id, Wish(retain_s=3600.0))
        child = ingest(store, some_tokens(64, 3))
        store.delete(child)
        assert noted(folder) == {short.id}
    with ChunkStore.open(folder) as store:  # nothing to sweep
        assert store.wish_of(short).retain_s == 3600.0
        store.delete(long)
        assert noted(folder) == set()


@pytest.mark.parametrize("repair", [False, True])
def test_records_of_what_vanished_are_swept(folder: Path, repair: bool) -> None:
    with ChunkStore.open(folder) as store:
        gone, left = ingest(store, some_tokens(64)), ingest(store, some_tokens(64, 1))
        for prefix in (gone, left):
            store.set_wish(prefix.id, Wish(pinned=True))
        id_ = gone.spans[0].segment_id
        shutil.rmtree(folder / "segments" / id_[:2] / id_)
        if repair:
            verify_store(store, repair=True)
            assert noted(folder) == {left.id}
    with ChunkStore.open(folder, readonly=True):
        assert len(noted(folder)) == (1 if repair else 2)  # looking changes nothing
    with ChunkStore.open(folder):
        assert noted(folder) == {left.id}


def test_no_record_is_swept_while_a_segment_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        store.set_wish(prefix.id, Wish(pinned=True))
    for file in folder.glob("catalog.sqlite*"):
        file.unlink()

    def fails(self: LocalFiles, segment_id: str) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "_open_manifest", fails)
        with ChunkStore.open(folder) as store:
            assert store.longest_prefix(prefix.tokens, **ASKED).num_tokens == 0
            assert noted(folder) == {prefix.id}
    with ChunkStore.open(folder) as store:
        assert store.wish_of(prefix).pinned


def test_records_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(folder) as store:
        prefixes = [ingest(store, some_tokens(32, n)) for n in range(6)]
        for prefix in prefixes:
            store.set_wish(prefix.id, Wish(priority=1))
        reads, read = Counter(), LocalFiles._read_pin

        def counted(self: LocalFiles, prefix_id: str) -> object:
            reads[prefix_id] += 1
            return read(self, prefix_id)

        monkeypatch.setattr(LocalFiles, "_read_pin", counted)
        for _ in range(3):
            prune_store(store, 10**12)
        assert set(reads.values()) == {1}
        store.set_wish(prefixes[0].id, Wish(priority=2))
        assert store.wishes()[prefixes[0].id].priority == 2
        assert reads[prefixes[0].id] == 2


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop"])
def test_what_is_no_file_where_one_should_be_blocks_nothing(folder: Path, kind: str) -> None:
    """A record that cannot be one keeps its own prefix, and no other; an index is made anew."""
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda path: os.symlink(path, path)}
    with ChunkStore.open(folder) as store:
        kept, other = ingest(store, some_tokens(64)), ingest(store, some_tokens(64, 1))
    for file in folder.glob("catalog.sqlite*"):
        file.unlink()
    make[kind](folder / "catalog.sqlite")
    make[kind](folder / "pins" / kept.id)
    make[kind](folder / "pins" / ("ab" * 16))  # of nothing that is stored
    began = time.monotonic()
    with ChunkStore.open(folder) as store:
        assert {prefix.id for prefix in store.prefixes()} == {kept.id, other.id}
        assert store.wish_of(kept).pinned
        assert prune_store(store, 0).removed == 1
        assert [prefix.id for prefix in store.prefixes()] == [kept.id]
    assert time.monotonic() - began < 10


def test_a_clock_that_was_ahead_makes_nothing_endless(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        store.set_wish(prefix.id, Wish(retain_s=100.0))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now + 1e6)
            store.touch(prefix)
            store.bounds.flush()
        monkeypatch.setattr(time, "time", lambda: now)
        assert prune_store(store, expired=True).removed == 0  # its time begins now
        monkeypatch.setattr(time, "time", lambda: now + 99)
        assert prune_store(store, expired=True).removed == 0
        monkeypatch.setattr(time, "time", lambda: now + 101)
        assert prune_store(store, expired=True).removed == 1


def test_a_file_system_without_locks_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuses)
        with pytest.raises(StoreError, match="no locks of open files"):
            ChunkStore.open(folder)
    ChunkStore.open(folder).close()


# -- tenants ---------------------------------------------------------------------------------------


def test_nothing_of_another_tenant_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(folder) as store:
        hers = [ingest(store, some_tokens(64, n), salt="alice") for n in range(5)]
        his = ingest(store, some_tokens(64, 9), salt="bob")
        middle = store.longest_prefix(hers[0].tokens[:32], **ASKED, salt="alice")
    asked: list[str] = []
    stamp = LocalFiles.stamp

    def noted_stamp(self: LocalFiles, segment_id: str) -> object:
        asked.append(segment_id)
        return stamp(self, segment_id)

    monkeypatch.setattr(LocalFiles, "stamp", noted_stamp)
    with ChunkStore.open(folder) as store:
        asked.clear()
        for prefix in (*hers, middle):
            for name in (prefix.id, prefix.id[:12]):
                with pytest.raises(PrefixNotFound) as error:
                    store.prefix(name, salt="bob")
                assert not set(error.value.close) & {p.id for p in hers}
        assert asked == []
        assert [p.id for p in store.prefixes(salt="bob")] == [his.id]
        assert asked == [his.spans[0].segment_id]
        assert store.sizes(salt="bob").keys() == {his.spans[0].segment_id}
        store.set_wish(his.id, Wish(name="n"))
        store.set_wish(hers[0].id, Wish(name="n"))
        assert store.wishes(salt="bob").keys() == {his.id}
        assert len(store.wishes()) == 2 and len(store.sizes()) == 6
        assert len(store.prefixes()) == 6


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
        with (
            store.reader(second),
            store.reader(third),
            pytest.raises(StoreFull, match="the disk"),
        ):
            ingest(store, some_tokens(64, 3))
        assert {p.id for p in store.prefixes()} == left
        room[0] = 0
        with pytest.raises(StoreFull):
            ingest(store, some_tokens(640, 4))
        assert {p.id for p in store.prefixes()} == left  # it would not have helped
