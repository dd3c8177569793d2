"""What is read from a disk may hold anything: a typed error or a right answer, in bounds."""

from __future__ import annotations

import json
import time

import pytest

from tests.faults import fuzz
from tests.faults.fuzz_targets import Target, bounded, feed
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


def test_inputs_that_are_slow_large_or_wrong_are_told() -> None:
    def read(data: bytes) -> bool:
        value = json.loads(data)
        if value == "slow":
            end = time.process_time() + 0.8
            while time.process_time() < end:
                pass
        if value == "large":
            return bool(bytearray(4 << 30))
        assert value != "wrong"
        return value != "less"

    target = Target((), read, (ValueError,))
    with bounded():
        found = {
            v: feed(target, json.dumps(v).encode()) for v in ("slow", "large", "wrong", "less", 1)
        }
        assert feed(target, b"{") == "caught"
    assert found.pop("slow").startswith("slow: 0.")
    assert found.pop("large").startswith("MemoryError")
    assert found.pop("wrong").startswith("AssertionError")
    assert found == {"less": "caught", 1: "answer"}
    tally = Tally()
    for what in ("answer", "caught", "slow: 9 s", "hang", "AssertionError: ", "KeyError: 'a'"):
        fuzz.count(tally, what, "")
    assert list(tally.counts.values()) == [6, 1, 1, 1, 0, 0, 1, 2, 0]
