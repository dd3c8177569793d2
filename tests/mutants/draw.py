"""Drawing mutants: every place of every file of some folders, and a few of them at random."""

from __future__ import annotations

import ast
import collections
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants.near import folder_of

LEFT_OUT = ("core/RemoveDecorator", "core/VariableReplacer", "core/VariableInserter")
"""Operators that need arguments, or whose mutants mostly cannot be imported."""

DOTLESS = "core/ExceptionReplacer"
"""An operator that fails where a name has a dot (`sqlite3.Error`): what it would make cannot be
drawn."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small change: occurrence `index` of what `operator` changes in `file`."""

    folder: str
    file: str
    """From the checkout's root."""
    operator: str
    index: int
    line: int
    place: str
    """What tells it from the file's others, wherever its line has moved to since."""


def drawn(root: Path, folders: list[str], *, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the Python files below `folders`, the same for the same seed and files.

    First a place is drawn, then one of the changes that can be made there: an arithmetic sign,
    for which there are ten others, counts no more than a comparison. What is drawn in lines that
    stay does not depend on the others, so that a run can go on after some of them have changed.
    """
    places: dict[str, list[Mutant]] = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            file = str(path.relative_to(root))
            if folder_of(file) != folder:
                continue
            for where, mutant in _all(folder, file, path.read_text()):
                places.setdefault(f"{seed} {file} {where}", []).append(mutant)
    chosen = sorted(places, key=_lot)[:count]
    return [min(places[at], key=lambda m: _lot(f"{at} {m.operator} {m.place}")) for at in chosen]


def _lot(name: str) -> bytes:
    """Of those that are drawn, the one with the lowest comes first."""
    return hashlib.sha256(name.encode()).digest()


def _all(folder: str, file: str, source: str) -> Iterator[tuple[str, Mutant]]:
    """(place, mutant) of every change to one file but those that no test could see."""
    tree, unseen, lines = get_ast(source), _unseen(source), _named(source)
    written = source.splitlines()
    nodes = list(ast_nodes(tree))
    for name, operator in _operators().items():
        index, before = 0, collections.Counter[str]()
        for node in nodes:
            for (line, column), (_, end) in operator.mutation_positions(node):
                indent, text = lines[line - 1]
                where = f"{text} @{column - indent}"
                dotted = name == DOTLESS and "." in written[line - 1][column:end]
                if not dotted and not any(a <= (line, column) < b for a, b in unseen):
                    place = f"{where} #{before[where]}"
                    yield where, Mutant(folder, file, name, index, line, place)
                before[where] += 1
                index += 1


def _named(source: str) -> list[tuple[int, str]]:
    """Each line's indentation, and its text with how many of the same are before it."""
    before, named = collections.Counter[str](), []
    for line in source.splitlines():
        text = line.strip()
        named.append((len(line) - len(line.lstrip()), f"{text} ~{before[text]}"))
        before[text] += 1
    return named


@cache
def _operators() -> dict[str, Any]:
    names = [n for n in operator_names() if not n.startswith(LEFT_OUT)]
    return {name: get_operator(name)() for name in sorted(names)}


Span = tuple[tuple[int, int], tuple[int, int]]


def _unseen(source: str) -> list[Span]:
    """Where nothing happens when the program runs: annotations, aliases, messages, and checks of
    the program itself (that a dataclass is frozen, has slots, takes keywords alone; that what is
    zipped is equally long)."""
    spans: list[Span] = []

    def leave_out(node: ast.AST | None) -> None:
        if isinstance(node, ast.expr):
            end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
            spans.append(((node.lineno, node.col_offset), end))

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg():
                leave_out(node.annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                leave_out(node.returns)
            case ast.AnnAssign():
                leave_out(node.annotation)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                leave_out(node.test)
            case ast.ClassDef():
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call):
                        leave_out(decorator)
            case ast.keyword(arg="strict"):
                leave_out(node.value)
            case ast.Raise():
                leave_out(node.exc)
            case ast.Assign(targets=[ast.Name(id=name)]) if name[:1].isupper() and any(
                isinstance(part, ast.Name) and part.id in ("Callable", "None", "Any")
                for part in ast.walk(node.value)
            ):
                leave_out(node.value)
    return spans
