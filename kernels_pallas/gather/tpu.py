# mypy: disallow-untyped-calls=False
"""Gather for TPUs: DMA from HBM to HBM, a few pages in flight at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.target import Target

__all__ = ["GatherBlocks", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherBlocks:
    """entries: table entries of one grid step, whose copies are in flight together."""

    entries: int = 16

    def __post_init__(self) -> None:
        if self.entries < 1:
            raise ValueError(f"got entries {self.entries}, expected at least 1")


def gather(
    pages: Array,
    table: Array,
    *,
    target: Target,
    blocks: GatherBlocks = GatherBlocks(),
    interpret: Any = False,
) -> Array:
    """See `api.gather`.

    Raises:
      NotImplementedError: pages of less than two dimensions (a DMA moves whole tiles).
    """
    count, *page = pages.shape
    if len(page) < 2:
        raise NotImplementedError(f"got pages of shape {page}, expected at least 2 dimensions")
    batch, entries = table.shape
    total = batch * entries
    if total == 0:
        return jnp.zeros((batch, entries, *page), pages.dtype)
    zeros = jnp.zeros((1, *page), pages.dtype)
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, count=count, total=total, step=blocks.entries),
        out_shape=jax.ShapeDtypeStruct((total, *page), pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(total, blocks.entries),),
            in_specs=[any_space, any_space],
            out_specs=any_space,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
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
