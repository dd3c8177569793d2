"""A store in a local folder: whose it is, its locks, and its names."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from place_support import ID, OTHER, filled, never, open_files

from ckv_jax.storage import StoreUnavailable
from ckv_jax.storage.place.disk import delete
from ckv_jax.storage.place.holds import Holds
from ckv_jax.storage.segment import manifest as manifests

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


def test_a_lock_that_could_not_be_given_back_goes_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    one, other = Holds(tmp_path), Holds(tmp_path)
    held = one.hold(ID)
    assert held is not None
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
