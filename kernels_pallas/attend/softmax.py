"""The running softmax of the TPU kernels: one block of keys after another.

Maxima are kept of the bare logits; their scale and the step from e to 2 are one factor inside the
exponential, so that a logit costs one multiplication. A row's maximum stands in every lane, and its
total is kept lane by lane: nothing moves between lanes except the maximum of each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["LANES", "LOWEST", "Rows", "cleaned", "query_of", "wide"]

LANES = 128
LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


@dataclass(frozen=True, slots=True)
class Rows:
    """What is kept of query rows while their keys go by."""

    acc: Any  # float32 [heads, rows, D]
    top: Any  # float32 [heads, rows, LANES]
    total: Any  # float32 [heads, rows, LANES]

    @staticmethod
    def scratch(heads: int, rows: int, dim: int) -> list[Any]:
        """The memory for it, in the order of the fields."""
        return [
            pltpu.VMEM((heads, rows, dim), jnp.float32),
            pltpu.VMEM((heads, rows, LANES), jnp.float32),
            pltpu.VMEM((heads, rows, LANES), jnp.float32),
        ]

    def start(self, at: Any, rows: int) -> None:
        """The `rows` rows at `at` have seen nothing."""
        heads, _, dim = self.acc.shape
        self.acc[:, at] = jnp.zeros((heads, rows, dim), jnp.float32)
        self.top[:, at] = jnp.full((heads, rows, LANES), LOWEST, jnp.float32)
        self.total[:, at] = jnp.zeros((heads, rows, LANES), jnp.float32)

    def update(
        self, head: int, at: Any, queries: Array, keys: Array, values: Array, seen: Array,
        scale: float,
    ) -> None:  # fmt: skip
        """Takes in keys and values [n, D] of one head for its rows `at`, queries [rows, D].

        seen: bool [rows, n], n a multiple of LANES.
        """
        n = keys.shape[0]
        factor = scale * math.log2(math.e)
        x = lax.dot_general(
            queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        x = jnp.where(seen, x, LOWEST)
        old = self.top[head, at]
        top = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
        # Where a row has seen nothing yet, a base of 0 makes its weights vanish: an operation for
        # each row and not for each logit.
        base = jnp.where(top > LOWEST, top, 0.0)
        p = jnp.exp2((x - wide(base, n)) * factor)
        shrink = jnp.exp2((old - top) * factor)
        total = self.total[head, at] * shrink
        for first in range(0, n, LANES):
            total = total + p[:, first : first + LANES]
        part = jnp.dot(p.astype(values.dtype), values, preferred_element_type=jnp.float32)
        self.acc[head, at] = self.acc[head, at] * wide(shrink, values.shape[1]) + part
        self.total[head, at] = total
        self.top[head, at] = top

    def finish(self, head: int, at: Any, scale: float) -> tuple[Array, Array]:
        """out float32 [rows, D] and the natural log-sum-exp [rows, 1], -inf for nothing seen."""
        total = jnp.sum(self.total[head, at], axis=1, keepdims=True)
        divisor = jnp.where(total > 0, total, 1.0)
        lse = jnp.where(total > 0, self.top[head, at][:, :1] * scale + jnp.log(divisor), -jnp.inf)
        return self.acc[head, at] / divisor, lse


def query_of(rows: int, first: Array, group: int) -> Array:
    """int32 [rows, LANES]: the query of each row from number `first` on, `group` rows a query."""
    # In floats, exact below 2**22 rows: a TPU divides integers by long sequences of instructions.
    row = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) + first
    return jnp.floor((row.astype(jnp.float32) + 0.5) * (1.0 / group)).astype(jnp.int32)


def cleaned(values_ref: Any, order: Array, limit: int) -> None:
    """Zeros for the values [n, W] of tokens whose order [1, n] is `limit` or more."""
    n, width = values_ref.shape
    column = jnp.broadcast_to(order, (LANES, n)).T  # [n, LANES]
    for first in range(0, width, LANES):
        few = min(LANES, width - first)
        lanes = pl.ds(first, few)
        values = values_ref[:, lanes]
        usable = wide(column, few) < limit
        values_ref[:, lanes] = jnp.where(usable, values, jnp.zeros((), values.dtype))


def wide(x: Array, width: int) -> Array:
    """[rows, LANES], the same in every lane, as [rows, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]
