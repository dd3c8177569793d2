"""Locks: a segment is held by many readers, or claimed by one who removes it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from place_support import ID, OTHER, open_files

from ckv_jax.storage import StoreUnavailable
from ckv_jax.storage.place.holds import Holds


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
    before, holds = open_files(tmp_path), Holds(tmp_path)
    held, claim = holds.hold(ID), holds.claim(OTHER)
    assert held is not None and claim is not None and open_files(tmp_path) == before + 2
    assert stat.S_IMODE((tmp_path / "holds").stat().st_mode) == 0o600
    holds.close()
    assert open_files(tmp_path) == before + 2
    watching = Holds(tmp_path)
    assert watching.claim(ID) is None and watching.hold(OTHER) is None
    held.release()
    claim.release()
    watching.close()
    assert open_files(tmp_path) == before
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
