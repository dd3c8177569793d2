"""Code of the documentation's pages."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language, those in lists too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text("utf-8"), re.M | re.S)
    return [textwrap.dedent(code) for _, code in found]


def add_largest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the system of add_a_system.md importable; returns its name."""
    (source,) = blocks(DOCS / "add_a_system.md", "python")
    assert len(source.splitlines()) <= 32
    (folder / "largest.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "largest", raising=False)
    return "largest:LARGEST"
