"""Segments that leave a full store, and those that stay."""

from __future__ import annotations

import errno
import math
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage import (
    ChunkStore,
    Prefix,
    PrefixNotFound,
    PrefixRecord,
    StoreClosed,
    StoreConfig,
    StoreError,
    StoreFull,
    StoreUnavailable,
    pin_prefix,
    prune_store,
)
from ckv_jax.storage.place import place
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens


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


def stored(store: ChunkStore, prefix: Prefix) -> bool:
    found = store.longest_prefix(prefix.tokens, fingerprint=FINGERPRINT, layout=SMALL)
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


def test_pins_hold_and_survive_the_index(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        tokens = some_tokens(128)
        ingest(store, tokens[:64])
        pinned, other = ingest(store, tokens), ingest(store, some_tokens(64, seed=1))
        assert pin_prefix(store, pinned.id[:10]) == pinned.id
        with pytest.raises(PrefixNotFound):
            pin_prefix(store, "f" * 32)
    for file in folder.glob("catalog.sqlite*"):
        file.unlink()
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=3 * SIZE)) as store:
        report = prune_store(store, 0)
        assert report.removed == 1 and report.bytes_after == store.usage() > 0
        assert stored(store, pinned) and not stored(store, other)
        room = 3 * SIZE - report.bytes_after
        length = next(n for n in range(64, 640, 16) if SMALL.segment_bytes(n) > room)
        with pytest.raises(StoreFull, match="pinned"):
            ingest(store, some_tokens(length, seed=2))
        pin_prefix(store, pinned.id, pinned=False)
        assert prune_store(store, 0).bytes_after == 0
        with pytest.raises(ValueError, match="max_bytes"):
            prune_store(store, -1)


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
    real, code = place.os.open, errno.EIO

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & place.os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(place.os, "open", refuse)
    with pytest.raises(StoreUnavailable):  # a bad disk says nothing of the file system
        ChunkStore.open(folder)
    code = errno.EINVAL
    with pytest.warns(UserWarning, match="refuses direct I/O"):
        store = ChunkStore.open(folder)
    with store:
        assert read_all(store, ingest(store, some_tokens(64))).right == SMALL.groups * 4
    with pytest.raises(StoreError, match="no direct I/O"):
        ChunkStore.open(folder, config=StoreConfig(direct_io=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChunkStore.open(folder, config=StoreConfig(direct_io=False)).close()
