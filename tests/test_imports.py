"""Imports run one way: no module imports itself by way of others, no room one that is above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "ckv_jax": ROOT / "ckv_jax",
    "ckv_jax.storage": ROOT / "storage",
    "ckv_jax.kernels_pallas": ROOT / "kernels_pallas",
}
ROOMS = (
    "ckv_jax.storage", "ckv_jax.kernels_pallas", "ckv_jax.model", "ckv_jax.selection",
    "ckv_jax.prefix", "ckv_jax.pipeline", "ckv_jax.decode", "ckv_jax.documents", "ckv_jax.serving",
    "ckv_jax.baselines", "ckv_jax.server", "ckv_jax.cli",
)  # fmt: skip
"""From the lowest up. The first two do not import each other."""


def test_no_module_imports_itself_by_way_of_others() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_room_imports_one_above_it() -> None:
    up = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (mine := _room(module)) is not None
        and (its := _room(other)) is not None
        and (its > mine or (mine, its) == (1, 0))
    ]
    assert not up


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports as it is loaded, so none that only types need."""
    files = {
        ".".join((name, *path.relative_to(folder).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for name, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
    }
    assert len(files) > 150
    return {
        module: set(_imported(ast.parse(path.read_text()), files)) & files.keys()
        for module, path in files.items()
    }


def _imported(tree: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    """Names that may be modules; imports within functions come later, and count nowhere."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in files else node.module
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _types_only(node):
            yield from _imported(node, files)


def _types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _room(module: str) -> int | None:
    """The place of a module's room; None: a file beside the rooms."""
    return next(
        (place for place, room in enumerate(ROOMS) if f"{module}.".startswith(f"{room}.")), None
    )
