"""What cannot be looked at is not gone: it stays, and others go in its place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckv_jax.storage import (
    ChunkStore,
    StoreConfig,
    StoreError,
    StoreUnavailable,
    pin_prefix,
    prune_store,
    verify_store,
)
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens


@contextmanager
def hidden(monkeypatch: pytest.MonkeyPatch, path: Path, moved: int = errno.EIO) -> Iterator[None]:
    """One name cannot be looked at, nor renamed, which is said by the error `moved`."""
    lstat, rename = os.lstat, os.rename

    def refuse(
        code: int, real: Callable[..., object], at: object, *args: object, **named: object
    ) -> object:
        if os.fspath(at) == str(path):  # type: ignore[call-overload]
            raise OSError(code, os.strerror(code))
        return real(at, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda at, *a, **n: refuse(errno.EIO, lstat, at, *a, **n))
        patch.setattr(os, "rename", lambda at, *a, **n: refuse(moved, rename, at, *a, **n))
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


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, segment_id: str) -> Iterator[None]:
    """The folder of one segment cannot be opened."""
    real = os.open

    def call(path: object, *args: object, **named: object) -> object:
        if path == segment_id:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", call)
        yield


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
