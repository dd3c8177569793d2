"""What may be left when the power goes: every operation, a part of its states."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults import power
from tests.faults.calls import Calls, Plan
from tests.faults.crash_states import Recorder, crash_states
from tests.faults.tally import Tally


def test_every_state_that_may_be_left_is_served(scenes: Path) -> None:
    tallies = power.power_losses(scenes, jobs=2, step=60)
    total = sum(tallies.values(), Tally())
    assert total.ok, total.notes[:5]
    assert total.states > 40


def recorded(folder: Path, work: Any) -> list[dict[str, bytes | None]]:
    """What may be left of `work` in an empty folder."""
    folder.mkdir()
    recorder = Recorder(folder)
    recorder.begin()
    with Calls() as calls:
        calls.note = recorder.note
        calls.arm(Plan())
        work(folder)
        calls.disarm()
    return [tree for _, _, tree in crash_states(recorder)]  # type: ignore[misc]


def write(path: Path, *, durable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(fd, b"12345678", 0)
    if durable:
        os.fsync(fd)
    os.close(fd)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def test_data_that_was_not_synced_may_be_torn_and_names_lost(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        write(folder / "new", durable=False)
        os.rename(folder / "new", folder / "name")

    left = recorded(tmp_path / "a", work)
    assert {tree.get("name") for tree in left} >= {None, b"", b"1234", bytes(8), b"12345678"}
    assert {} in left


def test_what_was_synced_is_there(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        write(folder / "new", durable=True)
        os.rename(folder / "new", folder / "name")
        sync(folder)
        os.mkdir(folder / "after")

    left = recorded(tmp_path / "a", work)
    assert {"name": b"12345678"} in left  # the folder made later may be lost
    assert {"name": b"12345678", "after": None} in left
    names = [set(tree) for tree in left]
    assert {"new", "name"} not in names, "a rename happens as a whole"
    assert all(tree.get("name", b"12345678") == b"12345678" for tree in left)


def test_a_store_that_does_not_sync_is_found_out(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_on_fsync", lambda *_: None)  # as if it did nothing
    folder = scenes / "unsynced"
    events, done, states = power.record(scenes, "write", folder)
    share = power.Share("write", 0, 1, 1)
    bad = Tally()
    for end, what, tree in states:
        if end == events:
            bad += power.judge_state(scenes, folder, share, tree, done, what)
    shutil.rmtree(folder)
    assert bad.lost_healthy, bad
