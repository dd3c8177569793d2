"""The files of one array of a segment: where an entry lies, what others are told of it, writing."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from place_support import open_files

from ckv_jax.storage.layout import Layout
from ckv_jax.storage.segment.arrays import ArraySpec, ArrayWriter, array_specs
from ckv_jax.storage.segment.packing import aligned

SHAPE: dict[str, Any] = {"num_layers": 5, "num_kv_heads": 3, "head_dim": 8, "chunk_tokens": 8}
LAYOUTS = {
    "packs of 4": Layout(**SHAPE),
    "packs of 1": Layout(**SHAPE, pack_layers=1),
    "K and V apart": Layout(**SHAPE, pack_layers=1, kv_together=False),
    "heads apart": Layout(**SHAPE, pack_layers=2, heads_apart=True),
}
MISSING = [2**64 - 1] * 2


# -- where an entry lies -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_shard_s_index_says_where_each_pack_is_read(layout: Layout) -> None:
    """In zarr's order: layers, chunks, keys and values, heads. What the last shard lacks is marked
    as missing."""
    spec = array_specs(layout, 8 * 3 + 1)["packs"]
    apart = (len(range(0, 2, spec.inner[2])), 3 // spec.inner[4])
    grid = (spec.shard[0] // spec.inner[0], 4, *apart)
    rows = grid[0] * spec.parts
    assert spec.parts == layout.parts == np.prod(apart)
    assert spec.shards == -(-layout.groups // rows) and spec.entries == layout.groups * 4
    for shard in range(spec.shards):
        data = spec.index(shard)
        assert int.from_bytes(data[-4:], "little") == google_crc32c.value(data[:-4])
        table = np.frombuffer(data[:-4], "<u8").reshape(*grid, 2)
        for step, chunk, kind, head in np.ndindex(*grid):
            row = (shard * grid[0] + step) * spec.parts + kind + head
            found = table[step, chunk, kind, head].tolist()
            if row >= layout.groups:
                assert found == MISSING
                continue
            where, (offset,) = spec.offsets(row, np.array([chunk]))
            assert (where, [int(offset), spec.entry_bytes]) == (shard, found)
            assert offset == (row % rows * 4 + chunk) * layout.pack_bytes
        there = min(rows, layout.groups - shard * rows) * 4
        assert spec.stored(shard) == there
        assert spec.file_bytes(shard) == there * layout.pack_bytes + len(data)


def test_packs_of_several_groups_of_one_shard_are_found_together() -> None:
    spec = array_specs(LAYOUTS["heads apart"], 8 * 4)["packs"]
    rows, columns = np.array([5, 3, 4]), np.array([0, 3, 1])
    shard, offsets = spec.offsets(rows, columns)
    assert shard == 1 and offsets.dtype == np.int64
    assert offsets.tolist() == [
        int(spec.offsets(row, columns[at : at + 1])[1][0]) for at, row in enumerate(rows.tolist())
    ]


@pytest.mark.parametrize(("more", "pieces"), [(0, 1), (1, 2)])
def test_a_digest_is_read_in_pieces_of_4_mib(more: int, pieces: int) -> None:
    """A record that is larger is padded to whole pieces, so that each layer begins with one."""
    layout = Layout(
        num_layers=3, num_kv_heads=8, head_dim=128, digest="means", digest_layers=(0, 2)
    )
    tokens = 16 * (2048 + more)
    assert sum(layout.digest_record(tokens)) == (4 << 20) + more * 2048
    spec = array_specs(layout, tokens)["digest"]
    assert spec.inner == (1, 4 << 20) and spec.shape == spec.shard == (2, pieces * (4 << 20))
    assert spec.entries == 2 * pieces and spec.shards == 1 and spec.stored(0) == spec.entries
    _, offsets = spec.offsets(1, np.arange(pieces))
    assert offsets.tolist() == [(pieces + at) * (4 << 20) for at in range(pieces)]
    index = np.frombuffer(spec.index(0)[:-4], "<u8").reshape(-1, 2)
    assert index[:, 0].tolist() == [at * (4 << 20) for at in range(2 * pieces)]


def test_a_digest_that_is_smaller_is_one_piece_of_its_own_size() -> None:
    layout = Layout(**SHAPE, digest="means")
    record = sum(layout.digest_record(20))
    spec = array_specs(layout, 20)["digest"]
    assert (spec.shape, spec.inner, spec.entries) == ((5, record), (1, record), 5)


def test_probe_keys_are_found_block_by_block() -> None:
    spec = array_specs(Layout(**SHAPE), 2 * 1024 + 5)["probe"]
    _, offsets = spec.offsets(1, np.arange(3))
    assert offsets.tolist() == [(3 + at) * 1024 * 3 * 8 * 2 for at in range(3)]
    index = np.frombuffer(spec.index(0)[:-4], "<u8").reshape(-1, 2)
    assert index.tolist() == [[at * spec.entry_bytes, spec.entry_bytes] for at in range(6)]


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


def test_an_array_that_cannot_be_opened_leaves_no_file_open(tmp_path: Path) -> None:
    """Its second file is already there."""

    class Taken(ArraySpec):
        def file(self, shard: int) -> str:
            return "some/c.0.0"

    spec = entries_of(8)
    taken = Taken(**{name: getattr(spec, name) for name in ArraySpec.__slots__})
    with pytest.raises(FileExistsError):
        ArrayWriter(tmp_path, taken, direct=False)
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


def test_what_was_not_written_cannot_be_read_back(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path, entries_of(8), direct=False)
    writer.put(0, np.zeros(8, np.uint8))
    with pytest.raises(OSError, match=r"some/c\.0\.0: ends early"):
        writer.get(0, np.empty((2, 8), np.uint8))
    writer.close()


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


def test_only_whole_pages_go_past_the_page_cache(tmp_path: Path, disk: Disk) -> None:
    """In the file, in memory, and in number; others are not even tried."""
    writer = ArrayWriter(tmp_path, entries_of(2 * PAGE), direct=True)
    memory = aligned(4 * PAGE)
    memory[:] = np.random.default_rng(0).integers(0, 256, 4 * PAGE)
    writer.put(0, memory)
    assert disk.past == [4 * PAGE]
    writer.put(2, memory[:PAGE], PAGE)
    assert disk.past == [4 * PAGE, PAGE]
    for data, offset in (
        (memory[: PAGE + 8], 0), (memory[8 : PAGE + 8], 0), (memory[:PAGE], 8),
    ):  # fmt: skip
        writer.put(3, data, offset)
        out = np.empty_like(data)
        writer.get(3, out, offset)
        assert out.tobytes() == data.tobytes() and len(disk.past) == 2
    writer.put(4, memory[2 * PAGE :])
    assert disk.past[2:] == [2 * PAGE]
    writer.close()


@pytest.mark.parametrize(("direct", "size"), [(False, PAGE), (True, PAGE + 8), (True, 8)])
def test_nothing_goes_past_the_page_cache_where_entries_are_no_pages_or_nobody_asked(
    tmp_path: Path, disk: Disk, direct: bool, size: int
) -> None:
    writer = ArrayWriter(tmp_path, entries_of(size), direct=direct)
    assert open_files(tmp_path) == 2
    writer.put(0, aligned(PAGE))
    assert not disk.past
    writer.close()


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


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_other_errors_of_the_disk_are_told(tmp_path: Path, disk: Disk, code: int) -> None:
    writer = ArrayWriter(tmp_path, entries_of(PAGE), direct=True)
    disk.refuses = code
    with pytest.raises(OSError, match=os.strerror(code)) as error:
        writer.put(0, aligned(PAGE))
    assert error.value.errno == code
    writer.close()
