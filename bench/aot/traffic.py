"""Bytes that a TPU kernel's pipeline moves: its blocks, by what its index maps say step by step.

A block is fetched again wherever its index differs from the step before. The program around the
kernel is evaluated with example arrays, since tables of pages say which blocks those are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src.core import eval_jaxpr
from jax._src.state.discharge import discharge_state

MOST_BLOCKS = 128
"""Kernels with more block specs are not walked through: each takes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel call."""

    grid: tuple[int, ...]
    moved: int | None
    """Bytes; None where the kernel moves some of them by itself."""
    declared: int | None
    """Bytes by its own cost estimate."""

    @property
    def steps(self) -> int:
        """Of the grid."""
        return math.prod(self.grid)


def calls(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Call]:
    """The Pallas calls of `function` on `args`, which are arrays."""
    closed = jax.make_jaxpr(function)(*args)
    found: list[Call] = []
    _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), found)
    return found


def _evaluate(jaxpr: Any, consts: Any, args: Any, found: list[Call]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        operands = [value(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name == "pallas_call":
            found.append(_call(eqn, operands))
            out: Any = [np.zeros(a.shape, a.dtype) for a in eqn.params["out_avals"]]
        elif hasattr(inner, "consts"):  # a jitted function
            out = _evaluate(inner.jaxpr, inner.consts, operands, found)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            out = eqn.primitive.bind(*operands, **params)
            out = out if eqn.primitive.multiple_results else [out]
        values |= dict(zip(eqn.outvars, out, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _call(eqn: Any, operands: list[Any]) -> Call:
    mapping = eqn.params["grid_mapping"]
    tables = [np.asarray(table) for table in operands[: mapping.num_index_operands]]
    cost = eqn.params["cost_estimate"]
    declared = None if cost is None else int(cost.bytes_accessed)
    grid = tuple(int(size) for size in mapping.grid)
    by_itself = any("any" in str(b.block_aval) or "hbm" in str(b.block_aval)
                    for b in mapping.block_mappings)  # fmt: skip
    if by_itself or len(mapping.block_mappings) > MOST_BLOCKS:
        return Call(grid=grid, moved=None, declared=declared)
    steps = np.indices(grid, np.int32).reshape(len(grid), -1)
    moved = sum(table.nbytes for table in tables)
    for block in mapping.block_mappings:
        pure = discharge_state(block.index_map_jaxpr)
        dims = len(block.block_shape)

        def index(*at: Any, pure: Any = pure, dims: int = dims) -> Any:
            return eval_jaxpr(pure.jaxpr, pure.consts, *at, *tables)[:dims]

        places = np.stack([np.asarray(x) for x in jax.vmap(index)(*steps)])
        changes = 1 + int(np.any(places[:, 1:] != places[:, :-1], axis=0).sum())
        aval = block.block_aval
        size = math.prod(aval.shape) * aval.dtype.itemsize
        moved += changes * size
    return Call(grid=grid, moved=moved, declared=declared)
