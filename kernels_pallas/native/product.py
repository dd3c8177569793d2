"""Products of a few rows on a CPU, which take as long as their weights take to come from memory.

XLA's take twice as long for one row and as long for two. A row's sums have the same order whatever
the other rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ckv_jax.kernels_pallas.native.library import call, required_level
from ckv_jax.kernels_pallas.target import Target

__all__ = ["MOST_ROWS", "few_rows"]

MOST_ROWS = 2
"""More are faster by XLA."""
_INPUTS, _OUTPUTS = 32, 4


def few_rows(x: Array, weight: Array, *, target: Target, level: int | None = None) -> Array:
    """x [B, S, I] times weight [O, I], both bfloat16: float32 [B, S, O].

    Raises NotImplementedError for other dtypes, more than `MOST_ROWS` rows, sizes that fill no
    whole vectors, and where there is no library or the instructions are lacking.
    """
    del target  # a CPU
    batch, length, inputs = x.shape
    outputs, rows = weight.shape[0], batch * length
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        raise NotImplementedError(f"got {x.dtype} times {weight.dtype}, expected bfloat16")
    if not 0 < rows <= MOST_ROWS or inputs % _INPUTS or outputs % _OUTPUTS:
        raise NotImplementedError(
            f"got {rows} rows times [{outputs}, {inputs}], expected at most {MOST_ROWS} and "
            f"multiples of [{_OUTPUTS}, {_INPUTS}]"
        )
    out, _ = call(
        "ckv_product",
        [((batch, length, outputs), jnp.float32), ((4 * rows * inputs + 64,), jnp.uint8)],
        x, weight, jnp.zeros(0, jnp.float32), level=required_level(level),
    )  # fmt: skip
    return out
