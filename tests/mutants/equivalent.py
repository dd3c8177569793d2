"""Changes that no test can notice (`equivalent.tsv`), each with the reason."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

from tests.mutants.draw import Mutant

_FLAGS = re.compile(r"os\.O_\w+(?: \| os\.O_\w+)+")
_SUMS = ("core/ReplaceBinaryOperator_BitOr_BitXor", "core/ReplaceBinaryOperator_BitOr_Add")


@cache
def reasons() -> dict[tuple[str, str, str], str]:
    """(file, operator, place) -> why."""
    with Path(__file__).with_suffix(".tsv").open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {(name, operator, place): why for name, operator, place, why in rows}


def reason(mutant: Mutant) -> str | None:
    """Why a change is none; None if it is one."""
    flags = _FLAGS.search(mutant.place) and "|" not in _FLAGS.sub("", mutant.place)
    if flags and mutant.operator in _SUMS:
        return "flags of an open that share no bit"
    return reasons().get((mutant.file, mutant.operator, mutant.place))
