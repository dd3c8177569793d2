"""A store in a local folder: manifests, pins, sweeping."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from place_support import ID, OTHER, filled, never, open_files

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.place import disk, marker
from ckv_jax.storage.place.disk import delete
from ckv_jax.storage.place.holds import Holds
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.segment import manifest as manifests


@pytest.fixture
def files(root: Path) -> Iterator[LocalFiles]:
    opened = LocalFiles(root)
    filled(root, "manifest").publish(ID, never)
    yield opened
    opened.close()


def test_files_are_mended_where_they_lie(files: LocalFiles) -> None:
    path = files.root / "segments" / "ab" / ID / "packs"
    files.overwrite(ID, "packs", 6, {1: b"bc", 4: b"e"})
    assert path.read_bytes() == b"\0bc\0e\0" and stat.S_IMODE(path.stat().st_mode) == 0o600
    files.overwrite(ID, "packs", 4, {0: b"a"})
    assert path.read_bytes() == b"abc\0"
    assert files.damaged(ID, {"packs": 4}) == set()
    assert files.damaged(ID, {"packs": 5, manifests.FILE: 8}) == {"packs"}
    assert files.damaged(OTHER, {"packs": 4, "x": 1}) == {"packs", "x"}
    assert files.damaged(ID, {"none/packs": 4, "packs": 4}) == {"none/packs", "packs"}
    for offset, count, found in ((0, 4, b"abc\0"), (1, 2, b"bc"), (1, 4, None), (4, 0, b"")):
        assert files.read(ID, "packs", offset, count) == found
    assert files.read(ID, "none", 0, 1) is None
    files.overwrite(ID, "long", 1000, {300: b"x" * 700})
    assert files.read(ID, "long", 200, 400) == bytes(100) + b"x" * 300


# -- plain files and the marker ------------------------------------------------------------------


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


# -- locks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_where_no_lock_can_be_made_nobody_here_removes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    holds = Holds(tmp_path)
    if code == errno.EIO:
        with pytest.raises(StoreUnavailable):
            holds.hold(ID)
    else:
        held = holds.hold(ID)
        assert held is not None
        held.release()
    with pytest.raises(StoreUnavailable):
        holds.claim(ID)


# -- workspaces ----------------------------------------------------------------------------------


def published(root: Path) -> str:
    return (manifests.segment_folder(root, ID) / manifests.FILE).read_text()


def test_of_two_writers_the_first_is_kept_where_it_is_good(root: Path) -> None:
    before = open_files(root)
    first, second, third = (filled(root, text) for text in ("first", "second", "third"))
    assert len(bytes.fromhex(first.name)) == 16  # as a sweep knows it
    assert first.publish(ID, never) and published(root) == "first"
    assert not second.publish(ID, lambda: True) and published(root) == "first"
    assert second.path.is_dir()  # it is left as it is
    assert third.publish(ID, lambda: False) and published(root) == "third"
    assert third.path.is_dir()  # what it replaced
    for made in (first, second, third):
        made.discard()
        made.discard()
    assert not list((root / "tmp").iterdir()) and open_files(root) == before
    assert stat.S_IMODE(manifests.segment_folder(root, ID).parent.stat().st_mode) == 0o700


def test_what_is_deleted_is_nothing_behind_a_link(tmp_path: Path) -> None:
    kept, top = tmp_path / "kept" / "file", tmp_path / "top"
    kept.parent.mkdir()
    kept.touch()
    (top / "inner").mkdir(parents=True)
    (top / "inner" / "link").symlink_to(kept.parent)
    (top / "link").symlink_to(kept.parent)
    (tmp_path / "link").symlink_to(kept.parent)
    for name in ("top", "link", "none"):
        delete(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.exists()
