"""Every call that an operation makes may fail, and may be the last: a part of `tests.faults`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckv_jax.storage.place.local import LocalFiles
from tests.faults import scene, sweep, traced
from tests.faults.calls import Calls, Plan
from tests.faults.scene import Done, Verdict
from tests.faults.sweep import State
from tests.faults.tally import Tally


def passed(tallies: dict[tuple[str, str], Tally]) -> Tally:
    total = sum(tallies.values(), Tally())
    assert total.ok, total.notes[:5]
    return total


def one(scenes: Path, state: State) -> Tally:
    """A state run in this process."""
    found: list[Any] = []
    sweep.run_states(scenes, [state], lambda _, result: found.append(result))
    return sweep.tally_of(state, found[-1])


def test_calls_that_fail_and_processes_that_die_there(scenes: Path) -> None:
    total = passed(sweep.sweep(scenes, jobs=2, step=601))
    assert total.states > 40 and total.caught and total.harmless


def test_calls_of_the_real_program_that_fail(scenes: Path) -> None:
    if reason := traced.missing():
        pytest.skip(reason)
    total = passed(traced.trace(scenes, jobs=2, step=600, operations=("write", "read", "prune")))
    assert total.states


@pytest.mark.parametrize("free", [0, 2, 5, 9])
@pytest.mark.parametrize("operation", ["read directly", "prune"])
def test_running_out_of_descriptors_loses_nothing(scenes: Path, operation: str, free: int) -> None:
    tally = one(scenes, State(operation, free=free))
    assert tally.ok, tally.notes


# -- the harness itself --------------------------------------------------------------------------


def test_each_call_fails_once(tmp_path: Path) -> None:
    with Calls() as calls:
        calls.arm(Plan())
        (tmp_path / "a").write_bytes(b"1")
        os.stat(tmp_path / "a")
        calls.disarm()
        assert calls.count == 4  # open, write, close, stat
        for at, name in enumerate(("open", "write", "close", "stat"), 1):
            calls.arm(Plan(at, "EDQUOT"))
            with pytest.raises(OSError, match="quota"):
                (tmp_path / "a").write_bytes(b"1")
                os.stat(tmp_path / "a")
            calls.disarm()
            assert calls.failed == name
        os.stat(tmp_path / "a")  # and none where nothing was asked for
    assert "made" not in os.stat.__name__


def test_the_sweep_sees_pins_that_are_not_believed(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes an unreadable folder of pins for an empty one is found out."""
    monkeypatch.setattr(LocalFiles, "pins", lambda self: set())
    tally = one(scenes, State("prune"))
    assert tally.evicted_pins and not tally.ok


def test_the_judge_sees_what_is_lost_and_left_over(scenes: Path, tmp_path: Path) -> None:
    def judged(hurt: Any) -> Verdict:
        folder = tmp_path / "store"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(scenes / "whole", folder)
        hurt(folder)
        return scene.judge(scenes, folder, "lookup", Done())

    def lose(folder: Path) -> None:
        shutil.rmtree(next(iter((folder / "segments").glob("*/*"))))

    def flip(folder: Path) -> None:
        for path in folder.glob("segments/*/*/packs/c.*"):
            path.write_bytes(bytes(path.stat().st_size))

    nothing = judged(lambda folder: None)
    assert nothing == Verdict()
    gone = judged(lose)
    assert gone.lost or gone.pins
    assert len(judged(flip).lost) == len(scene.STORED) - 1  # the pinned one is listed as such
    assert judged(lambda folder: (folder / "catalog.sqlite.0f").touch()).leaks == [
        "a stray catalog"
    ]
    assert judged(lambda folder: shutil.rmtree(folder / "pins")).pins
