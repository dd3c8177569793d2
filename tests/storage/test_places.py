"""Whose a folder is: what is not ours is refused and untouched, and looking changes nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from segment_support import failing, find, hurt, lose_index, segment_folder
from typer.testing import CliRunner

from ckv_jax.cli.app import app
from ckv_jax.storage import (
    ChunkStore,
    StoreError,
    StoreFull,
    StoreUnavailable,
    inspect_store,
    pin_prefix,
    prune_store,
    verify_store,
)
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.disk import delete
from ckv_jax.storage.place.holds import Holds
from ckv_jax.storage.place.local import LocalFiles
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens


def picture(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every name below a folder, with its mode, time of change and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_mtime_ns, data)
    return found


@pytest.mark.parametrize("name", ["tmp/x", "tmpfile", "lost+found/x", "segments.old/x", "lock/x"])
def test_a_strangers_folder_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    path = tmp_path / "disk" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    (tmp_path / "disk" / "tmp").mkdir(exist_ok=True)
    before = picture(tmp_path)
    for readonly in (False, True):
        with pytest.raises(StoreError, match="not a store"):
            ChunkStore.open(tmp_path / "disk", readonly=readonly)
    assert picture(tmp_path) == before


def test_a_sweep_takes_only_what_we_made(folder: Path) -> None:
    ChunkStore.open(folder).close()
    ours = folder / "tmp" / ("ab" * 16)
    ours.mkdir()
    (ours / "packs").write_text("left by a killed writer")
    theirs = [folder / "tmp" / name for name in ("notes.txt", "AB" * 16, "ab" * 15)]
    for path in theirs:
        path.write_text("precious")
    (folder / "tmp" / ("cd" * 16)).symlink_to(tmp := folder.parent)
    with ChunkStore.open(folder) as store:
        assert store.stats()["swept"] == 1
    assert not ours.exists() and all(p.read_text() == "precious" for p in theirs) and tmp.is_dir()


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


def test_looking_changes_nothing(folder: Path) -> None:
    tokens = some_tokens(100)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        store.save_scores(prefix.spans[0].segment_id, [[0.5] * 7] * 2, [[1] * 7] * 2)
    (folder / "tmp" / ("ab" * 16)).mkdir()  # a killed writer's
    before = picture(folder)
    with ChunkStore.open(folder, readonly=True) as store:
        assert inspect_store(store, prefix.id).segments[0].score == 0.5
        assert read_all(store, prefix).right == SMALL.groups * 7
        assert verify_store(store).ok
        with pytest.raises(StoreError, match="read-only"):
            store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=some_tokens(5))
    (folder / "catalog.sqlite").rename(folder.parent / "away")  # an index need not be there
    before.pop("catalog.sqlite")
    with ChunkStore.open(folder, readonly=True) as store:
        assert len(store.prefixes()) == 1
    assert picture(folder) == before


def test_looking_beside_one_who_writes(folder: Path) -> None:
    with ChunkStore.open(folder) as writer:
        ingest(writer, some_tokens(100))
        names = set(os.listdir(folder))
        with ChunkStore.open(folder, readonly=True) as store:
            assert len(store.prefixes()) == 1
        assert set(os.listdir(folder)) == names


def test_what_is_written_over_stays_private(folder: Path) -> None:
    """Pins and manifests, whatever the process lets others see of its files."""
    tokens = some_tokens(64)
    before = os.umask(0)
    try:
        with ChunkStore.open(folder) as store:
            prefix = ingest(store, tokens)
            pin_prefix(store, prefix.id)
            shard = sorted(segment_folder(folder, prefix).glob("packs/c.0.*"))[0]
            hurt(shard, 5)
            changed = kv_of(SMALL, tokens[:16]).copy()  # computed again, it differs in a bit
            changed.view(SMALL.disk_dtype)[0, 0, 0, 0, 0] ^= 1
            assert store.replace_packs(prefix, 0, changed) == 1
            assert find(store, tokens, SMALL) != prefix  # its manifest is another
    finally:
        os.umask(before)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"manifest.json", prefix.id} <= {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(segment_folder(folder, prefix).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("data", [b"", marker.data_of()[:9], bytes(30)])
def test_who_dies_while_making_a_store_leaves_one_that_opens(folder: Path, data: bytes) -> None:
    folder.mkdir()
    (folder / marker.FILE).write_bytes(data)
    with ChunkStore.open(folder) as store:
        ingest(store, some_tokens(20))
    assert json.loads((folder / marker.FILE).read_bytes())["format"] == "ckv-store"


@pytest.mark.parametrize("data", [b"", marker.data_of()[:9], bytes(30)])
@pytest.mark.parametrize("names", [["segments/orange.txt", "tmp/" + "ab" * 16], ["holds"]])
def test_a_torn_marker_makes_nobody_elses_folder_ours(
    folder: Path, data: bytes, names: list[str]
) -> None:
    folder.mkdir()
    (folder / marker.FILE).write_bytes(data)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("precious")
    before = picture(folder)
    with pytest.raises(StoreError, match="not a store"):
        ChunkStore.open(folder)
    assert picture(folder) == before


def test_who_dies_after_making_the_folders_leaves_one_that_opens(folder: Path) -> None:
    ChunkStore.open(folder).close()
    lose_index(folder)
    (folder / marker.FILE).write_bytes(b"")
    (folder / "holds").touch()
    assert all((folder / name).is_dir() for name in marker.FOLDERS)
    with ChunkStore.open(folder) as store:
        assert ingest(store, some_tokens(20)).num_tokens == 20


def test_a_new_folder_opened_by_many_at_once_becomes_a_store_for_all(tmp_path: Path) -> None:
    openers = 6
    with ThreadPoolExecutor(openers) as pool:
        for turn in range(30):
            start = threading.Barrier(openers, timeout=30)

            def make(root: Path = tmp_path / str(turn), start: threading.Barrier = start) -> None:
                start.wait()
                LocalFiles(root)

            for opened in [pool.submit(make) for _ in range(openers)]:
                opened.result()
            assert (tmp_path / str(turn) / marker.FILE).read_bytes() == marker.data_of()


def test_what_lies_behind_a_symlink_is_not_read(folder: Path, tmp_path: Path) -> None:
    files, name = LocalFiles(folder), "ab" * 16
    path = folder / "segments" / name[:2] / name / "packs"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"ours")
    assert files.read(name, "packs", 1, 3) == b"urs"
    path.rename(tmp_path / "theirs")
    assert files.read(name, "packs", 0, 4) is None
    path.symlink_to(tmp_path / "theirs")
    assert files.read(name, "packs", 0, 4) is None  # as good as absent


def test_holds_in_a_file_that_was_deleted_are_seen_by_who_comes_later(tmp_path: Path) -> None:
    name = "ab" * 16
    one, other = Holds(tmp_path), Holds(tmp_path)
    first = one.hold(name)
    (tmp_path / "holds").unlink()
    second = one.hold(name)
    assert first is not None and second is not None
    assert other.claim(name) is None  # though the first is in a file that is gone
    second.release()
    claim = other.claim(name)
    assert claim is not None
    assert one.hold(name) is None
    for held in (first, claim):
        held.release()
    one.close()
    other.close()


def test_a_lock_that_could_not_be_given_back_goes_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "ab" * 16
    one, other = Holds(tmp_path), Holds(tmp_path)
    held = one.hold(name)
    assert held is not None
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
        held.release()
        with pytest.raises(StoreUnavailable, match="cannot be locked"):
            other.claim(name)
    assert other.claim(name) is None  # it is still locked
    again = one.hold("cd" * 16)  # through a new file: the old one is closed, with its lock
    claim = other.claim(name)
    assert again is not None and claim is not None
    again.release()
    claim.release()
    one.close()
    other.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO])
def test_where_no_lock_can_be_made_nobody_here_removes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    holds, name = Holds(tmp_path), "ab" * 16
    with failing(monkeypatch, "open", code):
        if code == errno.EIO:
            with pytest.raises(StoreUnavailable):
                holds.hold(name)
        else:
            held = holds.hold(name)
            assert held is not None
            held.release()
        with pytest.raises(StoreUnavailable):
            holds.claim(name)


def test_an_older_segment_is_told_and_left_alone(folder: Path) -> None:
    """A whole manifest of another version, in a store of ours, is neither served nor damaged."""
    from tests.faults import corruption

    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        parent = ingest(store, tokens[:64]).spans[0].segment_id
        child = ingest(store, tokens).spans[1].segment_id
        ingest(store, some_tokens(64, 1))
    ids = sorted(path.name for path in (folder / "segments").glob("*/*"))
    corruption.forge(folder, lambda body: body["layout"].update(version=1), ids.index(parent))
    with ChunkStore.open(folder, readonly=True) as store:
        assert "of version 1, " in inspect_store(store).unusable[parent]
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0 and "run `ckv ingest`" in shown.stderr
    with ChunkStore.open(folder) as store:
        report = verify_store(store, repair=True)
        assert report.foreign == [parent] and not report.damages and not report.removed
        assert report.segments == 2
        # Who reads that version can go on with what continues it.
        assert (folder / "segments" / child[:2] / child / "manifest.json").exists()
        prune_store(store, 0)
    assert len(list((folder / "segments").glob("*/*"))) == 1


# -- full, unwritable and missing disks ----------------------------------------------------------


TOKENS = some_tokens(64)


@pytest.mark.parametrize("name", ["pwrite", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EROFS, StoreUnavailable)]
)
def test_a_full_disk_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, kind: type[StoreError]
) -> None:
    with ChunkStore.open(folder) as store:
        kept = ingest(store, TOKENS)
        with failing(monkeypatch, name, code), pytest.raises(kind, match=str(folder)):
            ingest(store, some_tokens(64, 1))
        assert read_all(store, kept).refused == 0
        assert not list((folder / "tmp").iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where a disk of its own is mounted, or rather linked, so that anybody may take it away."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second device")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        (tmp_path / "disk").symlink_to(name)
        yield tmp_path / "disk"


@pytest.mark.parametrize("below", ["", "store"])
def test_a_place_that_is_gone_is_named_and_nothing_is_made_there(disk: Path, below: str) -> None:
    """As when a disk is unmounted: an empty folder is left, and the disk may come back."""
    folder, device = disk / below, disk.readlink()
    with ChunkStore.open(folder) as store:
        kept = ingest(store, TOKENS)
        disk.unlink()
        disk.mkdir()
        assert find(store, TOKENS, SMALL).num_tokens == 0
        assert read_all(store, kept).right == 0
        for act in (
            store.usage,
            lambda: ingest(store, some_tokens(64, 1)),
            lambda: prune_store(store, 0),
            lambda: pin_prefix(store, kept.id),
            lambda: verify_store(store, repair=True),
            lambda: inspect_store(store),
        ):
            with pytest.raises(StoreUnavailable, match=f"{folder}: .*no longer mounted"):
                act()
        assert not list(disk.iterdir())
        disk.rmdir()
        disk.symlink_to(device)
        assert read_all(store, find(store, TOKENS, SMALL)).right == 8
        assert ingest(store, some_tokens(64, 1)).num_tokens == 64
        disk.unlink()
        disk.mkdir()
    assert not list(disk.iterdir())


def test_a_folder_that_cannot_be_written_is_named_and_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder) as store:
        kept = ingest(store, TOKENS)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    with (
        failing(monkeypatch, "open", errno.EROFS, lambda _, path, flags, *__: flags & writing),
        failing(monkeypatch, "mkdir", errno.EROFS),
    ):
        with ChunkStore.open(folder) as store:
            assert read_all(store, find(store, TOKENS, SMALL)).right == 8
            for act in (lambda: ingest(store, some_tokens(64, 1)), lambda: prune_store(store, 0)):
                with pytest.raises(StoreUnavailable, match=str(folder)):
                    act()
        for command in (["prune", str(folder), "--max-bytes", "0"], ["pin", str(folder), kept.id]):
            found = CliRunner().invoke(app, command)
            assert found.exit_code and isinstance(found.exception, StoreUnavailable)
