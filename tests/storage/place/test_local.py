"""A store in a local folder: manifests, pins, sweeping."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from place_support import ID, OTHER, filled, never, open_files

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.place import disk, marker
from ckv_jax.storage.place.disk import (
    delete,
    lock_entry,
)
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


def test_a_manifest_may_have_so_many_bytes(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_BYTES", 8)
    assert files.manifest(ID) == b"manifest"
    files.put_manifest(ID, b"manifests")
    with pytest.raises(SegmentDamaged, match="too large"):
        files.manifest(ID)


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "a" / "b")
    made = [files.root, *(files.root / name for name in marker.FOLDERS)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    (files.root / "pins").rmdir()
    files.make()
    assert (files.root / "pins").is_dir()
    (files.root / "pins").rmdir()
    (files.root / "pins").touch()
    with pytest.raises(StoreError, match="pins: is a file, expected a folder"):
        files.make()
    (files.root / "pins").unlink()
    (files.root / "pins").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="pins: is a file, expected a folder"):
        files.make()


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


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Holds, Holds]]:
    """Two stores on one folder."""
    both = Holds(tmp_path), Holds(tmp_path)
    yield both
    for holds in both:
        holds.close()


def test_a_segment_is_held_by_many_or_claimed_by_one(two: tuple[Holds, Holds]) -> None:
    one, other = two
    held = [one.hold(ID), one.hold(ID), other.hold(ID)]
    assert all(held) and one.claim(ID) is None and other.claim(ID) is None
    for hold in held:
        assert hold is not None and one.claim(ID) is other.claim(ID) is None
        hold.release()
        hold.release()  # as often as one likes
    claim = one.claim(ID)
    assert claim is not None
    assert one.claim(ID) is other.claim(ID) is one.hold(ID) is other.hold(ID) is None
    claim.release()
    for holds in two:
        again = holds.claim(ID)
        assert again is not None
        again.release()


def test_locks_are_of_one_segment_and_mending_is_beside_reading(two: tuple[Holds, Holds]) -> None:
    one, other = two
    near = [
        start + "0" * 17 for start in ("f" * 15, "f" * 14 + "e", "f" * 13 + "ef", "1" + "0" * 14)
    ]
    held = one.hold(near[0])
    mending = one.claim(near[0], repairing=True)
    assert held is not None and mending is not None
    assert other.claim(near[0], repairing=True) is None and other.claim(near[0]) is None
    for id_ in near[1:]:
        for more in (False, True):
            claim = other.claim(id_, repairing=more)
            assert claim is not None
            claim.release()
    held.release()
    claim = other.claim(near[0])  # whoever removes it is not stopped by who mends it
    assert claim is not None
    claim.release()
    mending.release()
    again = other.claim(near[0], repairing=True)
    assert again is not None
    again.release()


def test_who_only_looks_makes_no_lock_file(tmp_path: Path) -> None:
    holds = Holds(tmp_path, readonly=True)
    held = holds.hold(ID)
    assert held is not None and not list(tmp_path.iterdir())
    held.release()
    with pytest.raises(StoreUnavailable, match="holds"):
        holds.claim(ID)
    (tmp_path / "holds").mkdir()
    with pytest.raises(StoreUnavailable, match="cannot be looked at"):
        holds.hold(ID)


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


def test_without_an_exchange_names_change_places_one_after_the_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckv_jax.storage.place import local

    assert filled(root, "first").publish(ID, never)
    code = [errno.ENOSYS]

    def refuse(*_: object) -> None:
        raise OSError(code[0], os.strerror(code[0]))

    monkeypatch.setattr(local, "exchange", refuse)
    for code[0] in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        made = filled(root, str(code[0]))
        assert made.publish(ID, lambda: False) and published(root) == str(code[0])
        made.discard()
        assert not list((root / "tmp").iterdir())
    code[0] = errno.EIO
    made = filled(root, "lost")
    with pytest.raises(OSError, match="Input/output"):
        made.publish(ID, lambda: False)
    assert published(root) == str(errno.ENOTSUP)
    made.discard()


@pytest.mark.parametrize("times", [2, 3])
def test_what_vanishes_while_it_is_replaced_is_published_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Twice; at the third time it is given up."""
    target, made = manifests.segment_folder(root, ID), filled(root, "mine")
    left, real = [times], os.rename

    def vanish() -> bool:
        left[0] -= 1
        delete(target)
        return False

    def rename(old: object, new: object) -> None:
        if Path(str(new)) == target and left[0]:
            target.mkdir(parents=True, exist_ok=True)
            (target / "x").touch()
        real(old, new)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    if times == 2:
        assert made.publish(ID, vanish) and published(root) == "mine"
    else:
        with pytest.raises(FileNotFoundError):
            made.publish(ID, vanish)
    assert not left[0]
    made.discard()
    assert not list((root / "tmp").iterdir())


def test_an_entry_is_locked_by_one_under_the_name_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, path = open_files(tmp_path), tmp_path / "entry"
    assert lock_entry(path) is None
    path.touch()
    fd = lock_entry(path)
    assert fd is not None and lock_entry(path) is None
    os.close(fd)
    path.rename(tmp_path / "old")
    (tmp_path / "new").touch()
    real = os.lstat
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda at, **more: real(tmp_path / "old", **more))
        assert lock_entry(tmp_path / "new") is None  # another has its name by now
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic links"):
        lock_entry(tmp_path / "link")

    def fails(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", fails)
        with pytest.raises(OSError, match="broken"):
            lock_entry(tmp_path / "new")
    assert open_files(tmp_path) == before


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


def test_a_lock_that_could_not_be_given_back_goes_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Holds(tmp_path), Holds(tmp_path)
    held = one.hold(ID)
    assert held is not None

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        held.release()
    assert other.claim(ID) is None  # it is still locked
    again = one.hold(OTHER)  # through a new file: the old one is closed, with its lock
    claim = other.claim(ID)
    assert again is not None and claim is not None
    again.release()
    claim.release()
    one.close()
    other.close()
