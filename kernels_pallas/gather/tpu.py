# mypy: disallow-untyped-calls=False
"""Gather for TPUs: DMA from HBM to HBM, a few pages in flight at a time."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.blocks import TpuGather, tpu_blocks
from ckv_jax.kernels_pallas.cost import copy_cost
from ckv_jax.kernels_pallas.gather import tpu_rows
from ckv_jax.kernels_pallas.target import Target

__all__ = ["gather"]


def gather(
    pages: Array,
    table: Array,
    *,
    target: Target,
    blocks: TpuGather | None = None,
    interpret: Any = False,
) -> Array:
    """See `api.gather`.

    Raises:
      NotImplementedError: pages of one dimension that `tpu_rows` cannot take.
    """
    blocks = blocks or tpu_blocks(target).gather
    count, *page = pages.shape
    batch, entries = table.shape
    total = batch * entries
    if total == 0:
        return jnp.zeros((batch, entries, *page), pages.dtype)
    if len(page) == 1:
        return tpu_rows.gather(pages, table, interpret=interpret)
    zeros = jnp.zeros((1, *page), pages.dtype)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out = pl.pallas_call(
        functools.partial(_kernel, count=count, total=total, step=blocks.entries),
        out_shape=jax.ShapeDtypeStruct((total, *page), pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(total, blocks.entries),),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        cost_estimate=copy_cost(total * math.prod(page) * pages.dtype.itemsize),
        interpret=interpret,
    )(table.reshape(-1), pages, zeros)
    copied: Array = out.reshape(batch, entries, *page)
    return copied


def _kernel(
    table_ref: Any,
    pages_ref: Any,
    zeros_ref: Any,
    out_ref: Any,
    done: Any,
    *,
    count: int,
    total: int,
    step: int,
) -> None:
    first = pl.program_id(0) * step
    last = jnp.minimum(first + step, total)

    def start(entry: Array, carry: None) -> None:
        number = table_ref[entry]
        valid = jnp.logical_and(number >= 0, number < count)

        @pl.when(valid)
        def _page() -> None:
            pltpu.make_async_copy(pages_ref.at[number], out_ref.at[entry], done).start()

        @pl.when(jnp.logical_not(valid))
        def _zeros() -> None:
            pltpu.make_async_copy(zeros_ref.at[0], out_ref.at[entry], done).start()

    def wait(entry: Array, carry: None) -> None:
        pltpu.make_async_copy(zeros_ref.at[0], out_ref.at[entry], done).wait()

    lax.fori_loop(first, last, start, None)
    lax.fori_loop(first, last, wait, None)
