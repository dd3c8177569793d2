"""Hooks of mkdocs: they collect the pages of the site, and the files that these link to.

Pages keep the paths that they have in the repository, so that a link works on GitHub and here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402

_LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_startup(command: str, dirty: bool) -> None:
    """Copies the three packages as they are installed, for mkdocstrings to read their docstrings.

    It runs before plugins start, as mkdocstrings lists the folder only once."""
    packages = ROOT / "build" / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__", "reference")
    for folder, package in (
        ("ckv_jax", "ckv_jax"),
        ("storage", "ckv_jax/storage"),
        ("kernels_pallas", "ckv_jax/kernels_pallas"),
    ):
        shutil.copytree(ROOT / folder, packages / package, ignore=ignore)


def on_files(files: Files, config: Any) -> Files:
    """The pages of the navigation, what they link to, and the theme's own files."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    pages = {path: _page(path) for path in _paths(config.nav)}
    kept += [File.generated(config, path, content=text) for path, text in pages.items()]
    linked = {
        target
        for path, text in pages.items()
        for _, link in _LINK.findall(text)
        if (target := _target(path, link)) not in pages and (ROOT / target).is_file()
    }
    linked |= {path for path in config.extra_css if (ROOT / path).is_file()}
    kept += [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in sorted(linked)]
    return Files(kept)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to a folder lead to its README."""

    def to_readme(match: re.Match[str]) -> str:
        folder = (ROOT / _target(page.file.src_uri, match[2])).is_dir()
        return match[0] + "/README.md" * folder

    return _LINK.sub(to_readme, markdown)


def _paths(nav: Any) -> list[str]:
    """Paths of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [
        path for item in (nav.values() if isinstance(nav, dict) else nav) for path in _paths(item)
    ]


def _page(path: str) -> str:
    """The Markdown of one page."""
    name = PurePosixPath(path)
    if path in reference.PAGES:
        return reference.PAGES[path]()
    if name.parent.name == "notebook":
        return _notebook(json.loads((ROOT / name.with_suffix(".ipynb")).read_text("utf-8")))
    return (ROOT / path).read_text("utf-8")


def _notebook(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: texts, code, and the text that the code printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if code else source)
        for output in cell.get("outputs", ()):
            printed = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts)


def _target(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return os.path.normpath(PurePosixPath(page).parent / link)
