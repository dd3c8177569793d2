# mypy: disallow-untyped-calls=False
"""Gather for Hopper and Blackwell GPUs: the TMA unit moves pages, the cores only start it.

A thread block moves one part of one page, global -> shared -> global memory. Blocks are small, so
that several share a multiprocessor and keep enough bytes in flight without a pipeline of their own.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ckv_jax.kernels_pallas.blocks import GPU_GATHER_BYTES, copy_cost, of_gpu
from ckv_jax.kernels_pallas.target import Target, require_tma

_BOX = 256  # a TMA box has at most this many elements along one dimension


def gather(
    pages: Array,
    table: Array,
    *,
    target: Target,
    interpret: Any = None,
) -> Array:
    """See `gather`.

    Raises:
      NotImplementedError: a page that cannot be cut into TMA boxes (its size in bytes must be a
        multiple of 16, and its number of elements must have a fitting divisor).
    """
    require_tma(target)
    count, *page = pages.shape
    rows, columns = _box(math.prod(page), pages.dtype.itemsize, GPU_GATHER_BYTES)
    parts = math.prod(page) // (rows * columns)
    batch, entries = table.shape
    if batch * entries == 0:
        return jnp.zeros((batch, entries, *page), pages.dtype)

    def kernel(pages_ref: Any, table_ref: Any, out_ref: Any, buffer: Any, barrier: Any) -> None:
        unit = lax.axis_index("unit")
        entry, part = lax.div(unit, parts), lax.rem(unit, parts)
        number = table_ref[entry]
        valid = jnp.logical_and(number >= 0, number < count)

        @pl.when(valid)
        def _load() -> None:
            plgpu.copy_gmem_to_smem(pages_ref.at[number, part], buffer, barrier)
            plgpu.barrier_wait(barrier)

        @pl.when(jnp.logical_not(valid))
        def _zero() -> None:
            buffer[...] = jnp.zeros((rows, columns), buffer.dtype)
            plgpu.commit_smem()

        plgpu.copy_smem_to_gmem(buffer, out_ref.at[entry, part])
        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch * entries, parts, rows, columns), pages.dtype),
        scratch_types=(plgpu.SMEM((rows, columns), pages.dtype), plgpu.Barrier()),
        grid=(batch * entries * parts,),
        grid_names=("unit",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **of_gpu(plgpu.kernel, copy_cost(batch * entries * math.prod(page) * pages.dtype.itemsize)),
    )(pages.reshape(count, parts, rows, columns), table.reshape(-1))
    copied: Array = out.reshape(batch, entries, *page)
    return copied


def _box(elements: int, itemsize: int, limit: int) -> tuple[int, int]:
    """The largest [rows, columns] within `limit` bytes that tiles a page of `elements`."""
    step = 16 // math.gcd(16, itemsize)
    fitting = [c for c in range(step, _BOX + 1, step) if elements % c == 0]
    for columns in reversed(fitting):
        rest = elements // columns
        rows = [r for r in range(1, _BOX + 1) if rest % r == 0 and r * columns * itemsize <= limit]
        if rows and rows[-1] * columns % 128 == 0:  # one warpgroup writes the zeros
            return rows[-1], columns
    raise NotImplementedError(
        f"got pages of {elements} elements of {itemsize} bytes, expected a size that cuts into "
        f"boxes of at most {_BOX} x {_BOX} elements and {limit} bytes, in multiples of 128 elements"
    )
