"""Plain words: none to avoid, and paragraphs of README and tutorial that are easy to read."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import typer

from ckv_jax.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
    *(ROOT / name / "README.md" for name in ("examples", "bench", "bench/results")),
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    ROOT / "ckv_jax" / "server" / "status.html",
]
AVOID = (
    "mended mending mends anew whoever nobody somebody tells told lies", "by turns", "in vain",
    "beside it", "so large a share", "is said by", "waits behind", "under way", "anybody",
    "one's own", "in its stead", "so many", "so much as",
)  # fmt: skip
"""Of an older English, or vague; DESIGN's plain words take their place."""
HARDEST = 10.0
"""Flesch-Kincaid grade of a paragraph."""


def words() -> re.Pattern[str]:
    """All words and phrases to avoid."""
    single, *phrases = AVOID
    return re.compile(rf"\b({'|'.join([*single.split(), *phrases])})\b", re.I)


def prose(text: str) -> str:
    """A page without code, quotations, links' targets and HTML."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`|“[^”]*”|<[^>]*>", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_pages_avoid_these_words(page: Path) -> None:
    text = page.read_text("utf-8")
    found = words().findall(prose(text)) + re.findall("^(?:<{7}|>{7}) .*", text, re.M)
    assert not found, found


def test_help_texts_avoid_these_words() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        texts = [command.help, *(one.help for one in command.params)]
        for text in texts:
            assert not words().findall(prose(text or "")), (name, text)


def test_notebooks_avoid_these_words() -> None:
    for path in (ROOT / "docs" / "notebook").glob("*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                assert not words().findall(prose("".join(cell["source"]))), cell


def test_errors_and_warnings_avoid_these_words() -> None:
    for folder in ("ckv_jax", "storage", "kernels_pallas"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
                if isinstance(node, ast.Raise) or called in ("warn", "warning", "error"):
                    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                    assert not words().findall("\n".join(map(str, texts))), (path, texts)


def paragraphs(page: Path) -> list[str]:
    """Paragraphs and items of lists as one line each, code as one word; no headings and tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    text = re.sub(r"^(#|\||!\[).*$", "", text, flags=re.M)
    text = re.sub(r"^(?:-|\d+\.) ", "\n", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "code", text)
    found = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [re.sub(r"[*“”]", "", block) for block in found if len(block.split()) >= 12]


def grade(text: str) -> float:
    """Flesch-Kincaid: school years that a reader needs. Syllables are groups of vowels."""
    found = re.findall(r"[A-Za-z][A-Za-z'’-]*", text)
    syllables = sum(
        max(1, len(re.findall(r"[aeiouy]+", word.lower().removesuffix("e")))) for word in found
    )
    sentences = max(1, len(re.findall(r"[.!?](?:\s|$)", text)))
    return 0.39 * len(found) / sentences + 11.8 * syllables / len(found) - 15.59


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_paragraphs_are_easy(page: str) -> None:
    assert grade("Considerable interdependencies necessitate deliberation.") > HARDEST
    hard = {text: reached for text in paragraphs(ROOT / page) if (reached := grade(text)) > HARDEST}
    assert not hard, hard
