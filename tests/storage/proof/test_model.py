"""Two stores on one folder against a dictionary of what they promised."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test as run_machine

from bench.fault_kinds.model import TwoStores
from bench.fault_kinds.tally import Tally
from ckv_jax.storage.place.local import LocalFiles


def run(machine: type[TwoStores], examples: int, steps: int) -> Tally:
    """Run a machine up to the first promise that is not kept."""
    kind = type("Fresh", (machine,), {"tally": Tally()})
    run_machine(
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return kind.tally  # type: ignore[attr-defined,no-any-return]


def test_two_stores_keep_what_they_promise() -> None:
    assert run(TwoStores, 5, 20).states > 30


def test_the_model_sees_a_store_that_evicts_what_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Without(TwoStores):
        """The machine without what takes seconds and has nothing to do with pins."""

        crash = paused_lock_holder = slow_disk = corrupt = fault = None  # type: ignore[assignment]

    monkeypatch.setattr(LocalFiles, "pins", lambda self: {})
    with pytest.raises(AssertionError, match="is gone"):
        run(Without, 60, 40)
