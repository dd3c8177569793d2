"""Changes that no test can notice, each with the reason: nothing that anybody sees differs."""

from __future__ import annotations

from tests.mutants.draw import Mutant

REASONS: dict[tuple[str, str, str], str] = {}
"""(file, operator, place) -> why."""


def reason(mutant: Mutant) -> str | None:
    """Why a change is none; None if it is one."""
    return REASONS.get((mutant.file, mutant.operator, mutant.place))
