"""Only proof of damage is damage: what could not be looked at is neither bad nor free to go.

Errors of the kernel that cannot be had on demand are put in the place of its answer to one call.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage import (
    ChunkStore,
    StoreConfig,
    StoreError,
    StoreFull,
    StoreUnavailable,
    pin_prefix,
    prune_store,
    verify_store,
)
from tests.faults.tally import CONFIG, LAYOUT, prompts, serve
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens

CALLS = ("open", "lstat", "stat", "listdir", "pread", "fstat", "rename")


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, fails: Callable[[int], bool]
) -> Iterator[list[int]]:
    """The k-th call of an `os` function fails where `fails(k)`; yields the count of calls."""
    real, calls = getattr(os, name), [0]

    def call(*args: object, **named: object) -> object:
        calls[0] += 1
        if fails(calls[0]):
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        yield calls


def descriptors(folder: Path) -> int:
    """Open files in a folder."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/")
    return found


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("name", ["open", "lstat", "listdir"])
def test_nothing_pinned_or_in_use_is_evicted_at_any_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        parent = ingest(store, tokens[:64])
        pinned, read = ingest(store, tokens), ingest(store, some_tokens(64, 1))
        pin_prefix(store, pinned.id)
    for k in range(1, 40):
        with ChunkStore.open(folder) as reader, reader.reader(read):
            with failing(monkeypatch, name, code, lambda n, k=k: n == k) as calls:
                try:
                    with ChunkStore.open(folder) as store:
                        prune_store(store, 0)
                except StoreError:
                    pass  # a typed error, and nothing else
            for kept in (parent, pinned, read):
                outcome = read_all(reader, kept)
                assert (outcome.refused, outcome.wrong) == (0, 0), (name, k)
        if calls[0] < k:
            break
    with ChunkStore.open(folder) as store:
        assert prune_store(store, 0).removed == 1  # once nobody reads it


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("name", ["open", "lstat", "pread", "fstat"])
def test_no_read_that_failed_marks_anything(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    with ChunkStore.open(pristine, config=CONFIG) as store:
        for k in range(1, 400, 7):
            with failing(monkeypatch, name, code, lambda n, k=k: n in (k, k + 1)) as calls:
                assert serve(store).wrong == 0
            assert store.stats()["quarantined"] == 0, (name, k)
            if calls[0] < k:
                break
        with failing(monkeypatch, name, code, lambda _: True):
            assert serve(store).wrong == 0
        assert store.stats()["quarantined"] == 0
        assert serve(store).whole


def test_out_of_descriptors_nothing_healthy_is_lost(pristine: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert serve(store).whole
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        try:
            assert serve(store).wrong == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert store.stats()["quarantined"] == 0
        assert serve(store).whole


def test_a_segment_that_cannot_be_opened_is_unread_and_not_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = dataclasses.replace(LAYOUT, reordered=True)
    order = np.random.default_rng(0).permutation(64)
    with ChunkStore.open(folder, config=CONFIG) as store:
        prefix = ingest(store, some_tokens(64), layout=layout, order=order)
        out = np.empty((4, *layout.stored_shape), layout.stored_dtype)
        probe = np.empty((64, layout.probe_heads, layout.head_dim), layout.numpy_dtype)
        with failing(monkeypatch, "open", errno.EMFILE, lambda _: True):
            reader = store.reader(prefix)
        with reader:
            assert not reader.read_packs(0, np.arange(4), out).any() and not out.any()
            assert reader.read_probe(layout.probe_layers[0], probe) == 0
            assert reader.read_digest() is None
            with pytest.raises(StoreUnavailable, match="its order cannot be read"):
                _ = reader.order
        counts = store.stats()
        assert counts["unread"] > 4
        assert counts["bad_packs"] == counts["gone"] == counts["quarantined"] == 0
        assert store.delete(prefix) > 0
        with store.reader(prefix) as reader:
            assert not reader.read_packs(0, np.arange(4), out).any()
        counts = store.stats()
        assert counts["bad_packs"] == counts["gone"] == 4


def test_a_long_chat_holds_no_descriptor_for_each_turn(folder: Path) -> None:
    tokens = some_tokens(16 * 30)
    with ChunkStore.open(folder) as store:
        for turn in range(30):
            prefix = ingest(store, tokens[: 16 * (turn + 1)])
        assert len(prefix.spans) == 30
        before = descriptors(folder)
        with store.reader(prefix), ChunkStore.open(folder) as rival:
            assert descriptors(folder) - before < 10
            assert prune_store(rival, 0).removed == 0


def test_a_repair_takes_no_timeout_for_damage(folder: Path) -> None:
    """The disk that does not answer is a FIFO in the place of a shard; then it is back."""
    with ChunkStore.open(folder, config=StoreConfig(deadline_s=0.3, direct_io=False)) as store:
        prefixes = [ingest(store, some_tokens(200, seed), layout=LAYOUT) for seed in range(2)]
        shard = sorted((folder / "segments").glob("*/*/packs/c.0.*"))[0]
        away = shard.rename(folder.parent / "away")
        real = store.open_segment

        def slow(*args: object) -> object:  # opened while all was well
            away.rename(shard) if not shard.exists() else None
            segment = real(*args)
            if segment.id == shard.parents[1].name:
                shard.rename(away)
                os.mkfifo(shard)
            return segment

        away.rename(shard)
        store.open_segment = slow  # type: ignore[method-assign,assignment]
        report = verify_store(store, repair=True)
        assert not report.ok and len(report.unread) == 1 and not report.damages
        assert not report.removed and not report.quarantined
        os.close(os.open(shard, os.O_RDWR))  # lets the abandoned read go
        shard.unlink()
        away.rename(shard)
        store.open_segment = real  # type: ignore[method-assign]
        assert verify_store(store).ok
        assert all(read_all(store, p).refused == 0 for p in prefixes)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOLCK])
def test_every_failed_step_of_a_write_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    with ChunkStore.open(folder) as store:
        kept = ingest(store, some_tokens(64))
        other = ingest(store, some_tokens(64, 99))
        assert read_all(store, kept).refused == 0
        assert store.bounds.remove(other.spans[0].segment_id, "test")
        usage, before = store.usage(), descriptors(folder)
        for k in range(1, 120, 3):
            done = None
            with (
                failing(monkeypatch, name, code, lambda n, k=k: n == k) as calls,
                suppress(StoreError),
            ):
                done = ingest(store, some_tokens(64, k))
            assert not list((folder / "tmp").iterdir()), (name, k)
            assert read_all(store, kept).refused == 0
            stored = store.longest_prefix(some_tokens(64, k), fingerprint=FINGERPRINT, layout=SMALL)
            assert stored.num_tokens in (0, 64)
            assert done is None or stored.num_tokens == 64
            if stored.num_tokens:
                store.bounds.remove(stored.spans[0].segment_id, "test")
            assert store.usage() == usage, (name, k)
            assert descriptors(folder) <= before, (name, k)
            if calls[0] < k:
                break


def test_an_error_of_a_lock_leaves_eviction_with_a_typed_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    with ChunkStore.open(folder) as store:
        ingest(store, some_tokens(64))

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "fcntl", refuse)
            with pytest.raises(StoreError, match="cannot be locked"):
                prune_store(store, 0)
        assert len(store.prefixes()) == 1 and prune_store(store, 0).removed == 1


def test_failed_opens_leak_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(folder) as store:
        ingest(store, some_tokens(64))
    with ChunkStore.open(folder):
        pass
    before = descriptors(folder)
    for name in ("open", "fstat", "lstat", "listdir", "stat"):
        for k in range(1, 30):
            with (
                failing(monkeypatch, name, errno.EIO, lambda n, k=k: n == k) as calls,
                suppress(StoreError),
            ):
                ChunkStore.open(folder).close()
            assert descriptors(folder) <= before, (name, k)
            if calls[0] < k:
                break
    assert not list((folder / "tmp").iterdir())
    with ChunkStore.open(folder) as store:
        assert len(store.prefixes()) == 1


def test_a_reader_outlives_its_store_even_at_damage(folder: Path) -> None:
    store = ChunkStore.open(folder)
    prefix = ingest(store, some_tokens(64))
    with store.reader(prefix) as reader:
        store.close()
        for shard in (folder / "segments").glob("*/*/packs/c.*"):
            os.truncate(shard, 10)
        out = np.ones((4, *SMALL.pack_shape), SMALL.numpy_dtype)
        assert not reader.read_packs(0, np.arange(4), out).any()


def test_an_index_is_kept_when_the_folder_cannot_be_listed(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(pristine, config=CONFIG) as store:
        for prefix in store.prefixes():
            shape = (LAYOUT.groups, prefix.spans[-1].segment_chunks)
            store.save_scores(prefix.spans[-1].segment_id, np.ones(shape), np.ones(shape))
    with (
        failing(monkeypatch, "listdir", errno.EIO, lambda _: True),
        ChunkStore.open(pristine, config=CONFIG) as store,
    ):
        assert serve(store).whole  # reads go on
        with pytest.raises(StoreError, match="cannot be read"):
            prune_store(store, 0)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert all(store.load_scores(p.spans[-1].segment_id) for p in store.prefixes())
        with pytest.raises(StoreFull):
            _tiny(pristine)
        assert len(prompts()) == len(store.prefixes())


def _tiny(folder: Path) -> None:
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=1000)) as store:
        ingest(store, some_tokens(300, 5))
