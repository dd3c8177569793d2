"""Build the documentation: every page, the files that pages link to, and the API reference.

python docs/build.py build/docs
"""

from __future__ import annotations

import html
import os
import shutil
import sys
import warnings
from pathlib import Path, PurePosixPath

import pdoc
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin

import ckv_jax

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "ckv_jax",
    "docs/quickstart.md": "Quickstart",
    "docs/requests.md": "Requests",
    "docs/server.md": "Server",
    "docs/decode.md": "Decode",
    "docs/concepts.md": "Concepts",
    "docs/request_flow.md": "Request flow",
    "docs/models.md": "Models",
    "docs/operations.md": "Operations",
    "docs/storage.md": "Storage",
    "docs/kernels.md": "Kernels",
    "docs/accelerators.md": "Accelerators",
    "docs/baselines.md": "Baselines",
    "docs/add_a_system.md": "Add a system",
    "examples/README.md": "Examples",
    "bench/README.md": "Benchmarks",
    "bench/results/README.md": "Results",
    "bench/results/NOTEBOOK.md": "Notebook",
    "CONTRIBUTING.md": "Contributing",
    "CHANGELOG.md": "Changelog",
}
"""What each is called at the top of all pages. They lie in the output as they do in the
repository, so that links between them hold."""
FOLDERS = {
    "ckv_jax": "ckv_jax",
    "storage": "ckv_jax.storage",
    "kernels_pallas": "ckv_jax.kernels_pallas",
}
STYLE = """
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }
pre { overflow-x: auto; padding: .8rem; background: #f4f4f1; line-height: 1.25 }
table { border-collapse: collapse } td, th { border: 1px solid #ccc; padding: .3rem .6rem }
img { max-width: 100% }
nav a { margin-right: 1rem }
"""


def main(out: Path) -> None:
    """Write HTML under `out`; `out/index.html` is the README."""
    for page in PAGES:
        text, files = render(page)
        write = out / _html(page)
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(text, encoding="utf-8")
        for file in files:
            copy = out / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy)
    warnings.filterwarnings("ignore", module="pdoc")  # it cannot read jaxtyping's shape strings
    pdoc.render.configure(docformat="markdown", footer_text="ckv_jax")
    for name in ckv_jax.__all__:  # pdoc does not see names that load on first use
        setattr(ckv_jax, name, getattr(ckv_jax, name))
    pdoc.pdoc(*modules(), output_directory=out / "api")


def modules() -> list[str]:
    """Names of all public modules, the command line left out."""
    found = []
    for folder, root in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([root, *(part for part in parts if part != "__init__")])
            if "cli" not in parts:
                found.append(name)
    return found


def render(page: str) -> tuple[str, list[str]]:
    """One page as HTML, its links to other pages pointing at their HTML, and the paths of files
    that it shows or links to. Headings have the ids that GitHub gives them."""
    source = (ROOT / page).read_text(encoding="utf-8")
    markdown = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6)
    tokens = markdown.parse(source)
    files = []
    for token in (inline for block in tokens for inline in block.children or ()):
        name = {"link_open": "href", "image": "src"}.get(token.type)
        path, mark, anchor = str(token.attrs.get(name, "")).partition("#")
        if not path or "://" in path:
            continue
        target = os.path.normpath(PurePosixPath(page).parent / path)
        if (ROOT / target).is_dir():
            target = f"{target}/README.md"
        if target in PAGES:
            target = _html(target)
        else:
            files.append(target)
        token.attrSet(name, _from(page, target) + mark + anchor)
    body = markdown.renderer.render(tokens, markdown.options, {})
    title = html.escape(source.lstrip("# ").splitlines()[0])
    links = " ".join(f'<a href="{_from(page, _html(to))}">{name}</a>' for to, name in PAGES.items())
    whole = (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f'<nav>{links} <a href="{_from(page, "api/index.html")}">API</a></nav>{body}'
    )
    return whole, files


def _html(page: str) -> str:
    return "index.html" if page == "README.md" else str(PurePosixPath(page).with_suffix(".html"))


def _from(page: str, target: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/build.py OUTPUT_FOLDER")
    main(Path(sys.argv[1]))
