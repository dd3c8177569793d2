"""Every wait has an end: stopped processes, locked indexes, disks that do not answer."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from segment_support import at_most, packs_memory, wait_until

from ckv_jax.storage import (
    ChunkStore,
    PrefixRecord,
    ReadTimeout,
    StoreClosed,
    StoreConfig,
    StoreUnavailable,
)
from ckv_jax.storage.place import local
from ckv_jax.storage.place.disk import DiskTimeout, progress
from ckv_jax.storage.segment.reads import Gate
from ckv_jax.storage.segment.segment import Segment
from tests.faults.tally import LAYOUT
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens

QUICK = StoreConfig(wait_s=0.4, write_s=0.6, deadline_s=0.5)
ASKED = {"fingerprint": FINGERPRINT, "layout": SMALL}


@contextmanager
def hanging(
    monkeypatch: pytest.MonkeyPatch, name: str, which: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    """A call of the kernel that does not return; as long as the context lasts."""
    real, answer = getattr(os, name), threading.Event()

    def call(*args: object, **named: object) -> object:
        if which(*args):
            answer.wait(60)
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        try:
            yield
        finally:
            answer.set()


_HOLDER = """
import fcntl, os, sys, time
for name in ("lock", "catalog.sqlite.lock"):
    fcntl.flock(os.open(os.path.join(sys.argv[1], name), os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_stopped_process_that_holds_every_lock_of_the_folder_stops_nobody(folder: Path) -> None:
    tokens = some_tokens(64)
    with ChunkStore.open(folder) as store:
        ingest(store, tokens)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        try:
            (folder / "catalog.sqlite").unlink()
            with at_most(10), ChunkStore.open(folder, config=QUICK) as store:
                assert store.longest_prefix(tokens, **ASKED).num_tokens == 64
                assert read_all(store, ingest(store, some_tokens(64, 1))).refused == 0
                assert len(store.prefixes()) == 2
        finally:
            os.kill(child.pid, signal.SIGKILL)


def test_what_is_published_is_seen_though_the_index_is_busy(folder: Path) -> None:
    with ChunkStore.open(folder, config=QUICK) as store:
        ingest(store, some_tokens(64))
        rival = sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)
        rival.execute("BEGIN IMMEDIATE")
        with at_most(20):
            prefix = ingest(store, some_tokens(64, 1))
            assert store.longest_prefix(prefix.tokens, **ASKED) == prefix
            assert store.prefix(prefix.id) == prefix and len(store.prefixes()) == 2
            assert store.stats()["refused_writes"] > 0
        rival.execute("ROLLBACK")
        rival.close()
        store.index.catalog.db._retry_at = 0.0  # rather than wait for it
        assert len(store.prefixes()) == 2
        rows = sqlite3.connect(folder / "catalog.sqlite").execute("SELECT count(*) FROM segments")
        assert rows.fetchone() == (2,)  # the file has caught up


def wedged(store: ChunkStore, prefix: object) -> dict[str, Callable[[], object]]:
    return {
        "lookup": lambda: store.longest_prefix(some_tokens(64), **ASKED),
        "reader": lambda: store.reader(prefix).close(),  # type: ignore[arg-type]
        "prefixes": store.prefixes,
        "writer": lambda: store.writer(**ASKED, tokens=some_tokens(64, 7)).close(),
        "usage": store.usage,
        "prune": lambda: store.evict_to(0),
    }


@pytest.mark.parametrize("name", ["lstat", "stat", "open", "listdir"])
def test_a_disk_that_does_not_answer_wedges_no_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither any of several at once."""
    inside = str(folder)

    def returns(call: Callable[[], object]) -> None:
        try:
            call()
        except StoreUnavailable as e:
            assert "not answered" in str(e)

    with ChunkStore.open(folder, config=QUICK) as store:
        calls = wedged(store, ingest(store, some_tokens(64))).values()
        with (
            ThreadPoolExecutor(len(calls)) as callers,
            hanging(monkeypatch, name, lambda path, *_: str(path).startswith(inside)),
            at_most(5),
        ):
            list(callers.map(returns, calls))
        time.sleep(0.05)
        if name != "listdir":  # a wedged prune goes on once the disk is back
            return
    with ChunkStore.open(folder) as store:
        assert store.usage() >= 0


def test_an_open_that_hangs_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(folder) as store:
        ingest(store, some_tokens(64))
    with hanging(monkeypatch, "open"), at_most(5), pytest.raises(StoreUnavailable, match="opening"):
        ChunkStore.open(folder, config=QUICK)


def test_an_fsync_that_hangs_is_given_up_and_cleaned_up_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder, config=QUICK) as store:
        tokens = some_tokens(64)
        writer = store.writer(**ASKED, tokens=tokens)
        writer.write(0, kv_of(SMALL, tokens))
        with hanging(monkeypatch, "fsync"), at_most(6):
            with pytest.raises(StoreUnavailable, match="taken nothing"):
                writer.commit()
            assert store.longest_prefix(tokens, **ASKED).num_tokens == 0
        wait_until(lambda: not os.listdir(folder / "tmp") and store.usage() == 0)
        assert read_all(store, ingest(store, tokens)).refused == 0


@pytest.mark.parametrize("threads", [True, False])
def test_a_writer_cleans_up_where_the_store_has_no_thread_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    """As too many requests are stuck, or as the system gives no threads at all."""
    with ChunkStore.open(folder, config=QUICK) as store:
        tokens = some_tokens(64)
        writer = store.writer(**ASKED, tokens=tokens)
        writer.write(0, kv_of(SMALL, tokens))
        with monkeypatch.context() as patch:
            patch.setattr("ckv_jax.storage.place.disk._MOST_STUCK", 0)
            patch.setattr(store._place.disk_timeout, "_idle", [])
            if not threads:
                error = RuntimeError("can't start new thread")
                patch.setattr(threading.Thread, "start", Mock(side_effect=error))
            writer.close()
        end = time.monotonic() + 5
        while (os.listdir(folder / "tmp") or store.usage()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not os.listdir(folder / "tmp") and store.usage() == 0


def test_a_segment_that_is_opened_too_late_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no process could evict it before this one ends."""
    with ChunkStore.open(folder, config=QUICK) as store:
        (span,) = ingest(store, some_tokens(64)).spans
        manifest = store.index.manifest(span.segment_id, span.checksum)
        answer = threading.Event()

        def slow(*args: Any) -> Segment:
            opened = Segment(*args)
            answer.wait(60)
            return opened

        monkeypatch.setattr("ckv_jax.storage.store.Segment", slow)
        with pytest.raises(StoreUnavailable, match="opening a segment"):
            store.open_segment(manifest, span.checksum)
        assert store.files.claim(span.segment_id) is None
        answer.set()
        end = time.monotonic() + 5
        while (claim := store.files.claim(span.segment_id)) is None and time.monotonic() < end:
            time.sleep(0.02)
        assert claim is not None
        claim.release()


def test_a_write_that_hangs_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(folder, config=QUICK) as store:
        tokens = some_tokens(64)
        with hanging(monkeypatch, "pwrite"), at_most(6), pytest.raises(StoreUnavailable):
            ingest(store, tokens)
        assert read_all(store, ingest(store, tokens)).refused == 0


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_reading_back_from_a_disk_that_hangs_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether what it reads was written or not."""
    out = packs_memory(SMALL, 4)
    with ChunkStore.open(folder, config=QUICK) as store:
        tokens = some_tokens(64)
        with (
            hanging(monkeypatch, name),
            at_most(6),
            store.writer(**ASKED, tokens=tokens) as writer,
        ):
            writer.write(0, kv_of(SMALL, tokens))
            with pytest.raises(StoreUnavailable):
                writer.read_back(0, 0, out)
        assert read_all(store, ingest(store, tokens)).refused == 0


def test_a_writer_that_is_closed_lets_go_of_who_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(64)
    with ChunkStore.open(folder) as store, ThreadPoolExecutor(1) as callers:
        writer = store.writer(**ASKED, tokens=tokens)
        with monkeypatch.context() as patch:
            go, reached = threading.Event(), threading.Event()
            real = writer._store

            def slow(*args: object) -> None:
                reached.set()
                go.wait(20)
                real(*args)  # type: ignore[arg-type]

            patch.setattr(writer, "_store", slow)
            kv = kv_of(SMALL, tokens)
            for start in (0, 16):
                writer.write(start, kv[:, :, start : start + 16])
            assert reached.wait(10)
            waits = callers.submit(writer.read_back, 0, 1, packs_memory(SMALL, 1))
            closing = threading.Thread(target=writer.close)
            closing.start()
            with pytest.raises(StoreClosed):
                waits.result(20)
            go.set()
            closing.join()
    assert not os.listdir(folder / "tmp")


def test_a_publish_that_was_given_up_shows_nothing_half_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(64)
    with ChunkStore.open(folder, config=QUICK) as store:
        writer = store.writer(**ASKED, tokens=tokens)
        writer.write(0, kv_of(SMALL, tokens))
        deleting, published = threading.Event(), threading.Event()
        rename, delete = os.rename, local.delete

        def late(old: Path, new: Path) -> None:
            deleting.wait(1.0)  # longer than the writer waits
            rename(old, new)
            published.set()

        def half(path: Path) -> None:
            if not deleting.is_set():
                shutil.rmtree(path / "packs", ignore_errors=True)
                deleting.set()
                published.wait(5)
            delete(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", late)
            patch.setattr(local, "delete", half)
            with pytest.raises(StoreUnavailable, match="publishing"):
                writer.commit()
            assert published.wait(10)
            catalog = store.index.catalog
            wait_until(lambda: not os.listdir(folder / "tmp") and not catalog.reserved())
        prefix = ingest(store, tokens)
        assert prefix.num_tokens == 64 and read_all(store, prefix).refused == 0


def test_a_wait_takes_no_longer_than_it_says() -> None:
    timeout, go = DiskTimeout(0.5), threading.Event()
    with pytest.raises(StoreUnavailable, match=r"for 0\.5 s"):
        timeout.run("waiting", lambda: go.wait(0.9))

    def slow() -> str:
        for _ in range(4):
            go.wait(0.2)
            progress()
        return "done"

    assert timeout.run("working", slow) == "done"
    timeout.close()


def test_who_waits_long_for_room_tries_again(folder: Path) -> None:
    """It is still being made."""
    config = StoreConfig(write_s=0.1)
    with ChunkStore.open(folder, config=config) as store, store.bounds._room_lock:
        assert store.bounds.make_room(1, time.monotonic())


def test_a_read_that_cannot_even_start_is_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder, config=QUICK) as store:
        prefix = ingest(store, some_tokens(64), layout=LAYOUT)
        out = packs_memory(LAYOUT, 4)
        with store.reader(prefix) as reader:
            with (
                hanging(monkeypatch, "open", lambda path, *_: "packs" in str(path)),
                at_most(5),
                pytest.raises(ReadTimeout) as error,
            ):
                reader.read_packs(0, np.arange(4), out)
            wait_until(error.value.settled)
            assert reader.read_packs(0, np.arange(4), out).all()


def test_a_read_that_waited_too_long_for_others_takes_no_room() -> None:
    gate = Gate(10)
    assert gate.enter(8, 0)
    assert not gate.enter(8, 0) and gate.bytes == 8
    gate.leave(8)
    assert gate.bytes == 0 and gate.enter(80, 0)  # nothing else is read


def test_nothing_is_locked_while_gigabytes_are_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as rival:
        for seed in range(3):
            ingest(store, some_tokens(64, seed))
        reached, go = threading.Event(), threading.Event()
        real = local.delete

        def slow(path: Path) -> None:
            if not reached.is_set():  # what was evicted, not a workspace that is given up
                reached.set()
                go.wait(20)
            real(path)

        monkeypatch.setattr(local, "delete", slow)
        pruning = threading.Thread(target=store.evict_to, args=(0,))
        pruning.start()
        assert reached.wait(10)
        with at_most(5):
            for other in (store, rival):  # what was evicted is gone already, and room is there
                assert other.longest_prefix(some_tokens(64), **ASKED).num_tokens == 0
                with other.writer(**ASKED, tokens=some_tokens(64, 9)):
                    pass
        go.set()
        pruning.join()
        assert not os.listdir(folder / "tmp")


def test_a_replacement_is_in_place_before_what_it_replaces_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(64)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        for shard in (folder / "segments").glob("*/*/packs/c.*"):
            os.truncate(shard, 100)
        read_all(store, prefix)
        seen: list[int] = []
        real = local.delete

        def look(path: Path) -> None:
            with ChunkStore.open(folder, readonly=True) as other:
                seen.append(other.longest_prefix(tokens, **ASKED).num_tokens)
            real(path)

        monkeypatch.setattr(local, "delete", look)
        again = ingest(store, tokens)
        assert seen and set(seen) == {64}
        assert read_all(store, again).refused == 0
        without = Mock(side_effect=OSError(22, "a file system without it"))
        monkeypatch.setattr(local, "exchange", without)
        for shard in (folder / "segments").glob("*/*/packs/c.*"):
            os.truncate(shard, 100)
        read_all(store, again)
        assert read_all(store, ingest(store, tokens)).refused == 0
        assert not os.listdir(folder / "tmp")


def test_two_sweeps_and_a_writer_do_not_meet(folder: Path) -> None:
    """Entries of tmp/ are locked by who makes them: sweeping all the time removes none in use."""
    with ChunkStore.open(folder) as store:
        stop = threading.Event()

        def sweep() -> None:
            while not stop.is_set():
                store.files.sweep()

        threads = [threading.Thread(target=sweep) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for seed in range(8):
                prefix = ingest(store, some_tokens(40, seed))
                store.bounds.set_record(
                    prefix.id, store.bounds.records().get(prefix.id) or PrefixRecord(pinned=True)
                )
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert len(store.prefixes()) == 8 and len(store.records()) == 8
        assert not os.listdir(folder / "tmp")
