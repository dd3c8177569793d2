# mypy: disallow-untyped-calls=False
"""Causal attention over one contiguous run of keys, for TPUs: what a dense prefill does.

A step is one block of keys of one or a few KV heads, whole lanes of a row; blocks that no query of
a tile sees are neither fetched nor computed.
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

from ckv_jax.kernels_pallas.attend.pieces import fold, tile_rows, unfold
from ckv_jax.kernels_pallas.attend.softmax import LANES, finish, start, update, wide
from ckv_jax.kernels_pallas.blocks import TpuDense, tpu_blocks
from ckv_jax.kernels_pallas.cost import attention_cost
from ckv_jax.kernels_pallas.target import Target

__all__ = ["attend"]


def attend(
    q: Array,
    keys: Array,
    values: Array,
    q_start: Array,
    *,
    target: Target,
    blocks: TpuDense | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`api.attend_rows`: query i of q [B, S, H, D] sees the first q_start[b] + i + 1 of keys and
    values [B, R, K*D]."""
    blocks = blocks or tpu_blocks(target).dense
    batch, queries, heads, dim = q.shape
    tokens, width = keys.shape[1:]
    if tokens == 0:
        return jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    kv_heads = width // dim
    group = heads // kv_heads
    together = _heads_together(kv_heads, dim)
    size = min(blocks.keys, -(-tokens // LANES) * LANES)
    cores = -(-target.cores // (batch * (kv_heads // together)))
    tile = tile_rows(queries * group, blocks.rows, cores)
    rows, _ = fold(q, kv_heads, q_start, tile)
    num_rows = rows.shape[2]
    tiles, steps = num_rows // tile, pl.cdiv(tokens, size)

    last = (jnp.arange(1, tiles + 1, dtype=jnp.int32) * tile - 1) // group  # query of a tile's end
    seen = jnp.clip(q_start[:, None] + jnp.minimum(last, queries - 1)[None, :] + 1, 0, tokens)
    ends = (seen + size - 1) // size  # [B, tiles], steps that the tile needs

    def of_keys() -> pl.BlockSpec:
        def index(b: Array, h: Array, t: Array, s: Array, _: Any, ends: Any) -> tuple[Any, ...]:
            return b, jnp.minimum(s, jnp.maximum(ends[b, t] - 1, 0)), h

        return pl.BlockSpec((1, size, together * dim), index)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, together, tile, width), lambda b, h, t, s, *_: (b, h, t, 0))

    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, queries=queries, tokens=tokens, group=group, scale=1.0 / math.sqrt(dim)
        ),
        out_shape=(
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct((*rows.shape[:3], 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads // together, tiles, steps),
            in_specs=[of_tile(dim), of_keys(), of_keys()],
            out_specs=(of_tile(dim), of_tile(1)),
            scratch_shapes=[
                pltpu.VMEM((together, tile, dim), jnp.float32),
                pltpu.VMEM((together, tile, LANES), jnp.float32),
                pltpu.VMEM((together, tile, LANES), jnp.float32),
                pltpu.VMEM((tile, LANES), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=attention_cost(rows, tokens, tiles),
        interpret=interpret,
    )(q_start, ends, rows, keys, values)
    return unfold(out, queries, group), unfold(lse[..., 0], queries, group)


def _heads_together(kv_heads: int, dim: int) -> int:
    """KV heads of one block: as many as make whole lanes, or all of them."""
    least = max(1, LANES // math.gcd(LANES, dim))
    return least if kv_heads % least == 0 else kv_heads


def _kernel(
    start_ref: Any,
    ends_ref: Any,
    rows_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    acc_ref: Any,
    top_ref: Any,
    total_ref: Any,
    limit_ref: Any,
    *,
    queries: int,
    tokens: int,
    group: int,
    scale: float,
) -> None:
    b, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    together, num_rows, dim = rows_ref.shape[1:]
    size = keys_ref.shape[1]

    @pl.when(step == 0)
    def _start() -> None:
        start(acc_ref, top_ref, total_ref)
        row = lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 0) + tile * num_rows
        query = lax.div(row, jnp.int32(group))
        limit = jnp.clip(start_ref[b] + query + 1, 0, tokens)
        limit_ref[...] = jnp.where(query < queries, limit, 0)

    @pl.when(step < ends_ref[b, tile])
    def _step() -> None:
        first = step * size
        column = lax.broadcasted_iota(jnp.int32, (1, size), 1) + first
        seen = column < wide(limit_ref[...], size)  # [1, keys] < [rows, keys]
        place = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + first
        usable = place < jnp.clip(start_ref[b] + queries, 0, tokens)
        values = jnp.where(usable, values_ref[0], jnp.zeros((), values_ref.dtype))
        for head in range(together):
            of_head = slice(head * dim, (head + 1) * dim)
            x = lax.dot_general(
                rows_ref[0, head],
                keys_ref[0, :, of_head],
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            update(x, seen, values[:, of_head], acc_ref, top_ref, total_ref, head, scale)

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish() -> None:
        out, lse_ref[0] = finish(acc_ref, top_ref, total_ref, scale)
        out_ref[0] = out.astype(out_ref.dtype)
