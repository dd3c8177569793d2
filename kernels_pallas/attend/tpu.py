# mypy: disallow-untyped-calls=False
"""Paged attention for TPUs: pages arrive by the page table that the grid pipeline reads ahead.

A step takes `pieces` pages of C tokens, all KV heads of them, each through a block spec of its
own whose index is looked up in the table; the pipeline fetches the next step's while this one
computes. The list of pieces and the order of tokens are those of `pieces.cut`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.attend.pieces import NEVER, Pieces, cut, fold, unfold
from ckv_jax.kernels_pallas.target import Target

__all__ = ["AttendBlocks", "attend"]

_LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendBlocks:
    """rows: query rows of one tile; keys: tokens of one step."""

    rows: int = 128
    keys: int = 128

    def __post_init__(self) -> None:
        if self.rows % 16 or self.rows < 16:
            raise ValueError(f"got rows {self.rows}, expected a multiple of 16")
        if self.keys % 128 or self.keys < 128:
            raise ValueError(f"got keys {self.keys}, expected a multiple of 128")


def attend(
    q: Array,
    pages: Array,
    k_table: Array,
    v_table: Array,
    lengths: Array,
    k_new: Array,
    v_new: Array,
    q_start: Array,
    *,
    target: Target,
    blocks: AttendBlocks = AttendBlocks(),
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See `api.attend`.

    Raises:
      NotImplementedError: other dtypes than bfloat16 or float32 throughout, or chunks that do not
        divide `blocks.keys`.
    """
    queries, heads = q.shape[1:3]
    chunk, kv_heads = pages.shape[1:3]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or pages.dtype != q.dtype:
        raise NotImplementedError(
            f"got q {q.dtype} and pages {pages.dtype}, expected bfloat16 or float32, both the same"
        )
    if blocks.keys % chunk:
        raise NotImplementedError(
            f"got chunks of {chunk} tokens, expected a divisor of {blocks.keys}"
        )
    if q.size == 0:
        return jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)
    per_step = blocks.keys // chunk
    tables = (pages, k_table, v_table, lengths, k_new, v_new, q_start)
    pieces = cut(*tables, queries, per_step)
    rows, limit = fold(q, kv_heads, q_start, blocks.rows)
    out, lse = _call(rows, limit, pages, pieces, per_step, blocks, interpret)
    group = heads // kv_heads
    return unfold(out, queries, group), unfold(lse[..., 0], queries, group)


def _call(
    rows: Array,
    limit: Array,
    pages: Array,
    pieces: Pieces,
    per_step: int,
    blocks: AttendBlocks,
    interpret: Any,
) -> tuple[Array, Array]:
    """out [B, K, rows, D] and lse float32 [B, K, rows, 1]."""
    batch, kv_heads, num_rows, dim = rows.shape
    chunk = pages.shape[1]
    steps = pieces.order.shape[1] // blocks.keys

    def from_pool(table: int, i: int) -> pl.BlockSpec:
        def index(b: Array, t: Array, s: Array, *tables: Any) -> tuple[Any, ...]:
            return jnp.maximum(tables[table][b, s * per_step + i], 0), 0, 0, 0

        return pl.BlockSpec((1, chunk, kv_heads, dim), index)

    def from_new(table: int, i: int) -> pl.BlockSpec:
        def index(b: Array, t: Array, s: Array, *tables: Any) -> tuple[Any, ...]:
            return b, jnp.maximum(-1 - tables[table][b, s * per_step + i], 0), 0, 0, 0

        return pl.BlockSpec((1, 1, chunk, kv_heads, dim), index)

    def of_tile(heads: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, blocks.rows, width), lambda b, t, s, *_: (b, 0, t, 0))

    specs, operands = [], []
    for table, new in ((0, pieces.k_new), (1, pieces.v_new)):
        for i in range(per_step):
            specs += [from_pool(table, i), from_new(table, i)]
            operands += [pages, new]
    out, lse = pl.pallas_call(
        functools.partial(_kernel, per_step=per_step, scale=1.0 / math.sqrt(dim)),
        out_shape=(
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, num_rows, 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, num_rows // blocks.rows, steps),
            in_specs=[
                of_tile(kv_heads, dim),
                of_tile(1, 1),
                pl.BlockSpec((1, 1, blocks.keys), lambda b, t, s, *_: (b, 0, s)),
                pl.BlockSpec((1, blocks.keys, 1), lambda b, t, s, *_: (b, s, 0)),
                *specs,
            ],
            out_specs=(of_tile(kv_heads, dim), of_tile(kv_heads, 1)),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, blocks.rows, dim), jnp.float32),
                pltpu.VMEM((kv_heads, blocks.rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, blocks.rows, 1), jnp.float32),
            ],
        ),
        interpret=interpret,
    )(
        pieces.k_table,
        pieces.v_table,
        rows,
        limit[:, None, :, None],
        pieces.order[:, None],
        pieces.order[:, :, None],
        *operands,
    )
    return out, lse


def _kernel(
    k_table_ref: Any,
    v_table_ref: Any,
    rows_ref: Any,
    limit_ref: Any,
    order_ref: Any,
    order_column_ref: Any,
    *refs: Any,
    per_step: int,
    scale: float,
) -> None:
    *piece_refs, out_ref, lse_ref, acc_ref, top_ref, total_ref = refs
    b, step = pl.program_id(0), pl.program_id(2)

    @pl.when(step == 0)
    def _start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        top_ref[...] = jnp.full_like(top_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)

    def gathered(table_ref: Any, of_pieces: list[Any]) -> Array:
        """[keys, K, D]"""
        parts = []
        for i in range(per_step):
            pool, new = of_pieces[2 * i], of_pieces[2 * i + 1]
            parts.append(jnp.where(table_ref[b, step * per_step + i] >= 0, pool[0], new[0, 0]))
        return jnp.concatenate(parts, axis=0)

    keys = gathered(k_table_ref, piece_refs[: 2 * per_step])
    values = gathered(v_table_ref, piece_refs[2 * per_step :])
    seen = order_ref[0] <= limit_ref[0, 0]  # [1, keys] <= [rows, 1]
    usable = order_column_ref[0] < NEVER  # [keys, 1]
    for head in range(rows_ref.shape[1]):
        x = lax.dot_general(
            rows_ref[0, head],
            keys[:, head],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        x = jnp.where(seen, x * scale, _LOWEST)  # [rows, keys]
        old = top_ref[head]
        top = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
        p = jnp.where(seen, jnp.exp(x - top), 0.0)
        shrink = jnp.exp(old - top)
        total_ref[head] = total_ref[head] * shrink + jnp.sum(p, axis=1, keepdims=True)
        value = jnp.where(usable, values[:, head], jnp.zeros((), values.dtype))
        part = jnp.dot(p.astype(value.dtype), value, preferred_element_type=jnp.float32)
        acc_ref[head] = acc_ref[head] * shrink + part
        top_ref[head] = top

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish() -> None:
        total = total_ref[...]
        divisor = jnp.where(total > 0, total, 1.0)
        out_ref[0] = (acc_ref[...] / divisor).astype(out_ref.dtype)
        lse_ref[0] = jnp.where(total > 0, top_ref[...] + jnp.log(divisor), -jnp.inf)
