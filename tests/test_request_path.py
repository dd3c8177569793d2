"""A request passes few classes and files on its way to the first jitted call."""

from __future__ import annotations

from pathlib import Path

import pytest
from request_path import NOTHING_CACHED, tiny_path


@pytest.mark.parametrize(
    ("config", "passed", "entered"),
    [({}, 10, 26), (NOTHING_CACHED, 13, 31)],
    ids=["all in memory", "nothing cached"],
)
def test_a_request_passes_few_classes_and_files(
    tmp_path: Path, config: dict[str, object], passed: int, entered: int
) -> None:
    path = tiny_path(tmp_path, **config)
    # What no way can do without: else something else than a request was recorded.
    assert {"Engine", "Scheduler", "Worker", "Executor", "Layers"} <= set(path.passed)
    assert {"Sequence", "Placement", "Packs", "Probes"} <= set(path.classes)
    assert ("InPool" in path.classes) == bool(config), "packs are read before the first call"
    assert len(path.passed) <= passed, path.passed
    assert len(path.passed_files) <= passed, path.passed_files
    assert len(path.classes) <= entered, list(path.classes)
