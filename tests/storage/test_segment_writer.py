"""A segment's writer: what it takes, what it hands to the disk, what it says of a bad one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from place_support import open_files

from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.errors import StoreError, StoreFull, StoreUnavailable
from ckv_jax.storage.place.disk import DiskTimeout
from ckv_jax.storage.place.files import Workspace
from ckv_jax.storage.place.local import LocalWorkspace
from ckv_jax.storage.segment import writer as writers
from ckv_jax.storage.segment.arrays import ArraySpec, ArrayWriter, aligned
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


def test_blocks_follow_each_other_and_only_the_last_ends_within_a_chunk(desk: Desk) -> None:
    tokens = some_tokens(40)
    kv = kv_of(SMALL, tokens)
    with desk.writer(tokens) as writer:
        for first, block in ((16, kv[:, :, 16:32]), (0, kv_of(SMALL, some_tokens(41)))):
            with pytest.raises(ValueError, match=rf"got {first} .* from token 0 on, up to 40"):
                writer.write(first, block)
        writer.write(0, kv[:, :, :16])
        for first in (0, 32):
            with pytest.raises(ValueError, match="from token 16 on"):
                writer.write(first, kv[:, :, 16:24])
        writer.write(16, kv[:, :, 16:24])
        with pytest.raises(ValueError, match=r"got 24 .* each but the last whole"):
            writer.write(24, kv[:, :, 24:])
        with pytest.raises(ValueError, match="got KV of 24, expected all 40"):
            writer.commit()
    assert desk.is_left() and desk.draft is None


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


def test_a_codec_s_error_is_told_as_it_is(desk: Desk) -> None:
    class Bad:
        def encode(self, packs: np.ndarray, layout: Layout) -> Any:
            raise ArithmeticError("no such number")

        decode = encode

    tokens = some_tokens(32)
    kv = kv_of(ONE, tokens)
    with desk.writer(tokens, ONE, codec=Bad()) as writer:
        writer.write(0, kv[:, :, :16])
        with pytest.raises(ArithmeticError):
            writer.read_back(0, 0, np.zeros((1, *ONE.pack_shape), ONE.numpy_dtype))
        with pytest.raises(ArithmeticError, match="no such number"):
            writer.write(16, kv[:, :, 16:])
    assert desk.is_left()


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


def test_a_disk_that_goes_on_is_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long all of it takes: four runs of alike tokens are grouped, one in each wait."""
    go, told, waits, real = threading.Semaphore(0), threading.Semaphore(0), [], writers.wait

    def grouping(done: int, total: int) -> None:
        assert 0 < done <= total == 4
        told.release()
        assert go.acquire(timeout=SECONDS)

    def wait(jobs: Any, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            assert told.acquire(timeout=SECONDS)
        go.release()
        if len(waits) < 4:
            assert told.acquire(timeout=SECONDS)
        else:
            real(jobs, SECONDS)

    monkeypatch.setattr(writers, "wait", wait)
    tokens, layout = some_tokens(16 * 9 + 5), LAYOUTS["alike"]
    with desk.writer(tokens, layout) as writer:
        writer.write(0, kv_of(layout, tokens))
        assert writer.commit(grouping) is not None
    assert waits == [SECONDS] * 4 and desk.is_left()


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


def test_three_blocks_may_wait_for_a_slow_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> Any:
        assert go.wait(SECONDS)
        real(self, entry, data, offset)

    monkeypatch.setattr(writers, "_BLOCK_BYTES", 1)  # a block for each chunk
    monkeypatch.setattr(ArrayWriter, "put", put)
    size = SMALL.chunk_tokens
    tokens = some_tokens(4 * size)
    kv = kv_of(SMALL, tokens)
    with (
        ThreadPoolExecutor(1) as caller,
        ChunkStore.open(folder) as store,
        store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer,
    ):
        blocks = [
            caller.submit(writer.write, start, kv[:, :, start : start + size])
            for start in range(0, len(tokens), size)
        ]
        try:
            blocks[2].result(SECONDS)
            assert not blocks[3].done()
        finally:
            go.set()
        blocks[3].result(SECONDS)
        assert writer.commit().num_tokens == len(tokens)


# -- the files of one array ----------------------------------------------------------------------


# -- writing -------------------------------------------------------------------------------------

PAGE = os.sysconf("SC_PAGESIZE")


def entries_of(size: int, count: int = 5) -> ArraySpec:
    """An array of so many entries of `size` bytes, three in a shard file."""
    return ArraySpec(
        name="some", data_type="uint8", shape=(count, size), shard=(3, size), inner=(1, size),
        entries=count, parts=1, attributes={},
    )  # fmt: skip


def why_not_direct(folder: Path) -> OSError | None:
    """None: files in a folder can be written past the page cache, page by page."""
    path = folder / "probe"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwrite(fd, aligned(PAGE), 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error
    finally:
        path.unlink(missing_ok=True)
    return None


def test_an_array_s_files_are_nobody_else_s_and_none_stays_open(tmp_path: Path) -> None:
    direct = why_not_direct(tmp_path) is None
    before = os.umask(0)
    try:
        writer = ArrayWriter(tmp_path, entries_of(PAGE), direct=direct)
    finally:
        os.umask(before)
    paths = [tmp_path / "some" / name for name in ("c.0.0", "c.1.0", "zarr.json")]
    assert sorted((tmp_path / "some").iterdir()) == paths
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE((tmp_path / "some").stat().st_mode) == 0o700
    assert open_files(tmp_path) == (4 if direct else 2)
    writer.close()
    writer.close()
    assert open_files(tmp_path) == 0


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_what_the_kernel_takes_bit_by_bit_is_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Entries, parts of them and indexes; and as many bytes as it gives at once when read back."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:most]], at))
    spec, rows = entries_of(24), np.arange(5 * 24, dtype=np.uint8).reshape(5, 24)
    writer = ArrayWriter(tmp_path, spec, direct=False)
    writer.put(0, rows[:3])
    writer.put(3, rows[3])
    writer.put(4, rows[4, :10])
    writer.put(4, rows[4, 10:], 10)
    out, part = np.zeros((2, 24), np.uint8), np.zeros((2, 3), np.uint8)
    writer.get(3, out)
    writer.get(1, part, 20)
    assert out.tolist() == rows[3:].tolist() and part.tobytes() == rows[1:3].tobytes()[20:26]
    steps: list[int] = []
    writer.finish(lambda: steps.append(open_files(tmp_path)))
    assert steps == [2, 2] and open_files(tmp_path) == 0
    for shard, there in enumerate((rows[:3], rows[3:])):
        data = (tmp_path / spec.file(shard)).read_bytes()
        assert data == there.tobytes() + spec.index(shard)


class Disk:
    """Counts the bytes that go past the page cache, and refuses them if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.past: list[int] = []
        self.refuses: int | None = None
        self._real: Callable[..., int] = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._write)

    def _write(self, fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self.past.append(len(data))
            if self.refuses is not None:
                raise OSError(self.refuses, os.strerror(self.refuses))
        return self._real(fd, data, offset)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    if (why := why_not_direct(tmp_path)) is not None:
        pytest.skip(f"no direct I/O on this file system: {why}")
    return Disk(monkeypatch)


def test_a_disk_of_larger_blocks_is_asked_once(tmp_path: Path, disk: Disk) -> None:
    writer, memory = ArrayWriter(tmp_path, entries_of(PAGE), direct=True), aligned(PAGE)
    disk.refuses = errno.EINVAL
    for entry in range(4):
        memory[:] = entry + 1
        writer.put(entry, memory)
    assert disk.past == [PAGE]
    out = np.empty((1, PAGE), np.uint8)
    for entry in range(4):
        writer.get(entry, out)
        assert (out == entry + 1).all()
    writer.close()


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
