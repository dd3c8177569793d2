"""The parts of a place, one by one: locks, patience, markers, workspaces, objects, the kernel."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import queue
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts

from ckv_jax.storage import StoreConfig, StoreError, StoreUnavailable
from ckv_jax.storage.errors import SegmentDamaged, SegmentUnfinished
from ckv_jax.storage.place import kernel_queue, marker, patience, place, plain
from ckv_jax.storage.place.holds import Holds
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues, fits
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.place.objects import ObjectFiles, kvstore_spec
from ckv_jax.storage.place.patience import Patience, Refused, may_be_left_behind, progress
from ckv_jax.storage.place.workspace import (
    LocalWorkspace,
    delete,
    exchange,
    lock_entry,
    replace_file,
    segment_folder,
    write_file,
)
from ckv_jax.storage.segment import manifest as manifests
from ckv_jax.storage.segment.packing import aligned

ID, OTHER = "ab" * 16, "cd" * 16


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- locks -------------------------------------------------------------------------------------


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
    mending = one.claim(near[0], mending=True)
    assert held is not None and mending is not None
    assert other.claim(near[0], mending=True) is None and other.claim(near[0]) is None
    for id_ in near[1:]:
        for more in (False, True):
            claim = other.claim(id_, mending=more)
            assert claim is not None
            claim.release()
    held.release()
    claim = other.claim(near[0])  # whoever removes it is not stopped by who mends it
    assert claim is not None
    claim.release()
    mending.release()
    again = other.claim(near[0], mending=True)
    assert again is not None
    again.release()


def test_a_lock_file_is_closed_when_nothing_is_held_through_it(tmp_path: Path) -> None:
    before, holds = open_files(), Holds(tmp_path)
    held, claim = holds.hold(ID), holds.claim(OTHER)
    assert held is not None and claim is not None and open_files() == before + 2
    assert stat.S_IMODE((tmp_path / "holds").stat().st_mode) == 0o600
    holds.close()
    assert open_files() == before + 2
    watching = Holds(tmp_path)
    assert watching.claim(ID) is None and watching.hold(OTHER) is None
    held.release()
    claim.release()
    watching.close()
    assert open_files() == before
    holds.close()


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


def test_a_lock_that_could_not_be_given_back_goes_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Holds(tmp_path), Holds(tmp_path)
    held = one.hold(ID)
    assert held is not None
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        patch.setattr(fcntl, "fcntl", refuse)
        held.release()
    assert other.claim(ID) is None  # it is still locked
    again = one.hold(OTHER)  # through a file that is new: the old one is closed, with its lock
    assert again is not None
    claim = other.claim(ID)
    assert claim is not None
    for lock in (again, claim):
        lock.release()
    one.close()
    other.close()


# -- patience ----------------------------------------------------------------------------------


def test_work_is_done_on_a_thread_of_its_own_that_is_used_again() -> None:
    waiting = Patience(5.0)
    first = waiting.run("work", threading.current_thread)
    assert first is not threading.current_thread() and first.daemon
    end = time.monotonic() + 5
    while not waiting._idle and time.monotonic() < end:
        time.sleep(0.001)
    assert waiting.run("work", threading.current_thread) is first
    inner = waiting.run("out", lambda: waiting.run("in", threading.current_thread))
    assert inner is first  # part of other such work
    waiting.close()
    first.join(5)
    assert not first.is_alive()
    assert waiting.run("work", lambda: 3) == 3  # new work may still come
    waiting.close()


def test_who_may_be_left_behind_needs_no_other_thread() -> None:
    waiting, found = Patience(5.0), []

    def work() -> None:
        may_be_left_behind()
        found.append(waiting.run("work", threading.current_thread))
        progress()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [thread]


def test_a_wait_may_have_a_limit_of_its_own() -> None:
    waiting, go = Patience(60.0), threading.Event()
    with pytest.raises(StoreUnavailable, match=r"slow: the disk has not answered for 0.05 s"):
        waiting.run("slow", lambda: go.wait(20), seconds=0.05)
    go.set()


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_result_that_came_too_late_is_given_away(fails: bool) -> None:
    waiting, late, go = Patience(0.05), [], threading.Event()

    def work() -> int:
        go.wait(20)
        if fails:
            raise KeyError("late")
        return 7

    with pytest.raises(StoreUnavailable):
        waiting.run("work", work, late=late.append)
    with pytest.raises(StoreUnavailable):
        waiting.run("work", work)  # which nobody wants
    assert waiting._stuck == 2
    go.set()
    end = time.monotonic() + 5
    while waiting._stuck and time.monotonic() < end:
        time.sleep(0.001)
    assert waiting._stuck == 0 and len(waiting._idle) == 2
    assert late == ([] if fails else [7])
    assert waiting.run("work", lambda: 5, seconds=5, late=late.append) == 5
    assert 5 not in late
    waiting.close()


def test_no_more_threads_are_given_to_a_disk_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "_MOST_STUCK", 1)
    waiting, go = Patience(0.05), threading.Event()
    with pytest.raises(StoreUnavailable, match="stuck: the disk has not answered"):
        waiting.run("stuck", lambda: go.wait(20))
    with pytest.raises(Refused, match="none of 1 requests"):
        waiting.run("more", lambda: 1)
    go.set()


def test_a_worker_keeps_no_result(tmp_path: Path) -> None:
    jobs: queue.SimpleQueue[patience._Job | None] = queue.SimpleQueue()
    job = patience._Job(lambda: 3, None)
    assert not job.run() and job.result == 3 and job.done.is_set() and jobs.empty()
    assert not job.leave()
    left = patience._Job(lambda: 3, None)
    assert left.leave() and left.run() and not left.done.is_set()


# -- plain files, markers ----------------------------------------------------------------------


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = open_files()
    os.close(plain.open_plain(tmp_path / "file", os.O_RDONLY))
    for name in ("folder", "pipe"):
        with pytest.raises(OSError, match="no plain file") as error:
            plain.open_plain(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)
        assert error.value.errno == errno.ENXIO
    assert open_files() == before
    folder = os.open(tmp_path, os.O_RDONLY)
    os.close(plain.open_plain("file", os.O_RDONLY, folder))
    os.close(folder)


def test_what_is_there_is_of_its_kind_and_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"xyz")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    is_there = plain.is_there
    assert is_there(stat.S_ISREG, str(file)) and is_there(stat.S_ISREG, str(file), 3)
    assert not is_there(stat.S_ISREG, str(file), 2) and not is_there(stat.S_ISREG, str(file), 0)
    assert not is_there(stat.S_ISDIR, str(file)) and is_there(stat.S_ISDIR, str(tmp_path))
    assert not is_there(stat.S_ISREG, str(tmp_path / "link"))
    assert not is_there(stat.S_ISREG, str(tmp_path / "none"))
    assert not is_there(stat.S_ISREG, str(file / "below"))
    with pytest.raises(StoreUnavailable):
        is_there(stat.S_ISREG, str(tmp_path / ("x" * 300)))
    assert plain.is_gone(tmp_path / "none") and not plain.is_gone(tmp_path / "lost")
    with pytest.raises(OSError, match="Not a directory"):
        plain.is_gone(file / "below")
    assert plain.names_in(tmp_path / "none") == plain.names_in(file) == []
    assert sorted(plain.names_in(tmp_path)) == ["file", "link", "lost"]


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


# -- workspaces --------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    LocalFiles(tmp_path / "store").close()
    return tmp_path / "store"


def filled(root: Path, text: str) -> LocalWorkspace:
    made = LocalWorkspace(root)
    write_file(made.path / manifests.FILE, text.encode())
    return made


def published(root: Path) -> str:
    return (segment_folder(root, ID) / manifests.FILE).read_text()


def never() -> bool:
    raise AssertionError("nothing is there")


def test_of_two_writers_the_first_is_kept_where_it_is_good(root: Path) -> None:
    before = open_files()
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
    assert not list((root / "tmp").iterdir()) and open_files() == before
    assert stat.S_IMODE(segment_folder(root, ID).parent.stat().st_mode) == 0o700


def test_without_an_exchange_names_change_places_one_after_the_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckv_jax.storage.place import workspace

    assert filled(root, "first").publish(ID, never)
    code = [errno.ENOSYS]

    def refuse(*_: object) -> None:
        raise OSError(code[0], os.strerror(code[0]))

    monkeypatch.setattr(workspace, "exchange", refuse)
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
    target, made = segment_folder(root, ID), filled(root, "mine")
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


def test_an_entry_is_locked_by_one_under_the_name_that_it_has(tmp_path: Path) -> None:
    before, path = open_files(), tmp_path / "entry"
    assert lock_entry(path) is None
    path.touch()
    fd = lock_entry(path)
    assert fd is not None and lock_entry(path) is None
    os.close(fd)
    path.rename(tmp_path / "old")
    (tmp_path / "new").touch()
    real = os.lstat
    try:
        os.lstat = lambda at, **more: real(tmp_path / "old", **more)  # type: ignore[assignment]
        assert lock_entry(tmp_path / "new") is None  # another has its name by now
    finally:
        os.lstat = real
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic links"):
        lock_entry(tmp_path / "link")

    def fails(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.EIO, "broken")

    try:
        os.lstat = fails
        with pytest.raises(OSError, match="broken"):
            lock_entry(tmp_path / "new")
    finally:
        os.lstat = real
    assert open_files() == before


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
    from ckv_jax.storage.place import workspace

    real, turns = workspace.lock_entry, [0]

    def swept(path: Path) -> int | None:
        turns[0] += 1
        return None if always or turns[0] == 1 else real(path)

    monkeypatch.setattr(workspace, "lock_entry", swept)
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
    assert segment_folder(Path("/x"), ID) == Path(f"/x/segments/ab/{ID}")
    for wrong in ("", "../x", "AB" * 16, ID[:-1]):
        with pytest.raises(StoreError, match="expected hex"):
            segment_folder(Path("/x"), wrong)


# -- a local folder ----------------------------------------------------------------------------


@pytest.fixture
def files(root: Path) -> Iterator[LocalFiles]:
    opened = LocalFiles(root)
    filled(root, "manifest").publish(ID, never)
    yield opened
    opened.close()


def test_files_are_mended_where_they_lie(files: LocalFiles) -> None:
    path = files.root / "segments" / "ab" / ID / "packs"
    files.mend(ID, "packs", 6, {1: b"bc", 4: b"e"})
    assert path.read_bytes() == b"\0bc\0e\0" and stat.S_IMODE(path.stat().st_mode) == 0o600
    files.mend(ID, "packs", 4, {0: b"a"})
    assert path.read_bytes() == b"abc\0"
    assert files.damaged(ID, {"packs": 4}) == set()
    assert files.damaged(ID, {"packs": 5, manifests.FILE: 8}) == {"packs"}
    assert files.damaged(OTHER, {"packs": 4, "x": 1}) == {"packs", "x"}
    assert files.damaged(ID, {"none/packs": 4, "packs": 4}) == {"none/packs", "packs"}
    for offset, count, found in ((0, 4, b"abc\0"), (1, 2, b"bc"), (1, 4, None), (4, 0, b"")):
        assert files.read(ID, "packs", offset, count) == found
    assert files.read(ID, "none", 0, 1) is None
    files.mend(ID, "long", 1000, {300: b"x" * 700})
    assert files.read(ID, "long", 200, 400) == bytes(100) + b"x" * 300


def test_a_manifest_changes_its_stamp_and_is_gone_with_its_segment(files: LocalFiles) -> None:
    before = files.stamp(ID)
    assert before is not None and files.manifest(ID) == b"manifest"
    files.put_manifest(ID, b"another")
    assert files.stamp(ID) not in (before, None) and files.manifest(ID) == b"another"
    assert files.stamp(OTHER) is None and files.segment_ids() == {ID}
    found = dict(files.manifests([ID, OTHER]))
    assert found[ID] == b"another" and isinstance(found[OTHER], SegmentDamaged)
    with pytest.raises(SegmentDamaged, match="gone"):
        files.hold(OTHER)
    free = files.claim(OTHER)  # nothing is left held
    assert free is not None
    free.release()
    held = files.hold(ID)
    assert files.claim(ID) is None
    held.release()
    mending = files.mending(ID)
    with pytest.raises(StoreUnavailable, match="somebody else is mending it"):
        files.mending(ID)
    mending.release()
    claim = files.claim(ID)
    assert claim is not None
    with pytest.raises(SegmentDamaged, match="being removed"):
        files.hold(ID)
    removed = claim.remove()
    (aside,) = (files.root / "tmp").iterdir()
    assert files.stamp(ID) is None and len(bytes.fromhex(aside.name)) == 16  # as a sweep knows it
    removed()
    assert not list((files.root / "tmp").iterdir())
    again = files.claim(ID)
    assert again is not None
    again.remove()()  # of what is gone already


def test_a_manifest_may_have_so_many_bytes(
    files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_BYTES", 8)
    assert files.manifest(ID) == b"manifest"
    files.put_manifest(ID, b"manifests")
    with pytest.raises(SegmentDamaged, match="too large"):
        files.manifest(ID)


def test_names_that_are_no_segments_are_passed_over(files: LocalFiles) -> None:
    segments = files.root / "segments"
    for name in ("abc/" + "abc" + "0" * 29, "zz/" + "zz" * 16, "ab/" + "cd" * 16, "ab/ab"):
        (segments / name).mkdir(parents=True)
    (segments / "ac").touch()
    assert files.segment_ids() == {ID}


def test_pins_are_kept_by_id(files: LocalFiles) -> None:
    assert files.pins() == {}
    files.set_pin(ID, b"x" * 4000)
    files.set_pin(OTHER, b"")
    (files.root / "pins" / "notes").write_text("no id")
    assert files.pins() == {ID: b"x" * 4000, OTHER: b""}
    for _ in range(2):
        files.set_pin(ID, None)
    assert files.pins() == {OTHER: b""}
    with pytest.raises(ValueError, match="expected hex"):
        files.set_pin("../x", b"")


def test_the_workspaces_of_the_dead_are_told_and_swept(files: LocalFiles) -> None:
    mine = files.workspace()
    left = files.root / "tmp" / OTHER
    left.mkdir()
    (left / "x").touch()
    file = files.root / "tmp" / ("ef" * 16)
    file.touch()
    os.mkfifo(files.root / "tmp" / ("01" * 16))
    assert files.dead([mine.name, OTHER, ID]) == {OTHER, ID}
    assert files.sweep() == 2 and files.sweep() == 0
    assert {p.name for p in (files.root / "tmp").iterdir()} == {mine.name, "01" * 16}
    mine.discard()
    looking = LocalFiles(files.root, readonly=True)
    left.mkdir()
    assert looking.sweep() == 0 and left.exists()
    with pytest.raises(StoreError, match="look only"):
        looking.workspace()
    with pytest.raises(StoreError, match="not a store"):
        LocalFiles(files.root / "tmp", readonly=True)


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


# -- objects -----------------------------------------------------------------------------------


@pytest.fixture
def objects() -> ObjectFiles:
    return ObjectFiles("memory://", ts.Context(), 5.0)


def stored(objects: ObjectFiles) -> dict[str, bytes]:
    keys = objects._store.list().result()
    return {key.decode(): bytes(objects._store.read(key).result().value) for key in keys}


def upload(objects: ObjectFiles, keep: Callable[[], bool] = never) -> bool:
    made = objects.workspace()
    (made.path / "packs").mkdir()
    (made.path / "packs" / "c.0").write_bytes(b"0123456789")
    (made.path / manifests.FILE).write_bytes(b"manifest")
    try:
        return made.publish(ID, keep)
    finally:
        for _ in range(2):
            made.discard()
            assert not made.path.exists()


def test_objects_are_uploaded_read_mended_and_removed(objects: ObjectFiles) -> None:
    assert objects.catalog_path is None and not objects.holding and stored(objects) == {}
    assert upload(objects)
    base = f"segments/ab/{ID}"
    assert stored(objects) == {
        "store.json": marker.DATA, f"{base}/packs/c.0": b"0123456789",
        f"{base}/manifest.json": b"manifest",
    }  # fmt: skip
    assert not upload(objects, lambda: True) and upload(objects, lambda: False)
    beside = f"segments1/cd/{OTHER}/packs"
    objects._store.write(beside, b"").result()
    assert objects.segment_ids() == {ID} and objects.manifest(ID) == b"manifest"
    assert objects.read(ID, "packs/c.0", 2, 3) == b"234"
    assert objects.read(ID, "packs/c.0", 8, 3) is objects.read(ID, "none", 0, 1) is None
    objects.mend(ID, "packs/c.0", 12, {1: b"ab", 11: b"z"})
    assert objects.read(ID, "packs/c.0", 0, 12) == b"0ab3456789\0z"
    objects.mend(ID, "packs/c.0", 4, {})
    assert stored(objects)[f"{base}/packs/c.0"] == b"0ab3"
    objects.mend(ID, "packs/c.1", 2, {0: b"x"})
    assert stored(objects)[f"{base}/packs/c.1"] == b"x\0"
    objects.put_manifest(ID, b"new")
    assert objects.manifest(ID) == b"new"
    spec = objects.kvstore(ID, "packs")
    assert (spec["driver"], spec["path"]) == ("memory", f"{base}/packs/")
    removed = objects.claim(ID).remove()
    with pytest.raises(SegmentUnfinished, match="no manifest"):
        objects.manifest(ID)
    assert objects.segment_ids() == {ID}  # what is left of it
    removed()
    assert objects.segment_ids() == set() and set(stored(objects)) == {"store.json", beside}
    assert objects.damaged(ID, {"x": 1}) == objects.dead(["x"]) == set() and objects.sweep() == 0
    with pytest.raises(OSError, match="no direct reads") as error:
        objects.open_direct(ID, "packs/c.0")
    assert error.value.errno == errno.ENOTSUP


def test_manifests_of_many_objects_come_in_their_order(
    objects: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_BYTES", 8)
    ids = [f"{n:032x}" for n in range(130)]
    for n, id_ in enumerate(ids):
        if n != 70:
            objects.put_manifest(id_, b"x" * (9 if n == 129 else 8))
    found = list(objects.manifests(ids))
    assert [id_ for id_, _ in found] == ids
    bad = {n: data for n, (_, data) in enumerate(found) if data != b"x" * 8}
    assert isinstance(bad.pop(70), SegmentUnfinished)
    assert "too large" in str(bad.pop(129)) and not bad


def test_pins_are_objects_too(objects: ObjectFiles) -> None:
    objects.set_pin(ID, b"wish")
    objects._store.write("pins/notes", b"no id").result()
    objects._store.write("pinsx", b"beside").result()
    assert objects.pins() == {ID: b"wish"}
    objects.set_pin(ID, None)
    assert objects.pins() == {}
    with pytest.raises(ValueError, match="expected hex"):
        objects.set_pin("x", b"")


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("pins/x", True), ("segments/x", True), ("aaa", False), ("pins", False), ("pinsa", False),
        ("segment", False), ("segmentsa", False), ("zzz", False), ("q", False),
    ],
)  # fmt: skip
def test_a_place_without_a_marker_is_ours_if_nothing_else_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, ours: bool
) -> None:
    from ckv_jax.storage.place import objects as module

    url = f"file://{tmp_path}/"
    monkeypatch.setattr(module, "kvstore_spec", lambda _: ts.KvStore.Spec(url).to_json())
    ts.KvStore.open(url).result().write(key, b"x").result()
    if ours:
        looking = ObjectFiles(url, ts.Context(), 5.0, readonly=True)
        with pytest.raises(StoreError, match="look only"):
            looking.set_pin(ID, b"")
    else:
        with pytest.raises(StoreError, match="not a store, and not empty"):
            ObjectFiles(url, ts.Context(), 5.0)


def test_where_a_bucket_is_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    plainly = kvstore_spec("s3://bucket/a")
    assert plainly["path"] == "a/" and not {"endpoint", "aws_region"} & plainly.keys()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all")
    monkeypatch.setenv("AWS_REGION", "eu")
    assert kvstore_spec("s3://bucket/a/")["endpoint"] == "http://all"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    spec = kvstore_spec("s3://bucket/a/")
    assert (spec["endpoint"], spec["aws_region"], spec["path"]) == ("http://s3", "eu", "a/")
    assert "endpoint" not in kvstore_spec("gs://bucket")
    with pytest.raises(ValueError, match="url: got 'ftp://x'"):
        kvstore_spec("ftp://x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "no endpoint")
    with pytest.raises(StoreUnavailable, match="s3://bucket: cannot be opened: "):
        ObjectFiles("s3://bucket", ts.Context(), 5.0)


# -- TensorStore's settings, and the kernel's queues -------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_tensorstore_is_told_how_many_reads_and_past_what(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, threads in ((1, 2), (5, 5), (64, 8), (None, 2)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        spec = place._context(StoreConfig(io_concurrency=7), direct=direct).spec.to_json()
        assert spec["data_copy_concurrency"] == {"limit": threads}
    for name in ("file_io", "s3_request", "gcs_request"):
        assert spec[f"{name}_concurrency"] == {"limit": 7}
    mode = spec["file_io_mode"]
    assert (mode.get("mode", "default") if isinstance(mode, dict) else mode) == (
        "direct" if direct else "default"
    )
    assert spec["cache_pool"] in ({"total_bytes_limit": 0}, {})


@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO, 0])
def test_direct_reads_are_tried_before_they_are_promised(
    root: Path, monkeypatch: pytest.MonkeyPatch, wish: bool | None, code: int
) -> None:
    real = os.open

    def call(path: object, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT and code:
            raise OSError(code, os.strerror(code))
        return real(path, flags & ~os.O_DIRECT, *rest)  # type: ignore[arg-type]

    before = open_files()
    monkeypatch.setattr(os, "open", call)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if wish is False:
            assert not place._use_direct_io(root, wish)
        elif not code:
            assert place._use_direct_io(root, wish)
        elif code == errno.EIO:
            with pytest.raises(StoreUnavailable):
                place._use_direct_io(root, wish)
        elif wish:
            with pytest.raises(StoreError, match="no direct I/O here"):
                place._use_direct_io(root, wish)
        else:
            assert not place._use_direct_io(root, wish)
    assert len(told) == (wish is None and code in (errno.EINVAL, errno.ENOTSUP))
    assert open_files() == before


def reads_past_the_cache(path: Path) -> bool:
    """By system calls of our own: whether the kernel has queues, and reads this file directly."""
    calls = {"x86_64": (206, 207), "aarch64": (0, 1)}.get(platform.machine())
    if calls is None or not hasattr(os, "O_DIRECT"):
        return False
    made, call = ctypes.c_ulong(0), ctypes.CDLL(None).syscall
    if call(ctypes.c_long(calls[0]), ctypes.c_long(1), ctypes.byref(made)):
        return False
    call(ctypes.c_long(calls[1]), made)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, FILE_ALIGN)], 0) == FILE_ALIGN
    except OSError:
        return False
    finally:
        os.close(fd)


def test_where_the_kernel_has_queues_they_are_used(file: Path, root: Path) -> None:
    """Else all that tests them is passed over, and nobody knows."""
    if not reads_past_the_cache(file):
        pytest.skip("no asynchronous direct reads here")
    before = open_files()
    queues = KernelQueues()
    assert queues.works(file) and queues.align in (512, FILE_ALIGN)
    assert not kernel_queue._IN_FLIGHT and len(queues._idle) == 1 and open_files() == before
    queues.close()
    found = place._queues(root)  # a marker is shorter than a block
    assert found is not None
    found.close()


def test_a_folder_that_tensorstore_cannot_open_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        place._wake(Path("a\0b"), ts.Context(), 5.0)


def test_queues_that_read_nothing_right_are_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelQueues, "works", lambda *_: False)
    assert place._queues(root) is None

    def fails(*_: object) -> bool:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(KernelQueues, "works", fails)
    assert place._queues(root) is None
    monkeypatch.setattr(kernel_queue, "_CALLS", {})
    assert place._queues(root) is None


def test_the_kernel_s_own_error_is_told(queues: KernelQueues) -> None:
    with pytest.raises(OSError, match="Invalid argument") as error:
        queues.submit(0, 0, 1)
    assert error.value.errno == errno.EINVAL


def test_what_fits_a_direct_read() -> None:
    whole = aligned(4 * FILE_ALIGN).reshape(4, FILE_ALIGN)
    assert fits(whole) and fits(whole, FILE_ALIGN)
    half = aligned(4 * 512).reshape(4, 512)
    assert fits(half) and not fits(half, FILE_ALIGN)
    assert not fits(aligned(4 * 520).reshape(4, 520))
    assert not fits(aligned(4 * 512 + 8)[8:].reshape(4, 512))


def test_rows_may_be_filled_in_part(queues: KernelQueues, file: Path) -> None:
    """Sizes of their own, a file's short end, and a queue that is full of others."""
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out = aligned(3 * 2 * FILE_ALIGN).reshape(3, 2 * FILE_ALIGN)
    out[:] = 7
    sizes = np.array([1, 2, 1], np.int64) * FILE_ALIGN
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.array([5, 8, 0]) * FILE_ALIGN, out, slice(None), sizes=sizes)
    landed: list[int] = []
    while (some := read.landed(5.0)) is not None:
        assert some.dtype == np.int64
        landed += some.tolist()
    assert sorted(landed) == [0, 1, 2] and read.landed(0.0) is None
    assert (out[0, :FILE_ALIGN] == pages[5]).all() and (out[0, FILE_ALIGN:] == 7).all()
    assert (out[1].reshape(2, -1) == pages[8:10]).all() and (out[2, :FILE_ALIGN] == pages[0]).all()
    last = (len(pages) - 1) * FILE_ALIGN
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    queues.read(fd, np.array([last]), out[:1], slice(None), expect=FILE_ALIGN).result(5.0)
    assert (out[0, :FILE_ALIGN] == pages[-1]).all()
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    short = queues.read(fd, np.array([0, last]), out[:2], slice(None))
    with pytest.raises(OSError) as error:
        short.result(5.0)
    assert error.value.errno == errno.EIO


def test_a_quarter_of_a_queue_is_waited_for(queues: KernelQueues, file: Path) -> None:
    """Not one at a time, which costs a call each, nor all, which are then checked too late."""
    asked: list[int] = []
    real = queues.events

    def events(queue_: int, least: int, out: np.ndarray, seconds: float) -> int:
        asked.append(least)
        return real(queue_, least, out, seconds)

    queues.events = events  # type: ignore[method-assign]
    out = aligned(64 * FILE_ALIGN).reshape(64, FILE_ALIGN)
    for count, least in ((64, 16), (8, 4), (3, 3)):
        asked.clear()
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        offsets = np.arange(count) * FILE_ALIGN
        queues.read(fd, offsets, out[:count], slice(None)).result(5.0)
        assert asked[0] == least and sum(asked) <= count


def test_a_trial_that_reads_too_little_is_none(
    queues: KernelQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    assert queues.works(tmp_path / "short")
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _: SimpleNamespace(st_size=FILE_ALIGN))
        found = queues.works(tmp_path / "short")
    assert not found and open_files() == before and not kernel_queue._IN_FLIGHT


def test_a_trial_that_cannot_start_is_none(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: KernelQueues) -> int:
        raise OSError(errno.EAGAIN, "no more queues")

    before, idle = open_files(), queues._idle
    monkeypatch.setattr(KernelQueues, "_new", refuse)
    queues._idle = []
    assert not queues.works(file)
    queues._idle = idle
    assert open_files() == before


def test_a_read_that_is_given_up_is_forgotten_once_it_has_landed(
    queues: KernelQueues, file: Path
) -> None:
    """As soon as another starts, whoever starts it."""
    out, real = aligned(2 * FILE_ALIGN).reshape(2, FILE_ALIGN), queues.events
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.zeros(1, np.int64), out[:1], slice(None))
    queues.events = lambda *_: 0  # type: ignore[method-assign]  # nothing has landed yet
    assert not read.given_up and not read.done()
    with pytest.raises(TimeoutError):
        read.result(0.0)
    queues.events = real  # type: ignore[method-assign]
    end = time.monotonic() + 5
    while read in kernel_queue._IN_FLIGHT and time.monotonic() < end:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        queues.read(fd, np.zeros(1, np.int64), out[1:], slice(None)).result(5.0)
    assert read not in kernel_queue._IN_FLIGHT and read.done()


def test_what_a_full_queue_does_not_take_is_handed_over_as_others_land(
    queues: KernelQueues, file: Path
) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out, calls, real = aligned(8 * FILE_ALIGN).reshape(8, FILE_ALIGN), [], queues.submit

    def submit(queue_: int, address: int, count: int) -> int:
        calls.append(count)
        if len(calls) == 1:
            return real(queue_, address, 3)
        if len(calls) == 2:
            raise OSError(errno.EAGAIN, "the queue is full")
        return real(queue_, address, count)

    queues.submit = submit  # type: ignore[method-assign]
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.arange(8) * FILE_ALIGN, out, slice(None))
    assert calls == [8, 5]  # and no more before some have landed
    read.result(5.0)
    assert calls[2] == 5 and (out == pages[:8]).all()


@pytest.mark.parametrize(("first", "code"), [(0, errno.EAGAIN), (0, errno.EIO), (2, errno.EIO)])
def test_a_queue_that_takes_no_reads_is_an_error_of_the_read(
    queues: KernelQueues, file: Path, first: int, code: int
) -> None:
    """After those that it took have landed."""
    before, real = open_files(), queues.submit
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    left = [first]

    def submit(queue_: int, address: int, count: int) -> int:
        if left[0]:
            return real(queue_, address, left.pop(0) or count)
        raise OSError(code, os.strerror(code))

    left.append(0)
    queues.submit = submit  # type: ignore[method-assign]
    out = aligned(8 * FILE_ALIGN).reshape(8, FILE_ALIGN)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.arange(8) * FILE_ALIGN, out, slice(None))
    with pytest.raises(OSError) as error:
        read.result(5.0)
    assert error.value.errno == code and read.done()
    assert (out[:first] == pages[:first]).all() and open_files() == before
    assert not kernel_queue._IN_FLIGHT and len(queues._idle) == 1
