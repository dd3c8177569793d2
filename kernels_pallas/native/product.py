"""Products of a few rows on a CPU, which take as long as their weights take to come from memory.

XLA's take twice as long for one row of bfloat16, as long for two, and know no weights of int8. A
row's sums have the same order whatever the other rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ckv_jax.kernels_pallas.native.library import call, required_level
from ckv_jax.kernels_pallas.target import Target

__all__ = ["MOST_INT8_ROWS", "MOST_ROWS", "few_rows"]

MOST_ROWS = 2
"""More are faster by XLA."""
MOST_INT8_ROWS = 8
"""More are faster by XLA, though it widens the weights first."""
_INPUTS = 32  # two vectors of 16 numbers
_LEAST_OUTPUTS = 4


def few_rows(
    x: Array, weight: Array, scale: Array | None = None, *, target: Target, level: int | None = None
) -> Array:
    """x bfloat16 [B, S, I] times weight [O, I]: float32 [B, S, O].

    `weight`: bfloat16, or int8, of which one is worth `scale` float32 [O].

    Raises NotImplementedError for other dtypes, more rows than `MOST_ROWS` (`MOST_INT8_ROWS`),
    sizes that fill no whole vectors, and where there is no library or the instructions are lacking.
    """
    del target  # a CPU
    batch, length, inputs = x.shape
    outputs, rows = weight.shape[0], batch * length
    wanted, most = (jnp.bfloat16, MOST_ROWS) if scale is None else (jnp.int8, MOST_INT8_ROWS)
    if x.dtype != jnp.bfloat16 or weight.dtype != wanted:
        raise NotImplementedError(f"got {x.dtype} times {weight.dtype}, expected bfloat16")
    if not 0 < rows <= most or inputs % _INPUTS or outputs < _LEAST_OUTPUTS:
        raise NotImplementedError(
            f"got {rows} rows times [{outputs}, {inputs}], expected at most {most} rows, "
            f"{_LEAST_OUTPUTS} outputs or more, and a multiple of {_INPUTS} inputs"
        )
    out, _ = call(
        "ckv_product",
        [((batch, length, outputs), jnp.float32), ((4 * rows * inputs + 64,), jnp.uint8)],
        x, weight, jnp.zeros(0, jnp.float32) if scale is None else scale,
        level=required_level(level),
    )  # fmt: skip
    return out
