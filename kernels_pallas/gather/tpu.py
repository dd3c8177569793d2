# mypy: disallow-untyped-calls=False
"""Gather for TPUs: DMA from HBM to HBM, a few pages in flight at a time.

Of pages that are single rows a DMA moves whole tiles, and the row is picked from them on chip.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.blocks import TPU_GATHERS, copy_cost
from ckv_jax.kernels_pallas.target import Target


def gather(
    pages: Array,
    table: Array,
    *,
    target: Target,
    interpret: Any = False,
) -> Array:
    """See `gather`.

    Raises:
      NotImplementedError: pages of one dimension that `gather_rows` cannot take.
    """
    del target  # a TPU
    count, *page = pages.shape
    batch, entries = table.shape
    total = batch * entries
    if total == 0:
        return jnp.zeros((batch, entries, *page), pages.dtype)
    if len(page) == 1:
        return gather_rows(pages, table, interpret=interpret)
    zeros = jnp.zeros((1, *page), pages.dtype)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out = pl.pallas_call(
        functools.partial(_kernel, count=count, total=total, step=TPU_GATHERS),
        out_shape=jax.ShapeDtypeStruct((total, *page), pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(total, TPU_GATHERS),),
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


_TILE_ROWS = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float32): 8}


def gather_rows(rows: Array, table: Array, *, interpret: Any = False) -> Array:
    """`gather` of pages [P, W] that are one row each.

    Raises:
      NotImplementedError: other dtypes than bfloat16 or float32, rows that are no whole lanes, or
        a number of them that is no whole tiles.
    """
    count, width = rows.shape
    tile = _TILE_ROWS.get(rows.dtype, 0)
    if not tile or width % 128 or count % tile:
        raise NotImplementedError(
            f"got rows {rows.dtype}{rows.shape}, expected bfloat16 or float32, a multiple of "
            "16 or 8 rows of a multiple of 128"
        )
    total = table.size
    steps = pl.cdiv(total, tile)
    numbers = jnp.pad(table.reshape(-1), (0, steps * tile - total), constant_values=-1)
    out = pl.pallas_call(
        functools.partial(_rows_kernel, count=count),
        out_shape=jax.ShapeDtypeStruct((steps * tile, width), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec((tile, width), lambda s, *_: (s, 0)),
            scratch_shapes=[
                pltpu.VMEM((tile, tile, width), rows.dtype),
                pltpu.VMEM((8, width), jnp.int32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        cost_estimate=copy_cost(steps * tile * tile * width * rows.dtype.itemsize),
        interpret=interpret,
    )(numbers, rows.reshape(count // tile, tile, width))
    found: Array = out[:total].reshape(*table.shape, width)
    return found


def _rows_kernel(
    table_ref: Any,
    rows_ref: Any,
    out_ref: Any,
    tiles_ref: Any,
    words_ref: Any,
    done: Any,
    *,
    count: int,
) -> None:
    size = out_ref.shape[0]
    first = pl.program_id(0) * size
    numbers = [table_ref[first + i] for i in range(size)]
    valid = [jnp.logical_and(number >= 0, number < count) for number in numbers]
    numbers = [jnp.where(good, number, 0) for good, number in zip(valid, numbers, strict=True)]
    copies = [
        pltpu.make_async_copy(rows_ref.at[lax.div(number, size)], tiles_ref.at[i], done)
        for i, number in enumerate(numbers)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
    # As 32-bit words, so that every bit is kept: one row of a tile, or two rows of 16 bits. Each is
    # put away before the next is picked: together they would not fit the registers.
    packed = 4 // rows_ref.dtype.itemsize
    place = lax.broadcasted_iota(jnp.int32, words_ref.shape, 0)

    def picked(i: int) -> Array:
        row = lax.rem(numbers[i], size)
        mine = jnp.logical_and(place == lax.div(row, packed), valid[i])
        word = pltpu.bitcast(tiles_ref[i], jnp.int32)
        bits: Array = jnp.sum(jnp.where(mine, word, 0), axis=0, keepdims=True)
        if packed == 2:
            bits = lax.shift_right_logical(bits, 16 * lax.rem(row, 2)) & 0xFFFF
        return bits

    for i in range(words_ref.shape[0]):
        words_ref[i] = (picked(i) if packed == 1 else picked(2 * i) | (picked(2 * i + 1) << 16))[0]
    out_ref[...] = pltpu.bitcast(words_ref[...], out_ref.dtype)
