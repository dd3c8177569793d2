"""The page on the store promises what tests prove, and names them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "storage.md"


def rows() -> list[list[str]]:
    """[promise, tests] of each row of the table."""
    part = PAGE.read_text().split("## What is promised, and what proves it")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_promise_names_tests_that_there_are() -> None:
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(rows()) > 20
    for promise, tests in rows():
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, promise
        assert not set(named) - there, promise
