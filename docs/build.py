"""Build the documentation: the pages of this folder, and the API reference from docstrings.

python docs/build.py build/docs
"""

from __future__ import annotations

import html
import sys
import warnings
from pathlib import Path

import pdoc
from markdown_it import MarkdownIt

import ckv_jax

HERE = Path(__file__).resolve().parent
PAGES = (
    "README",
    "docs/quickstart",
    "docs/requests",
    "docs/server",
    "docs/decode",
    "docs/concepts",
    "docs/models",
    "docs/operations",
    "docs/storage",
    "docs/kernels",
    "docs/accelerators",
    "CONTRIBUTING",
    "CHANGELOG",
)
FOLDERS = {
    "ckv_jax": "ckv_jax",
    "storage": "ckv_jax.storage",
    "kernels_pallas": "ckv_jax.kernels_pallas",
}
STYLE = """
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }
pre { overflow-x: auto; padding: .8rem; background: #f4f4f1; line-height: 1.25 }
table { border-collapse: collapse } td, th { border: 1px solid #ccc; padding: .3rem .6rem }
nav a { margin-right: 1rem }
"""


def main(out: Path) -> None:
    """Write HTML under `out`; `out/index.html` is the README."""
    out.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        source = HERE.parent / f"{page}.md"
        (out / f"{_name(page)}.html").write_text(render(source.read_text(encoding="utf-8")))
    warnings.filterwarnings("ignore", module="pdoc")  # it cannot read jaxtyping's shape strings
    pdoc.render.configure(docformat="markdown", footer_text="ckv_jax")
    for name in ckv_jax.__all__:  # pdoc does not see names that load on first use
        setattr(ckv_jax, name, getattr(ckv_jax, name))
    pdoc.pdoc(*modules(), output_directory=out / "api")


def modules() -> list[str]:
    """Names of all public modules, the command line left out."""
    found = []
    for folder, root in FOLDERS.items():
        for path in sorted((HERE.parent / folder).rglob("*.py")):
            parts = path.relative_to(HERE.parent / folder).with_suffix("").parts
            name = ".".join([root, *(part for part in parts if part != "__init__")])
            if "cli" not in parts:
                found.append(name)
    return found


def render(markdown: str) -> str:
    """One page as HTML, its links to other pages pointing at their HTML."""
    body = MarkdownIt("commonmark").enable("table").render(markdown)
    for page in PAGES:
        target = f'href="{_name(page)}.html'
        for link in (f"{page}.md", f"../{page}.md", f"{Path(page).name}.md"):
            body = body.replace(f'href="{link}', target)
    title = html.escape(markdown.lstrip("# ").splitlines()[0])
    links = " ".join(f'<a href="{_name(page)}.html">{_title(page)}</a>' for page in PAGES)
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f'<nav>{links} <a href="api/index.html">API</a></nav>{body}'
    )


def _name(page: str) -> str:
    return "index" if page == "README" else Path(page).name.lower()


def _title(page: str) -> str:
    return "ckv_jax" if page == "README" else Path(page).name.capitalize()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/build.py OUTPUT_FOLDER")
    main(Path(sys.argv[1]))
