"""Runs of the model of two stores."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.model import TwoStores
from tests.faults.tally import Tally


def run_machine(machine: type[TwoStores], examples: int, steps: int) -> Tally:
    """Run a machine so many times, each of so many rules at most; what it counted."""
    kind: type[TwoStores] = type(machine.__name__, (machine,), {"tally": Tally()})
    run_state_machine_as_test(
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
    return kind.tally


class Counting(TwoStores):
    """The machine that does not stop at what it finds."""

    strict = False
