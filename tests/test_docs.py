"""The pages say what is so: code compiles, links lead somewhere, commands and options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from ckv_jax.cli.app import app
from ckv_jax.cli.options import RARE
from tests.support.pages import blocks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
]


def headings(page: Path) -> set[str]:
    """Its headings as GitHub and the site name them in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_compiles_and_links_lead_somewhere(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")
    for target, _, heading in re.findall(r"\]\(([^)#]*)(#?)([^)]*)\)", page.read_text("utf-8")):
        if "://" not in target:
            place = page.parent / target if target else page
            assert place.exists(), target
            assert not heading or heading in headings(place), (target, heading)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    options = {
        name: {
            opt
            for part in getattr(command, "commands", {"": command}).values()
            for parameter in part.params
            for opt in parameter.opts
        }
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
    for command, rest in re.findall(r"\bckv ([a-z]+)\b([^\n`|]*)", text):
        if command not in options:
            assert command in ("is", "and", "does", "uses", "or"), command
            continue
        used = set(re.findall(r"(?<![\w-])--[a-z-]+", rest))
        assert used <= options[command] | {"--help"}, (command, used)


def test_help_shows_options_of_the_readme_among_the_first() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        used = set(re.findall(r"--[a-z-]+", "".join(re.findall(rf"\bckv {name}\b.*", readme))))
        for option in command.params:
            rare = getattr(option, "rich_help_panel", None) == RARE
            assert not (rare and used & set(option.opts)), (name, option.opts)


def test_each_example_has_a_store_of_its_own() -> None:
    """Another one, or the tutorial, may have another model."""
    stores: dict[str, str] = {}
    for path in (ROOT / "examples").glob("*.py"):
        [stores[path.name]] = re.findall(r"--store (\S+)", path.read_text("utf-8"))
    assert len(set(stores.values())) == len(stores)
    readme = (ROOT / "examples" / "README.md").read_text("utf-8")
    assert set(re.findall(r"(\w+\.py).* --store (\S+)", readme)) <= set(stores.items())
    for page in PAGES[:-1]:
        text = page.read_text("utf-8")
        assert not [store for store in stores.values() if re.search(rf"{store}\b", text)], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_installs_in_a_clone_are_editable(page: Path) -> None:
    """Python started in the clone would find its `ckv_jax` folder alone otherwise."""
    assert not re.findall(r"pip install '?\.", page.read_text("utf-8"))


BENCHES = [*PAGES, ROOT / "bench" / "README.md", ROOT / "bench" / "results" / "README.md"]


@pytest.mark.parametrize("page", BENCHES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_benchmarks_that_are_named_exist_with_their_options(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
    shared = (ROOT / "bench" / "common.py").read_text("utf-8")
    for module, rest in re.findall(r"python -m (bench[.a-z_]*[a-z])([^`\n|#]*)", text):
        path = ROOT / module.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.is_file(), module
        source = file.read_text("utf-8") + shared
        for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", rest):
            assert f'"--{option}"' in source, (module, option)


def test_commands_of_the_readme_are_targets_of_make() -> None:
    shown = blocks(ROOT / "README.md", "console")
    commands = [line for block in shown for line in block.splitlines()]
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {command.split()[1] for command in commands} <= set(targets)
