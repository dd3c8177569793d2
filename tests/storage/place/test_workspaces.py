"""Where segments are written before they are published, and how names change places."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from place_support import ID, filled, never, open_files

from ckv_jax.storage import StoreError
from ckv_jax.storage.place.disk import (
    delete,
    exchange,
    lock_entry,
    replace_file,
    write_file,
)
from ckv_jax.storage.place.local import LocalWorkspace
from ckv_jax.storage.segment import manifest as manifests


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


def test_names_change_places_at_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_text() == "b" and (tmp_path / "b").read_text() == "a"
    with pytest.raises(FileNotFoundError, match="No such file"):
        exchange(tmp_path / "a", tmp_path / "none")


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


def test_small_files_are_replaced_as_a_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tmp, names, real = root / "pins" / ID, root / "tmp", [], os.rename

    def rename(old: Path, new: Path) -> None:
        names.append(old.name)
        assert lock_entry(old) is None  # a sweep leaves it alone
        real(old, new)

    for text in (b"one", b"two"):
        monkeypatch.setattr(os, "rename", rename)
        replace_file(path, text, tmp)
        monkeypatch.undo()
        assert path.read_bytes() == text and not list(tmp.iterdir())
    assert [len(bytes.fromhex(name)) for name in names] == [16, 16]  # as a sweep knows them
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        replace_file(root / "none" / ID, b"x", tmp)
    with pytest.raises(FileExistsError):
        write_file(path, b"x")
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    with pytest.raises(OSError, match="directory"):
        replace_file(path, b"x", tmp)
    assert not list(tmp.iterdir())


@pytest.mark.parametrize("always", [False, True])
def test_a_name_that_a_sweep_took_is_replaced_by_another(
    root: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    from ckv_jax.storage.place import local

    real, turns = local.lock_entry, [0]

    def swept(path: Path) -> int | None:
        turns[0] += 1
        return None if always or turns[0] == 1 else real(path)

    monkeypatch.setattr(local, "lock_entry", swept)
    if always:
        with pytest.raises(OSError, match="swept away again and again"):
            LocalWorkspace(root)
        assert turns[0] == 8 and not list((root / "tmp").iterdir())
    else:
        made = LocalWorkspace(root)
        assert turns[0] == 2 and list((root / "tmp").iterdir()) == [made.path]
        made.discard()


def test_whatever_has_a_name_is_deleted_and_nothing_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").touch()
    (top / "file").touch()
    (top / "link").symlink_to(tmp_path / "kept")
    delete(top)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "file").touch()
    for name in ("link", "file", "none"):
        delete(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept/file").exists()


def test_a_segment_s_name_is_hex() -> None:
    assert manifests.segment_folder(Path("/x"), ID) == Path(f"/x/segments/ab/{ID}")
    for wrong in ("", "../x", "AB" * 16, ID[:-1]):
        with pytest.raises(StoreError, match="expected hex"):
            manifests.segment_folder(Path("/x"), wrong)
