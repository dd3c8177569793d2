# mypy: disallow-untyped-calls=False
"""Paged attention for TPUs: pages arrive by the page table that the grid pipeline reads ahead.

A step takes as many pages of C tokens as fill it, all KV heads of them side by side, each through a
block spec of its own whose index is looked up in the table; the pipeline fetches the next step's
while this one computes. The list of pieces and the order of tokens are those of `pieces.cut`.
Attention over no pages at all is `tpu_dense`'s.
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

from ckv_jax.kernels_pallas.attend import tpu_dense
from ckv_jax.kernels_pallas.attend.pieces import NEVER, Pieces, cut, fold, tile_rows, unfold
from ckv_jax.kernels_pallas.attend.softmax import LANES, finish, start, update
from ckv_jax.kernels_pallas.blocks import TpuAttend, tpu_blocks
from ckv_jax.kernels_pallas.cost import attention_cost
from ckv_jax.kernels_pallas.target import Target

__all__ = ["attend"]


@functools.partial(jax.jit, static_argnames=("target", "blocks", "interpret"))
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
    blocks: TpuAttend | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See `api.attend`.

    Raises:
      NotImplementedError: other dtypes than bfloat16 or float32 throughout, or chunks that do not
        divide `blocks.keys`.
    """
    blocks = blocks or tpu_blocks(target).attend
    batch, queries, heads, dim = q.shape
    count, chunk, width = pages.shape
    kv_heads = width // dim
    if q.dtype not in (jnp.bfloat16, jnp.float32) or pages.dtype != q.dtype:
        raise NotImplementedError(
            f"got q {q.dtype} and pages {pages.dtype}, expected bfloat16 or float32, both the same"
        )
    if q.size == 0:
        return jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)
    if k_table.shape[1] == 0:
        return tpu_dense.attend(q, k_new, v_new, q_start, target=target, interpret=interpret)
    if blocks.keys % chunk:
        raise NotImplementedError(
            f"got chunks of {chunk} tokens, expected a divisor of {blocks.keys}"
        )
    per_step = blocks.keys // chunk
    group = heads // kv_heads
    pieces = cut(count, chunk, k_table, v_table, lengths, k_new, v_new, q_start, queries, per_step)
    tile = tile_rows(queries * group, blocks.rows, -(-target.cores // batch))
    rows, limit = fold(q, kv_heads, q_start, tile)
    out, lse = _call(rows, limit, pages, pieces, per_step, tile, interpret)
    return unfold(out, queries, group), unfold(lse[..., 0], queries, group)


def _call(
    rows: Array,
    limit: Array,
    pages: Array,
    pieces: Pieces,
    per_step: int,
    tile: int,
    interpret: Any,
) -> tuple[Array, Array]:
    """out [B, K, rows, D] and lse float32 [B, K, rows, 1]."""
    batch, kv_heads, num_rows, dim = rows.shape
    chunk, width = pages.shape[1:]
    keys = per_step * chunk
    steps = pieces.order.shape[1] // keys

    def from_pool(table: int, i: int) -> pl.BlockSpec:
        def index(b: Array, t: Array, s: Array, *tables: Any) -> tuple[Any, ...]:
            return jnp.maximum(tables[table][b, s * per_step + i], 0), 0, 0

        return pl.BlockSpec((1, chunk, width), index)

    def from_new(table: int, i: int) -> pl.BlockSpec:
        def index(b: Array, t: Array, s: Array, *tables: Any) -> tuple[Any, ...]:
            return b, jnp.maximum(-1 - tables[table][b, s * per_step + i], 0), 0, 0

        return pl.BlockSpec((1, 1, chunk, width), index)

    def of_tile(heads: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, tile, width), lambda b, t, s, *_: (b, 0, t, 0))

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
            grid=(batch, num_rows // tile, steps),
            in_specs=[
                of_tile(kv_heads, dim),
                of_tile(1, 1),
                pl.BlockSpec((1, 1, keys), lambda b, t, s, *_: (b, 0, s)),
                pl.BlockSpec((1, keys, 1), lambda b, t, s, *_: (b, s, 0)),
                *specs,
            ],
            out_specs=(of_tile(kv_heads, dim), of_tile(kv_heads, 1)),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, tile, dim), jnp.float32),
                pltpu.VMEM((kv_heads, tile, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, tile, LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=attention_cost(rows, steps * keys, num_rows // tile),
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
        start(acc_ref, top_ref, total_ref)

    def gathered(table_ref: Any, of_pieces: list[Any]) -> Array:
        """[keys, K*D]"""
        parts = []
        for i in range(per_step):
            pool, new = of_pieces[2 * i], of_pieces[2 * i + 1]
            parts.append(jnp.where(table_ref[b, step * per_step + i] >= 0, pool[0], new[0, 0]))
        return jnp.concatenate(parts, axis=0)

    keys = gathered(k_table_ref, piece_refs[: 2 * per_step])
    values = gathered(v_table_ref, piece_refs[2 * per_step :])
    seen = order_ref[0] <= limit_ref[0, 0]  # [1, keys] <= [rows, 1]
    usable = order_column_ref[0] < NEVER  # [keys, 1]
    values = jnp.where(usable, values, jnp.zeros((), values.dtype))
    dim = rows_ref.shape[3]
    for head in range(rows_ref.shape[1]):
        of_head = slice(head * dim, (head + 1) * dim)
        x = lax.dot_general(
            rows_ref[0, head],
            keys[:, of_head],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        update(x, seen, values[:, of_head], acc_ref, top_ref, total_ref, head, scale)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish() -> None:
        out, lse_ref[0] = finish(acc_ref, top_ref, total_ref, scale)
        out_ref[0] = out.astype(out_ref.dtype)
