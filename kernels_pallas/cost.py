"""What a kernel costs, told to XLA, whose schedule and estimates else take it for nothing."""

from __future__ import annotations

import inspect
from typing import Any

from jax import Array
from jax.experimental import pallas as pl

__all__ = ["attention_cost", "copy_cost", "of_gpu", "score_cost"]


def attention_cost(rows: Array, tokens: int, passes: int) -> pl.CostEstimate:
    """Attention of rows [B, K, R, D] over so many tokens, all of which are read `passes` times."""
    batch, kv_heads, num_rows, dim = rows.shape
    pairs = batch * kv_heads * num_rows * tokens
    keys = 2 * batch * passes * tokens * kv_heads * dim * rows.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * pairs * dim,
        transcendentals=pairs,
        bytes_accessed=keys + 2 * rows.size * rows.dtype.itemsize,
    )


def copy_cost(size: int) -> pl.CostEstimate:
    """Reading and writing so many bytes."""
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * size)


def score_cost(rows: Array, tokens: int, probe_bytes: int, sweeps: int) -> pl.CostEstimate:
    """Scores of rows [B, K, R, W] over a probe of so many tokens and bytes, swept so often."""
    pairs = rows.size // rows.shape[3] * tokens
    return pl.CostEstimate(
        flops=sweeps * 2 * pairs * rows.shape[3],
        transcendentals=sweeps * pairs,
        bytes_accessed=sweeps * rows.shape[0] * probe_bytes + rows.size * rows.dtype.itemsize,
    )


def of_gpu(kernel: Any, cost: pl.CostEstimate) -> dict[str, Any]:
    """The argument that says so to `plgpu.kernel`, which takes one from JAX 0.12 on."""
    return (
        {"cost_estimate": cost} if "cost_estimate" in inspect.signature(kernel).parameters else {}
    )
