"""Which tests run which lines, so that those that may notice a mutant run before all others."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FIRST = "CKV_MUTANTS_FIRST"
"""The variable that names a file with the ids of the tests to begin with, one per line."""
FAILED = "CKV_MUTANTS_FAILED"
"""The variable that names a file which gets the ids of the tests that failed, one per line."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes this module a plugin: the named tests come first, none is left out."""
    if FIRST in os.environ:
        first = set(Path(os.environ[FIRST]).read_text().splitlines())
        items.sort(key=lambda item: item.nodeid not in first)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Part of the plugin: notes which tests fail while they are watched."""
    if FAILED in os.environ and report.failed:
        with open(os.environ[FAILED], "a") as file:
            file.write(f"{report.nodeid}\n")


class Reach:
    """What a run of tests under `--cov-context=test` has recorded.

    A line that is traced into a program is recorded for the test that traced it alone, and lines
    that run in other processes for none: this orders tests, and excludes none.
    """

    def __init__(self, recorded: Path, root: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(recorded))
        self._data.read()
        self._root = root

    def tests_of(self, file: str, line: int) -> list[str]:
        """Ids of the tests that ran the statement which holds this line; none for a file unseen."""
        seen = self._data.contexts_by_lineno(str(self._root / file))
        first = _statement((self._root / file).read_text(), line)
        found = {test for at in range(first, line + 1) for test in seen.get(at, ())}
        return sorted({test.partition("|")[0] for test in found if test})


@cache
def _statement(source: str, line: int) -> int:
    """Where the innermost statement around a line begins."""
    return max(
        (
            node.lineno
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
        ),
        default=line,
    )
