"""A segment's writer: what it takes, and what it says of a bad disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.errors import StoreError, StoreFull, StoreUnavailable
from ckv_jax.storage.place.disk import DiskTimeout
from ckv_jax.storage.place.files import Workspace
from ckv_jax.storage.place.local import LocalWorkspace
from ckv_jax.storage.segment import writer as writers
from ckv_jax.storage.segment.arrays import ArrayWriter
from ckv_jax.storage.segment.manifest import Manifest, draft_manifest
from ckv_jax.storage.segment.writer import SegmentWriter
from tests.support.truth import FINGERPRINT, SMALL, kv_of, read_all, some_tokens

SECONDS = 20.0
ONE = Layout(num_layers=1, num_kv_heads=1, head_dim=8, pack_layers=1, probe="none")
"""A chunk is one write."""


class Desk:
    """Where segments are written, and what becomes of them."""

    def __init__(self, root: Path) -> None:
        (root / "tmp").mkdir()
        self.root = root
        self.files: dict[str, bytes] = {}
        self.draft: Any = None
        self.released = threading.Semaphore(0)
        self._disk_timeout = DiskTimeout(SECONDS)

    def publish(self, draft: Manifest, workspace: Workspace) -> Any:
        paths = [path for path in workspace.path.rglob("*") if path.is_file()]
        self.files = {str(p.relative_to(workspace.path)): p.read_bytes() for p in paths}
        self.draft = draft
        return "published"

    def writer(
        self,
        tokens: np.ndarray,
        layout: Layout = SMALL,
        write_s: float = SECONDS,
        codec: Any = None,
    ) -> SegmentWriter:
        draft = draft_manifest(
            layout=layout, fingerprint=FINGERPRINT, tenant="", provenance="exact", tokens=tokens,
            start=bytes(16), parent=None, first_chunk=0, order=None,
        )  # fmt: skip
        return SegmentWriter(
            draft, LocalWorkspace(self.root), direct=False, params=None, codec=codec,
            publish=self.publish, release=self.released.release, room=lambda *_: False,
            disk_timeout=self._disk_timeout,
            write_s=write_s,
        )  # fmt: skip

    def is_left(self) -> bool:
        """Whether one writer has let go of all it had, and has done so once."""
        assert self.released.acquire(timeout=SECONDS)
        return not self.released.acquire(blocking=False) and not list((self.root / "tmp").iterdir())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made._disk_timeout.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until this is set."""
    go, real = threading.Event(), ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> None:
        assert go.wait(SECONDS)
        real(self, entry, data, offset)

    monkeypatch.setattr(ArrayWriter, "put", put)
    yield go
    go.set()


# -- what it takes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 16, 2, 8), (5, 2, 16, 2, 8), (4, 1, 16, 2, 8), (4, 3, 16, 2, 8), (4, 2, 16, 1, 8),
        (4, 2, 16, 3, 8), (4, 2, 16, 2, 7), (4, 2, 16, 2, 9), (4, 2, 0, 2, 8), (4, 2, 16, 2),
        (4, 2, 16, 2, 8, 1),
    ],
    ids=str,
)  # fmt: skip
def test_kv_of_another_shape_is_refused(desk: Desk, shape: tuple[int, ...]) -> None:
    with desk.writer(some_tokens(40)) as writer:
        with pytest.raises(ValueError, match="kv: got"):
            writer.write(0, np.zeros(shape, SMALL.numpy_dtype))
        with pytest.raises(ValueError, match="kv: got float32"):
            writer.write(0, np.zeros((4, 2, 16, 2, 8), np.float32))
        writer.write(0, np.zeros((4, 2, 16, 2, 8), SMALL.numpy_dtype))


# -- what lies on the disk -----------------------------------------------------------------------

APART = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "pack_layers": 1, "heads_apart": True}
LAYOUTS = {
    "probe": SMALL,
    "digest": Layout(num_layers=3, num_kv_heads=2, head_dim=8, digest="bounds", probe="heads"),
    "alike": Layout(**APART, probe="none", grouping="alike"),
    "alike, digest": Layout(**APART, probe="none", grouping="alike", digest="means"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_how_much_is_written_at_once_does_not_matter(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    tokens = some_tokens(16 * 9 + 5)
    kv, found = kv_of(layout, tokens), []
    for chunks in (1, 4, 100):
        monkeypatch.setattr(writers, "_BLOCK_BYTES", chunks * layout.groups * layout.pack_bytes)
        with desk.writer(tokens, layout) as writer:
            writer.write(0, kv[:, :, : 16 * 3])
            writer.write(16 * 3, kv[:, :, 16 * 3 :])
            writer.commit()
        assert desk.is_left()
        tables = (desk.draft.pack_crc, desk.draft.probe_crc, desk.draft.digest_crc)
        data = {name: data for name, data in desk.files.items() if name != "manifest.json"}
        found.append((data, [table.tolist() for table in tables]))
    assert found[0] == found[1] == found[2]


# -- bad disks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["write", "commit"])
def test_a_disk_that_takes_nothing_is_given_up(
    desk: Desk, held: threading.Event, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """What was begun ends behind the caller's back, and then everything is let go."""
    monkeypatch.setattr(writers, "_BLOCK_BYTES", 1)
    tokens = some_tokens(64 if last == "write" else 16)
    kv = kv_of(ONE, tokens)
    with desk.writer(tokens, ONE, write_s=0.05) as writer:
        calls: list[Callable[[], Any]] = [
            lambda at=at: writer.write(at, kv[:, :, at : at + 16]) for at in (0, 16, 32, 48)
        ]
        for call in calls[:3] if last == "write" else calls[:1]:
            call()
        with pytest.raises(StoreUnavailable, match=r"the disk has taken nothing for 0\.05 s"):
            calls[3]() if last == "write" else writer.commit()
    assert list((desk.root / "tmp").iterdir())
    held.set()
    assert desk.is_left() and desk.draft is None


# -- a block's memory ----------------------------------------------------------------------------


def test_a_slow_write_keeps_its_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pack is written last: were its memory given to a later block, that would land."""
    ahead = writers._BLOCKS_AHEAD
    monkeypatch.setattr(writers, "_BLOCK_BYTES", 1)  # a block for each chunk
    tokens = some_tokens(16 * 4 * ahead)
    kv = kv_of(SMALL, tokens)
    others = threading.Semaphore(0)
    real, lock, puts = ArrayWriter.put, threading.Lock(), []

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> Any:
        with lock:
            puts.append(entry)
            first = len(puts) == 1
        if first:  # until as many others as can be written without this block's memory have been
            for _ in range((ahead - 1) * SMALL.groups):
                assert others.acquire(timeout=SECONDS)
        real(self, entry, data, offset)
        if not first:
            others.release()

    monkeypatch.setattr(ArrayWriter, "put", put)
    with (
        ChunkStore.open(folder) as store,
        store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer,
    ):
        for start in range(0, len(tokens), 64):
            writer.write(start, kv[:, :, start : start + 64])
        prefix = writer.commit()
        outcome = read_all(store, prefix)
    assert (outcome.wrong, outcome.refused) == (0, 0)
    assert outcome.right == SMALL.groups * prefix.num_chunks


# -- writing -------------------------------------------------------------------------------------


def test_a_writer_that_is_left_waits_for_its_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread may write into memory or a folder that its writer has given up."""
    running, go, ended = threading.Event(), threading.Event(), list[int]()
    real = ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> None:
        running.set()
        assert go.wait(SECONDS)
        real(self, entry, data, offset)
        ended.append(entry)

    monkeypatch.setattr(ArrayWriter, "put", put)
    tokens = some_tokens(32)
    with ChunkStore.open(folder) as store:
        writer = store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens)
        writer.write(0, kv_of(SMALL, tokens))
        assert running.wait(SECONDS)
        threading.Timer(0.05, go.set).start()
        writer.close()
        count = len(ended)
        assert count >= SMALL.groups
        assert not list((folder / "tmp").iterdir()) and store.usage() == 0
    assert len(ended) == count


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreUnavailable)]
)
def test_an_error_of_the_disk_is_told_by_whatever_is_called_next(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[StoreError]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    tokens = some_tokens(32)
    kv = kv_of(ONE, tokens)
    for call in ("write", "commit"):
        with desk.writer(tokens, ONE) as writer, monkeypatch.context() as patch:
            patch.setattr(ArrayWriter, "put", refuse)
            writer.write(0, kv if call == "commit" else kv[:, :, :16])
            with pytest.raises(expected, match=str(desk.root / "tmp")):
                writer.read_back(0, 0, np.zeros((1, *ONE.pack_shape), ONE.numpy_dtype))
            with pytest.raises(expected):
                writer.write(16, kv[:, :, 16:]) if call == "write" else writer.commit()
        assert desk.is_left() and desk.draft is None
