"""The site has every page, and its reference every command, option, field, metric and error."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

import ckv_jax
from ckv_jax.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """What generates pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("reference")


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    """The generated pages by name."""
    return {Path(path).stem: page() for path, page in reference.PAGES.items()}


def named_pages() -> list[str]:
    """Paths of the pages in the navigation, in its order."""
    nav = (DOCS / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    return re.findall(r": (\S+\.md)$", nav, re.M)


def test_every_page_is_in_the_navigation() -> None:
    named = named_pages()
    assert len(named) == len(set(named))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= set(named)
    for path in named:
        source = ROOT / path
        generated = path.startswith("docs/reference/")
        assert generated or source.is_file() or source.with_suffix(".ipynb").is_file(), path


def test_pictures_show_the_results_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DOCS / "pictures")
    import draw

    drawings = DOCS / "pictures"
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.setattr(draw, "HERE", tmp_path / "docs" / "pictures")
    for picture in draw.PICTURES:
        picture()
    drawn = sorted((tmp_path / "docs" / "pictures").iterdir())
    assert len(drawn) == len(draw.PICTURES)
    for path in drawn:
        assert path.read_text("utf-8") == (drawings / path.name).read_text("utf-8"), (
            f"run: python docs/pictures/draw.py ({path.name})"
        )


def test_the_reference_has_every_command_and_option(pages: dict[str, str]) -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = pages["commands"].split(f"\n## ckv {name}\n")[1].split("\n## ")[0]
        for option in (option for one in command.params for option in one.opts):
            assert not option.startswith("-") or option in section, (name, option)


def test_the_reference_has_a_line_for_every_field(
    reference: ModuleType, pages: dict[str, str]
) -> None:
    text = pages["configuration"]
    for config in reference.CONFIGS:
        section = text.split(f"\n## {config.__name__}\n")[1].split("\n## ")[0]
        for field in dataclasses.fields(config):
            assert field.name.startswith("_") or f"| `{field.name}` |" in section, (config, field)
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    assert not [row for row in rows if row.endswith("|  |")]


def test_the_reference_has_every_metric_and_error(pages: dict[str, str]) -> None:
    watched = re.findall(r"`(?:rate\()?((?:ckv|vllm)[_:][a-z_]+)", (DOCS / "server.md").read_text())
    known = set(re.findall(r"`((?:ckv|vllm)[_:][a-z_]+)`", pages["metrics"]))
    known |= {f"{name}_bucket" for name in known}
    assert len(known) > 25
    assert set(watched) - {"ckv_jax"} <= known
    for name in ckv_jax.__all__:
        if issubclass(getattr(ckv_jax, name), Exception):
            assert f"`{name}`" in pages["errors"]


def test_the_reference_has_every_route_and_body(
    reference: ModuleType, pages: dict[str, str]
) -> None:
    for route in ("/v1/models", "/metrics", "/ready"):
        assert f"`{route}`" in pages["http"]
    taking = re.findall(r"^\| `(POST|PATCH)` \| `(\S+)` \|", pages["http"], re.M)
    assert {" ".join(route) for route in taking} == set(reference.BODIES)
    for title, model in reference.BODIES.items():
        section = pages["http"].split(f"\n## {title}\n")[1].split("\n## ")[0]
        for field in model.model_json_schema()["properties"]:
            assert f"| `{field}` |" in section, (title, field)
    linked = set(re.findall(r"\]\(#([a-z]+)\)", pages["http"]))
    assert linked == {name.lower() for name in re.findall(r"^### (\w+)$", pages["http"], re.M)}
    for field in (
        "budget",
        "mass",
        "citations",
        "documents",
        "temperature",
        "chat_template_kwargs",
    ):
        assert f"| `{field}` |" in pages["http"]


@pytest.mark.slow
def test_search_finds_the_words_of_every_page(tmp_path: Path) -> None:
    """`make docs` installs mkdocs; without it there is no site."""
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    build += ["--config-file", str(DOCS / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    subprocess.run(build, check=True)
    found: dict[str, set[str]] = {}
    for part in json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))["docs"]:
        page = part["location"].split("#")[0]
        found.setdefault(page, set()).update(re.findall(r"[a-z]{5,}", part["text"].lower()))
    for path in named_pages():
        page = re.sub(r"(^|/)README\.md$", r"\1index.md", path).removesuffix(".md") + ".html"
        assert found[page], path
        if path.startswith("docs/") and (ROOT / path).is_file():
            text = re.sub(
                r"`[^`]*`|\]\([^)]*\)|^[`#|!<].*$", "", (ROOT / path).read_text("utf-8"), flags=re.M
            )
            missing = set(re.findall(r"(?<!\S)[a-z]{5,}(?=[,.;]?\s)", text)) - found[page]
            assert not missing, (path, missing)
