"""Only proof of damage is damage: what could not be looked at is neither bad nor free to go.

Errors of the kernel that cannot be had on demand are put in the place of its answer to one call.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import failing, hurt, open_files, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    StoreConfig,
    StoreError,
    StoreUnavailable,
    pin_prefix,
    prune_store,
    verify_store,
)
from tests.faults.tally import CONFIG, LAYOUT, prompts, serve
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, read_probe, some_tokens


@pytest.mark.parametrize(
    ("name", "code"),
    [("open", errno.EMFILE), ("open", errno.EIO), ("lstat", errno.EIO), ("listdir", errno.EIO)],
)
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
            with failing(monkeypatch, name, code, lambda n, *_, k=k: n == k) as calls:
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


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("open", errno.EMFILE), ("open", errno.EIO), ("lstat", errno.ESTALE), ("pread", errno.EIO),
        ("fstat", errno.ESTALE),
    ],
)  # fmt: skip
def test_no_read_that_failed_marks_anything(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    with ChunkStore.open(pristine, config=CONFIG) as store:
        for k in range(1, 400, 7):
            with failing(monkeypatch, name, code, lambda n, *_, k=k: n in (k, k + 1)) as calls:
                assert serve(store).wrong == 0
            assert store.stats()["quarantined"] == 0, (name, k)
            if calls[0] < k:
                break
        with failing(monkeypatch, name, code):
            assert serve(store).wrong == 0
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
        with failing(monkeypatch, "open", errno.EMFILE):
            reader = store.reader(prefix)
        with reader:
            assert not reader.read_packs(0, np.arange(4), out).any() and not out.any()
            assert read_probe(reader, layout.probe_layers[0], probe) == 0
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


def test_a_bad_pack_whose_folder_cannot_be_looked_at_is_a_miss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder, config=CONFIG) as store:
        prefix = ingest(store, some_tokens(64))
        hurt(min(segment_folder(folder, prefix).glob("packs/c.*")), 3)
        out = np.empty((1, *SMALL.pack_shape), SMALL.numpy_dtype)
        with store.reader(prefix) as reader:
            with failing(
                monkeypatch,
                "lstat",
                errno.EIO,
                lambda _, path, *__: str(path).endswith("manifest.json"),
            ):
                assert not reader.read_packs(0, np.arange(1), out).any()
            counts = store.stats()
            assert counts["bad_packs"] == 1 and counts["quarantined"] == counts["gone"] == 0
            assert not reader.read_packs(0, np.arange(1), out).any()
        assert store.stats()["quarantined"] == 1


def test_a_long_chat_holds_no_descriptor_for_each_turn(folder: Path) -> None:
    tokens = some_tokens(16 * 12)
    with ChunkStore.open(folder) as store:
        for turn in range(12):
            prefix = ingest(store, tokens[: 16 * (turn + 1)])
        assert len(prefix.spans) == 12
        before = open_files(folder)
        with store.reader(prefix), ChunkStore.open(folder) as rival:
            assert open_files(folder) - before < 10
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


def test_an_index_is_kept_when_the_folder_cannot_be_listed(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(pristine, config=CONFIG) as store:
        for prefix in store.prefixes():
            shape = (LAYOUT.groups, prefix.spans[-1].segment_chunks)
            store.save_scores(prefix.spans[-1].segment_id, np.ones(shape), np.ones(shape))
    with (
        failing(monkeypatch, "listdir", errno.EIO),
        ChunkStore.open(pristine, config=CONFIG) as store,
    ):
        assert serve(store).whole  # reads go on
        with pytest.raises(StoreError, match="cannot be read"):
            prune_store(store, 0)
    with ChunkStore.open(pristine, config=CONFIG) as store:
        assert all(store.load_scores(p.spans[-1].segment_id) for p in store.prefixes())
        assert len(prompts()) == len(store.prefixes())


# -- what cannot be looked at --------------------------------------------------------------------


@contextmanager
def hidden(monkeypatch: pytest.MonkeyPatch, path: Path, moved: int = errno.EIO) -> Iterator[None]:
    """One name cannot be looked at, nor renamed, which is said by the error `moved`."""

    def named(_: int, at: Any, *__: object) -> bool:
        return os.fspath(at) == str(path)

    with (
        failing(monkeypatch, "lstat", errno.EIO, named),
        failing(monkeypatch, "rename", moved, named),
    ):
        yield


def test_a_living_writers_room_stays_its_own_when_it_cannot_be_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(max_bytes=1 << 20)
    with ChunkStore.open(folder, config=config) as store, ChunkStore.open(folder) as other:
        with store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=some_tokens(64)):
            (entry,) = (folder / "tmp").iterdir()
            before = other.usage()
            assert before
            with hidden(monkeypatch, entry):
                assert other.usage() == before
            assert other.usage() == before
        assert other.usage() == 0


@pytest.mark.parametrize("moved", [errno.EIO, errno.ENOENT])
def test_what_could_neither_be_removed_nor_looked_at_is_not_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """Even where moving it aside says that a name is missing: that may be the other name."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        id_ = prefix.spans[0].segment_id
        with hidden(monkeypatch, folder / "segments" / id_[:2] / id_, moved):
            with pytest.raises(StoreUnavailable):
                store.bounds.remove(id_, "test")
            with pytest.raises(StoreUnavailable):
                prune_store(store, 0)
        assert store.usage() and [p.id for p in store.prefixes()] == [prefix.id]
        with hidden(monkeypatch, folder / "store.json"), pytest.raises(StoreUnavailable):
            store.files.require()
        assert prune_store(store, 0).removed == 1


# -- one manifest that can never be read -------------------------------------------------------


def unreadable(
    monkeypatch: pytest.MonkeyPatch, segment_id: str
) -> AbstractContextManager[list[int]]:
    """The folder of one segment cannot be opened."""
    return failing(monkeypatch, "open", errno.EIO, lambda _, path, *__: path == segment_id)


def there(folder: Path) -> set[str]:
    """Ids of all segments on the disk."""
    return {path.name for path in (folder / "segments").glob("*/*")}


@pytest.mark.parametrize("indexed", [True, False])
def test_a_manifest_that_cannot_be_read_stays_and_others_are_evicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    with ChunkStore.open(folder) as store:
        (lost,) = ingest(store, some_tokens(64)).spans
        pinned = ingest(store, some_tokens(64, 1))
        pin_prefix(store, pinned.id)
        ingest(store, some_tokens(64, 2))
        size = store.usage() // 3
    if not indexed:
        (folder / "catalog.sqlite").unlink()
    with unreadable(monkeypatch, lost.segment_id):
        with ChunkStore.open(folder, config=StoreConfig(max_bytes=4 * size)) as store:
            ingest(store, some_tokens(64, 3))
            (new,) = ingest(store, some_tokens(64, 4)).spans
            assert store.stats()["evicted"]
        kept = {pinned.spans[0].segment_id, lost.segment_id}
        assert there(folder) >= {*kept, new.segment_id}
        with ChunkStore.open(folder) as store:
            (unread,) = verify_store(store).unread
            assert (unread.segment_id, unread.chunk) == (lost.segment_id, 0)  # nothing of it
            assert prune_store(store, 0).removed
        assert there(folder) == kept
    with ChunkStore.open(folder) as store:
        assert read_all(store, pinned).refused == 0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_a_pinned_prefix_needs_stays_when_some_of_it_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    tokens = some_tokens(192)
    with ChunkStore.open(folder) as store:
        for end in (64, 128, 192):
            pinned = ingest(store, tokens[:end])
        pin_prefix(store, pinned.id)
        ingest(store, some_tokens(64, 2))
    ids = [span.segment_id for span in pinned.spans]
    with unreadable(monkeypatch, ids[which]):
        with ChunkStore.open(folder) as store:  # the index knows what the prefix needs
            assert prune_store(store, 0).removed == 1
        assert there(folder) == set(ids)
        (folder / "catalog.sqlite").unlink()
        with ChunkStore.open(folder) as store, pytest.raises(StoreError, match=pinned.id[:8]):
            prune_store(store, 0)
    with ChunkStore.open(folder) as store:
        assert read_all(store, pinned).refused == 0
