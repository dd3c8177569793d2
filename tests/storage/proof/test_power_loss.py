"""What may be left when the power goes: every operation, a part of its states."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults import power
from tests.faults.crash_states import Recorder
from tests.faults.tally import Tally


def test_every_state_that_may_be_left_is_served(scenes: Path) -> None:
    tallies = power.power_losses(scenes, jobs=2, step=60)
    total = sum(tallies.values(), Tally())
    assert total.ok, total.notes[:5]
    assert total.states > 40


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
