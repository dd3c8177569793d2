"""Every fault that `python -m tests.faults` makes, in part: calls that fail or are the last, power
loss, two stores at once, and data of any content."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckv_jax.storage.place.local import LocalFiles
from tests.faults import fuzz, power, scene, sweep, traced
from tests.faults.crash_states import Recorder
from tests.faults.model import TwoStores, run_machine
from tests.faults.sweep import State
from tests.faults.tally import MEMORY, Tally


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # an index that is lost on purpose need not be reported
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def scenes() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckv-proof-", dir=MEMORY))
    scene.prepare(folder)
    yield folder
    shutil.rmtree(folder)


# -- calls -----------------------------------------------------------------------------------------


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


def test_the_sweep_sees_pins_that_are_not_believed(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes an unreadable folder of pins for an empty one is found out."""
    monkeypatch.setattr(LocalFiles, "pins", lambda self: set())
    tally = one(scenes, State("prune"))
    assert tally.evicted_pins and not tally.ok


# -- power loss ------------------------------------------------------------------------------------


def test_every_state_that_may_be_left_is_served(scenes: Path) -> None:
    assert passed(power.power_losses(scenes, jobs=2, step=60)).states > 40


def test_a_store_that_does_not_sync_is_found_out(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_on_fsync", lambda *_: None)  # as if it did nothing
    folder = scenes / "unsynced"
    events, done, states = power.record(scenes, "write", folder)
    bad = Tally()
    for end, what, tree in states:
        if end == events:
            bad += power.judge_state(scenes, folder, power.Loss("write"), tree, done, what)
    shutil.rmtree(folder)
    assert bad.lost_healthy, bad


# -- two stores on one folder ----------------------------------------------------------------------


def test_two_stores_keep_what_they_promise() -> None:
    assert run_machine(TwoStores, 12, 30).states > 60


def test_the_model_sees_a_store_that_evicts_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(TwoStores):
        """The machine without what takes seconds and has nothing to do with pins."""

        crash = paused_lock_holder = corrupt = fault = None  # type: ignore[assignment]

    monkeypatch.setattr(LocalFiles, "pins", lambda self: {})
    with pytest.raises(AssertionError, match="is gone"):
        run_machine(Without, 60, 40)


# -- what is read from a disk ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tally]:
    """What came of a few inputs of every target, in one process, which makes its stores once."""
    tallies = fuzz.fuzz(tmp_path_factory.mktemp("fuzzed"), 60, jobs=1)
    return {name: tally for (_, name), tally in tallies.items()}


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_anything_is_refused_or_read_right(fuzzed: dict[str, Tally], name: str) -> None:
    assert fuzzed[name].ok, fuzzed[name].notes[:5]
    assert fuzzed[name].states >= 8
