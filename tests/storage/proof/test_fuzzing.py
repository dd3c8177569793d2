"""What is read from a disk may hold anything: a typed error or a right answer, in bounds."""

from __future__ import annotations

import pytest

from tests.faults import fuzz
from tests.faults.tally import Tally


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tally]:
    """What came of a few inputs of every target, in one process, which makes its stores once."""
    tallies = fuzz.fuzz(tmp_path_factory.mktemp("fuzzed"), 60, jobs=1)
    return {name: tally for (_, name), tally in tallies.items()}


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_anything_is_refused_or_read_right(fuzzed: dict[str, Tally], name: str) -> None:
    assert fuzzed[name].ok, fuzzed[name].notes[:5]
    assert fuzzed[name].states >= 8
