"""Plain files, and what tells a store from other folders."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from place_support import ID, open_files

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.place import disk, marker


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = open_files(tmp_path)
    os.close(disk.open_plain(tmp_path / "file", os.O_RDONLY))
    for name in ("folder", "pipe"):
        with pytest.raises(OSError, match="no plain file") as error:
            disk.open_plain(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)
        assert error.value.errno == errno.ENXIO
    assert open_files(tmp_path) == before
    folder = os.open(tmp_path, os.O_RDONLY)
    os.close(disk.open_plain("file", os.O_RDONLY, folder))
    os.close(folder)


def test_what_is_there_is_of_its_kind_and_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"xyz")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    is_there = disk.is_there
    assert is_there(stat.S_ISREG, str(file)) and is_there(stat.S_ISREG, str(file), 3)
    assert not is_there(stat.S_ISREG, str(file), 2) and not is_there(stat.S_ISREG, str(file), 0)
    assert not is_there(stat.S_ISDIR, str(file)) and is_there(stat.S_ISDIR, str(tmp_path))
    assert not is_there(stat.S_ISREG, str(tmp_path / "link"))
    assert not is_there(stat.S_ISREG, str(tmp_path / "none"))
    assert not is_there(stat.S_ISREG, str(file / "below"))
    with pytest.raises(StoreUnavailable):
        is_there(stat.S_ISREG, str(tmp_path / ("x" * 300)))
    assert disk.is_gone(tmp_path / "none") and not disk.is_gone(tmp_path / "lost")
    with pytest.raises(OSError, match="Not a directory"):
        disk.is_gone(file / "below")
    assert disk.names_in(tmp_path / "none") == disk.names_in(file) == []
    assert sorted(disk.names_in(tmp_path)) == ["file", "link", "lost"]


def test_a_marker_that_was_hurt_is_ours_as_long_as_segments_are_there(tmp_path: Path) -> None:
    marker.write(tmp_path)
    assert marker.check(tmp_path)
    assert stat.S_IMODE((tmp_path / marker.FILE).stat().st_mode) == 0o600
    (tmp_path / marker.FILE).write_bytes(b"hurt")
    with pytest.raises(StoreError, match="not a store"):
        marker.check(tmp_path)
    below = tmp_path / "segments" / "ab"
    below.mkdir(parents=True)
    (below / "notes").write_text("")
    with pytest.raises(StoreError, match="not a store"):
        marker.check(tmp_path)
    (below / ID).mkdir()
    assert marker.check(tmp_path)
    (tmp_path / marker.FILE).unlink()
    with pytest.raises(StoreError, match="not a store, and not empty"):
        marker.check(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[]", "x: not a store"),
        (b'{"format": "other", "version": 2}', "x: not a store"),
        (b'{"format": "ckv-store"}', "version None, expected 2"),
        (b'{"format": "ckv-store", "version": 2, "more": 1}', "version 2, expected 2"),
        (b'{"format": "ckv-store", "version": "123456789012345678901"}', "1234567890, exp"),
    ],
    ids=str,
)
def test_another_store_s_marker_is_told_from_none(data: bytes, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        marker.judge("x", data)
    marker.judge("x", marker.DATA)
