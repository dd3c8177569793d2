"""Segments that leave a full store, those that stay, and room that is planned before any goes."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from command_line import Here
from segment_support import failing, lose_index

from ckv_jax.storage import (
    ChunkStore,
    Prefix,
    PrefixRecord,
    StoreClosed,
    StoreConfig,
    StoreError,
    StoreFull,
    StoreUnavailable,
    pin_prefix,
    prune_store,
    update_record,
)
from ckv_jax.storage.place.local import LocalWorkspace
from ckv_jax.storage.segment.segment import Segment
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"pinned": 1}, {"pinned": None}, {"retain_s": math.inf}, {"retain_s": math.nan},
        {"retain_s": True}, {"retain_s": -0.1}, {"priority": -1001}, {"priority": True},
        {"name": "x" * 201}, {"name": "a\tb"}, {"source": None}, {"begins": b"x"},
    ],
    ids=str,
)  # fmt: skip
def test_what_nobody_can_wish_is_refused(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}: got"):
        PrefixRecord(**wrong)  # type: ignore[arg-type]


# -- bounds of an open store ---------------------------------------------------------------------


SIZE = SMALL.segment_bytes(64)


def stored(store: ChunkStore, prefix: Prefix, salt: str = "") -> bool:
    found = store.longest_prefix(prefix.tokens, fingerprint=FINGERPRINT, layout=SMALL, salt=salt)
    return found.num_tokens == prefix.num_tokens


def read_scores(store: ChunkStore, prefix: Prefix, importance: float) -> None:
    shape = (SMALL.groups, prefix.spans[-1].segment_chunks)
    scores = np.full(shape, importance, np.float32), np.full(shape, 2, np.uint32)
    store.save_scores(prefix.spans[-1].segment_id, *scores)


def test_the_least_attended_segments_go_first(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=4 * SIZE)) as store:
        prefixes = [ingest(store, some_tokens(64, seed)) for seed in range(3)]
        for prefix, importance in zip(prefixes, (0.5, 0.1, 0.9), strict=True):
            read_scores(store, prefix, importance)
        while store.stats()["evicted"] == 0:
            prefixes.append(ingest(store, some_tokens(64, len(prefixes))))
        assert [stored(store, p) for p in prefixes[:3]] == [True, False, True]
        assert store.usage() <= 4 * SIZE
        files = [p for p in (folder / "segments").rglob("*") if p.is_file()]
        assert store.usage() == sum(p.stat().st_size for p in files)


def test_scores_that_the_index_cannot_hold_cost_nothing_else(store: ChunkStore) -> None:
    small, large = (ingest(store, some_tokens(64, seed)) for seed in range(2))
    read_scores(store, small, 0.1)
    many = np.ones((1, 1 << 23), np.float32)
    store.save_scores(large.spans[0].segment_id, many, many)
    assert store.stats()["rebuilds"] == store.stats()["refused_writes"] == 0
    assert store.load_scores(small.spans[0].segment_id) is not None
    prune_store(store, store.usage() - 1)
    assert stored(store, large) and not stored(store, small)


def test_lru_goes_by_time_of_use(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(eviction="lru")) as store:
        prefixes = [ingest(store, some_tokens(64, seed)) for seed in range(3)]
        read_scores(store, prefixes[1], 99.0)
        for i in (1, 0, 2, 0):
            store.reader(prefixes[i]).close()
        prune_store(store, store.usage() - 1)
        assert [stored(store, p) for p in prefixes] == [True, False, True]


def test_a_parent_outlives_what_continues_it(store: ChunkStore) -> None:
    tokens = some_tokens(128)
    parent, child = ingest(store, tokens[:64]), ingest(store, tokens)
    read_scores(store, child, 100.0)
    read_scores(store, parent, 0.0)
    prune_store(store, store.usage() - 1)
    assert stored(store, parent) and not stored(store, child)


def test_nothing_is_evicted_that_is_being_read_or_continued(folder: Path) -> None:
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as rival:
        tokens = some_tokens(128)
        parent = ingest(store, tokens[:64])
        with store.reader(parent):
            assert prune_store(rival, 0).removed == prune_store(store, 0).removed == 0
        with store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens[64:], parent=parent):
            assert prune_store(rival, 0).removed == 0
        assert prune_store(rival, 0).removed == 1
        assert not stored(store, parent)
        assert read_all(store, parent).refused == SMALL.groups * 4  # a miss, not an error
        assert store.stats()["gone"] > 0


def test_what_comes_into_use_after_the_plan_stays(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine begins to use a prefix while its segment is claimed."""
    prefix, claim, used = ingest(store, some_tokens(64)), store.files.claim, set[str]()

    def late(segment_id: str) -> object:
        used.add(segment_id)
        return claim(segment_id)

    store.bounds.in_use.append(lambda: used)
    with monkeypatch.context() as patch:
        patch.setattr(store.files, "claim", late)
        assert store.delete(prefix) == 0
    assert read_all(store, prefix).right == SMALL.groups * 4
    used.clear()
    assert store.delete(prefix) > 0


def test_many_threads_read_write_and_look_up(store: ChunkStore) -> None:
    texts = [some_tokens(200, seed) for seed in range(8)]
    barrier = threading.Barrier(4)

    def work(start: int) -> None:
        barrier.wait(20)
        for i in range(8):
            prefix = ingest(store, texts[(start + i) % 8])
            outcome = read_all(store, prefix)
            assert outcome.right == SMALL.groups * 13 and not outcome.wrong

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(store.prefixes()) == 8


def test_closing_twice_and_using_what_is_closed(folder: Path) -> None:
    store = ChunkStore.open(folder)
    prefix = ingest(store, some_tokens(32))
    reader = store.reader(prefix)
    store.close()
    store.close()
    out = np.empty((1, *SMALL.pack_shape), SMALL.numpy_dtype)
    assert reader.read_packs(0, np.array([0]), out).all()  # still usable
    reader.close()
    reader.close()
    for use in (store.prefixes, store.usage, lambda: store.reader(prefix)):
        with pytest.raises(StoreClosed):
            use()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_bytes", -1),
        ("io_concurrency", 0),
        ("deadline_s", 0.0),
        ("eviction", "fifo"),
        ("tenant_bytes", -1),
        ("wait_s", 0.0),
        ("write_s", float("nan")),
    ],
)
def test_the_config_is_validated(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        StoreConfig(**{field: value})


def test_a_file_system_without_direct_io_is_used_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refuses O_DIRECT here is the open call itself, in place of an old tmpfs."""

    def direct(_: int, path: object, flags: int, *__: object) -> int:
        return flags & os.O_DIRECT

    with failing(monkeypatch, "open", errno.EIO, direct), pytest.raises(StoreUnavailable):
        ChunkStore.open(folder)  # a bad disk says nothing of the file system
    with failing(monkeypatch, "open", errno.EINVAL, direct):
        with pytest.warns(UserWarning, match="refuses direct I/O"):
            store = ChunkStore.open(folder)
        with store:
            assert read_all(store, ingest(store, some_tokens(64))).right == SMALL.groups * 4
        with pytest.raises(StoreError, match="no direct I/O"):
            ChunkStore.open(folder, config=StoreConfig(direct_io=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ChunkStore.open(folder, config=StoreConfig(direct_io=False)).close()


# -- making room ---------------------------------------------------------------------------------


def test_a_write_that_cannot_fit_evicts_nothing(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=4 * SIZE)) as store:
        prefixes = [ingest(store, some_tokens(64, seed)) for seed in range(3)]
        before = store.usage()
        with pytest.raises(StoreFull, match="at all"):
            ingest(store, some_tokens(6400, 9))
        pin_prefix(store, prefixes[0].id)
        room = 4 * SIZE - before * 2 // 3  # without the third
        length = next(n for n in range(64, 640, 16) if SMALL.segment_bytes(n) > room)
        with store.reader(prefixes[1]), pytest.raises(StoreFull, match="pinned"):
            ingest(store, some_tokens(length, 9))
        assert all(stored(store, p) for p in prefixes)
        assert store.usage() == before and store.stats()["evicted"] == 0
        assert not list((folder / "tmp").iterdir())


def test_a_writer_that_cannot_begin_holds_nothing(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its parent nor its reservation, even if its folder cannot be removed now."""
    parent = ingest(store, some_tokens(64))
    before = store.usage()
    fails = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "digest_params", fails)
        patch.setattr(LocalWorkspace, "discard", fails)
        with pytest.raises(OSError, match="Input/output error"):
            store.writer(
                fingerprint=FINGERPRINT, layout=SMALL, tokens=some_tokens(64, 1), parent=parent
            )
    assert store.usage() == before
    assert store.delete(parent) == before


_FILL = """
import sys
from tests.support.truth import ingest, some_tokens
from ckv_jax.storage import ChunkStore, StoreConfig, StoreError
folder, bound, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with ChunkStore.open(folder, config=StoreConfig(max_bytes=bound)) as store:
    sys.stdin.readline()
    for i in range(12):
        try:
            ingest(store, some_tokens(64, 1000 * seed + i))
        except StoreError as e:
            print(type(e).__name__, e, file=sys.stderr)
        print(store.usage(), flush=True)
"""


def _run(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_two_processes_keep_one_bound(folder: Path) -> None:
    bound = 4 * SIZE
    ChunkStore.open(folder).close()
    children = [_run(_FILL, folder, bound, seed) for seed in (1, 2)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        found = [int(line) for line in child.communicate(timeout=100)[0].split()]
        assert child.returncode == 0 and len(found) == 12 and max(found) <= bound


_WRITE = """
import sys, time
from tests.support.truth import FINGERPRINT, SMALL, kv_of, some_tokens
from ckv_jax.storage import ChunkStore
store = ChunkStore.open(sys.argv[1])
tokens = some_tokens(64)
writer = store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens)
writer.write(0, kv_of(SMALL, tokens)[:, :, :32])
print("ready", flush=True)
time.sleep(100)
"""


def test_a_killed_writers_reservation_stops_counting_at_once(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=SIZE)) as store:
        child = _run(_WRITE, folder)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert store.usage() == SIZE
        with pytest.raises(StoreFull):
            ingest(store, some_tokens(64, 1))
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        assert store.usage() == 0
        assert read_all(store, ingest(store, some_tokens(64, 1))).refused == 0


# -- bounds that people set --------------------------------------------------------------------


def test_expired_prefixes_go_first_and_on_demand(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=4 * SIZE)) as store:
        prefixes = [ingest(store, some_tokens(64, seed)) for seed in range(3)]
        for prefix, score in zip(prefixes, (9.0, 1.0, 5.0), strict=True):
            read_scores(store, prefix, score)
        update_record(store, prefixes[0].id[:8], retain_s=0.0)
        update_record(store, prefixes[2].id, retain_s=3600)
        assert store.records()[prefixes[2].id] == PrefixRecord(retain_s=3600)
        while store.stats()["evicted"] == 0:
            prefixes.append(ingest(store, some_tokens(64, len(prefixes))))
        assert [stored(store, p) for p in prefixes[:3]] == [False, True, True]  # not the least read
        why = store.why_evicted(prefixes[0].id[:9])
        assert why is not None and why.prefix_id == prefixes[0].id
        assert "made room" in why.reason and "expired" in why.reason
        update_record(store, prefixes[1].id, retain_s=0.0)
        assert prune_store(store, expired=True).removed == 1 and not stored(store, prefixes[1])
        assert stored(store, prefixes[2]) and prune_store(store, expired=True).removed == 0
    lose_index(folder)
    with ChunkStore.open(folder) as store:  # records outlive the index
        assert store.records()[prefixes[2].id].retain_s == 3600


def test_use_refreshes_what_is_retained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        store.set_record(prefix.id, PrefixRecord(retain_s=0.6))
        for _ in range(4):
            now += 0.25
            store.reader(prefix).close()
            assert prune_store(store, expired=True).removed == 0
        now += 0.7
        assert prune_store(store, expired=True).removed == 1


def test_times_of_use_go_forward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order processes write them, unless a clock was ahead."""
    now = began = float(int(time.time()))
    monkeypatch.setattr(time, "time", lambda: now)
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as other:

        def used() -> float:
            ((_, when),) = store.sizes().values()
            return when - began

        tokens = some_tokens(64)
        with store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as slow:
            slow.write(0, kv_of(SMALL, tokens))
            now = began + 100
            with other.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer:
                writer.write(0, kv_of(SMALL, tokens))
                now = began + 200
                prefix = writer.commit()
            assert used() == 200  # not when its writer began
            store.touch(prefix)
            read_scores(store, prefix, 3.0)
            now = began + 300
            other.touch(prefix)
            other.bounds.flush()
            store.bounds.flush()
            assert used() == 300
            assert slow.commit() == prefix
        assert used() == 300
        assert [entry.score for entry in store.index.catalog.entries()] == [6.0]
        now = began + 3600
        store.touch(prefix)
        store.bounds.flush()
        now = began + 400
        assert used() == 3600
        store.touch(prefix)
        store.bounds.flush()
        assert used() == 400


@pytest.mark.parametrize(("hours", "expired"), [(-3, True), (-1, False), (3, False)])
def test_without_the_index_a_prefix_was_last_used_when_it_was_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hours: int, expired: bool
) -> None:
    """Or, if the clock ran ahead when it was written, when the index was made anew."""
    now = time.time()
    with monkeypatch.context() as patch, ChunkStore.open(folder) as store:
        patch.setattr(time, "time", lambda: now + 3600 * hours)
        prefix = ingest(store, some_tokens(64))
        store.set_record(prefix.id, PrefixRecord(retain_s=2 * 3600))
    lose_index(folder)
    monkeypatch.setattr(time, "time", lambda: now)
    with ChunkStore.open(folder) as store:
        assert prune_store(store, expired=True).removed == expired
        now += 2.5 * 3600
        assert prune_store(store, expired=True).removed == (not expired)


def test_priority_comes_before_score(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefixes = [ingest(store, some_tokens(64, seed)) for seed in range(3)]
        for prefix, score in zip(prefixes, (1.0, 9.0, 5.0), strict=True):
            read_scores(store, prefix, score)
        update_record(store, prefixes[0].id, priority=3)
        update_record(store, prefixes[1].id, priority=-1)
        for gone in (1, 2, 0):
            prune_store(store, store.usage() - 1)
            assert not stored(store, prefixes[gone])
        why = store.why_evicted(prefixes[1].id)
        assert why is not None and "priority -1" in why.reason and "pruned" in why.reason


def test_a_tenants_quota_costs_that_tenant(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(tenant_bytes=2 * SIZE)) as store:
        other = [ingest(store, some_tokens(64, seed), salt="b") for seed in range(2)]
        mine = [ingest(store, some_tokens(64, seed), salt="a") for seed in range(3)]
        assert all(stored(store, p, "b") for p in other)
        assert [stored(store, p, "a") for p in mine] == [False, True, True]
        with pytest.raises(StoreFull, match="tenant_bytes"):
            ingest(store, some_tokens(6400), salt="a")
        why = store.why_evicted(mine[0].id, salt="a")
        assert why is not None and "tenant_bytes" in why.reason
        assert store.why_evicted(mine[0].id, salt="b") is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"pinned": 3}', b"\xff" * 4096])
def test_a_wish_that_cannot_be_read_is_a_pin(folder: Path, data: bytes) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        (folder / "pins" / prefix.id).write_bytes(data)
        assert prune_store(store, 0).removed == 0
        for most in (None, -1):
            with pytest.raises(ValueError, match="max_bytes"):
                prune_store(store, most)


def test_pruning_and_asking_why_on_the_command_line(folder: Path, here: Here) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        store.set_record(prefix.id, PrefixRecord(retain_s=0.0))

    assert "got nothing to remove" in here("prune", folder)[2]
    done = json.loads(here("prune", folder, "--expired", "--json")[1])
    assert (done["removed"], done["bytes_after"]) == (1, 0)
    code, _, err = here("inspect", folder, prefix.id)
    assert code == 1 and "was evicted on" in err and "expired" in err


def test_no_room_is_reserved_that_others_cannot_see(folder: Path) -> None:
    """While the index is locked, a bounded store refuses to write, and evicts nothing."""

    config = StoreConfig(max_bytes=4 * SIZE, wait_s=0.3)
    with ChunkStore.open(folder, config=config) as store:
        ingest(store, some_tokens(64))
        with sqlite3.connect(folder / "catalog.sqlite", isolation_level=None) as rival:
            rival.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="no room can be reserved"):
                ingest(store, some_tokens(64, 1))
            rival.execute("ROLLBACK")
        rival.close()
        assert len(store.prefixes()) == 1
