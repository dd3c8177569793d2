"""Two stores on one folder against a dictionary of what they promised."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test as run_machine

from bench.fault_kinds.model import TwoStores, run_model
from bench.fault_kinds.tally import Tally
from ckv_jax.storage.place.local import LocalFiles


def test_two_stores_keep_what_they_promise() -> None:
    class Fresh(TwoStores):
        tally = Tally()

    run_machine(
        Fresh,
        settings=settings(
            max_examples=5,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Fresh.tally.states > 30


def test_the_model_sees_a_store_that_evicts_what_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalFiles, "pins", lambda self: {})
    assert run_model(60, 40).evicted_pins
