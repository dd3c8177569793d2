"""What `ckv_jax` exports is described field by field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap

import pytest

import ckv_jax

DATA = [name for name in ckv_jax.__all__ if dataclasses.is_dataclass(getattr(ckv_jax, name))]


def described(cls: type) -> set[str]:
    """Fields with a line under them, or in a class's own list of attributes, bases included."""
    bases = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    return set().union(*map(_described_by, bases))


def _described_by(cls: type) -> set[str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {
        before.target.id
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }  # fmt: skip
    for names in re.findall(r"^ +([a-z_]+(?:, [a-z_]+)*):", inspect.getdoc(cls) or "", re.M):
        found |= set(names.split(", "))
    return found


@pytest.mark.parametrize("name", DATA)
def test_every_field_has_a_line(name: str) -> None:
    cls = getattr(ckv_jax, name)
    public = {f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    assert public <= described(cls), public - described(cls)


@pytest.mark.parametrize("name", sorted(set(ckv_jax.__all__) - set(DATA)))
def test_every_class_and_its_methods_have_a_docstring(name: str) -> None:
    cls = getattr(ckv_jax, name)
    assert cls.__doc__
    for method, value in vars(cls).items():
        if not method.startswith("_") and (callable(value) or isinstance(value, property)):
            assert value.__doc__, f"{name}.{method}"
