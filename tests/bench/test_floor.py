"""The compute floor: the recorded calls, run again, are the same calls and give the same answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.common import Setting
from bench.floor import Made, record
from bench.lab import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder: Path = tmp_path_factory.mktemp("floor")
    setting = dataclasses.replace(
        Setting(), model="tiny", prefix_tokens=512, prefixes=1, budgets=(0.1,), folder=folder
    )
    with Lab(setting) as found:
        yield found


@pytest.mark.parametrize("name", ["ckv", "impress", "as-lru"])
def test_a_replay_gives_every_result_again(lab: Lab, name: str) -> None:
    with lab.engine(name, device_bytes=2 * lab.kv_bytes + (64 << 20)) as engine:
        found = record(lab, engine, 0.1)
        again = found.replay()
    names = [call.name for call in found.calls]
    assert names[0] == "embed" and "head" in names  # what was selected may be stacked after it
    assert any(isinstance(arg, Made) for arg in found.calls[-1].args)  # chained, not cut up
    for before, after in zip(found.results, again, strict=True):
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
