"""Gather in jnp: the twin the kernels are tested against, and what a CPU runs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def gather(pages: Array, table: Array) -> Array:
    """pages [P, *page], table int32 [B, N] -> [B, N, *page]; entries outside [0, P) give zeros."""
    valid = (table >= 0) & (table < pages.shape[0])
    out = jnp.take(pages, table, axis=0, mode="clip")
    valid = valid.reshape(valid.shape + (1,) * (out.ndim - valid.ndim))
    return jnp.where(valid, out, jnp.zeros((), out.dtype))
