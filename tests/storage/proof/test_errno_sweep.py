"""Every call that an operation makes may fail, and may be the last: a part of `tests.faults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckv_jax.storage.place.local import LocalFiles
from tests.faults import sweep, traced
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


def test_the_sweep_sees_pins_that_are_not_believed(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes an unreadable folder of pins for an empty one is found out."""
    monkeypatch.setattr(LocalFiles, "pins", lambda self: set())
    tally = one(scenes, State("prune"))
    assert tally.evicted_pins and not tally.ok
