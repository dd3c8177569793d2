"""Changes that no test can notice, each with the reason: nothing that anybody sees differs."""

from __future__ import annotations

from tests.mutants.draw import Mutant

REASONS: dict[tuple[str, str, str], str] = {
    (
        "storage/probe_pages.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "return first % most == 0 and (end % most == 0 or end == last) ~0 @41 #0",
    ): "a remainder is never less than 0",
    (
        "ckv_jax/pipeline/choices.py",
        "core/NumberReplacer",
        "sources = [member.choosers[0].source for member in self._members] ~0 @27 #1",
    ): "the last row instead of the first: all rows of a member stand on one prefix",
}
"""(file, operator, place) -> why."""


def reason(mutant: Mutant) -> str | None:
    """Why a change is none; None if it is one."""
    return REASONS.get((mutant.file, mutant.operator, mutant.place))
