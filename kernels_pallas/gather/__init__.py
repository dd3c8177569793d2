"""Gather: copies pages out of a pool by a page table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, Shaped

from ckv_jax.kernels_pallas.target import Implementation, Kernel, Target, dispatch, imported


def gather(
    pages: Shaped[Array, " P *page"],
    table: Int32[Array, "B N"],
    *,
    target: Target,
    implementation: Implementation = "auto",
) -> Shaped[Array, "B N *page"]:
    """Copies `pages[table]`, bit for bit; a table entry outside [0, P) gives a page of zeros.

    (A CPU may make a signalling NaN quiet.)

    Args:
      pages: the pool, at least one page; a page has any shape, e.g. `[2, C, K, D]`, and any dtype.
      table: int32 page numbers; repeats are allowed.

    Raises:
      ValueError: wrong rank or dtype of the table, or an empty pool.
      NotImplementedError: the implementation asked for by name cannot take these shapes.
    """
    if table.ndim != 2 or table.dtype != jnp.int32:
        raise ValueError(f"got table {table.dtype}{table.shape}, expected int32 [B, N]")
    if pages.ndim < 2 or pages.shape[0] == 0:
        raise ValueError(f"got pages {pages.shape}, expected [P, *page] with P > 0")
    out: Array = dispatch("gather", implementation, IMPLEMENTATIONS, target, pages, table)
    return out


def reference(pages: Array, table: Array) -> Array:
    """Gather in jnp: the twin the kernels are tested against, and what a CPU runs."""
    valid = (table >= 0) & (table < pages.shape[0])
    out = jnp.take(pages, table, axis=0, mode="clip")
    valid = valid.reshape(valid.shape + (1,) * (out.ndim - valid.ndim))
    return jnp.where(valid, out, jnp.zeros((), out.dtype))


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {
        "mosaic_gpu": Kernel(imported("gather.mosaic_gpu", "gather"), platform="gpu"),
        "tpu": Kernel(imported("gather.tpu", "gather"), platform="tpu"),
        "reference": Kernel(lambda: reference),
    }
)
