"""A store in a local folder: manifests, pins, sweeping."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from place_support import ID, OTHER, filled, never

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.place import marker
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
