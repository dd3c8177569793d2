# mypy: disallow-untyped-calls=False
"""Paged attention for Hopper GPUs (WGMMA), in the manner of FlashAttention with split keys.

A thread block owns 64 rows (queries times the group's heads) of one KV head and a share of the
keys. Keys and values come straight out of the pool, C tokens of one head a TMA copy, two blocks
of keys ahead of the tensor cores. Shares of the keys are merged afterwards by their log-sum-exp.

New tokens are cut into pieces of C tokens as well. One table then lists every piece: an entry
e >= 0 is a page of the pool, e < 0 is piece -1 - e of the new tokens, the last of which is zeros
and stands in for invalid pages. `order` says from which query on a key is seen: 0 for a page
token, r + 1 for new token r, a number no query reaches for what must not be seen.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ckv_jax.kernels_pallas.blocks import (
    GPU_KEYS,
    GPU_STEPS,
    NEVER,
    PieceTable,
    attention_cost,
    by_row,
    cut,
    fold,
    of_gpu,
    pieces_each,
    spread,
    unfold,
)
from ckv_jax.kernels_pallas.target import Target, require_wgmma

_ROWS = 64  # of one WGMMA
_LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


@functools.partial(jax.jit, static_argnames=("target", "interpret"))
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
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See `attend`.

    Raises:
      NotImplementedError: other dtypes than bfloat16 or float16 throughout, D not a multiple of
        64 up to 256, chunks that are no multiple of 8 or do not divide a step.
    """
    require_wgmma(target)
    batch, queries, heads, dim = q.shape
    count, chunk, width = pages.shape
    kv_heads = width // dim
    if q.dtype not in (jnp.bfloat16, jnp.float16) or pages.dtype != q.dtype:
        raise NotImplementedError(
            f"got q {q.dtype} and pages {pages.dtype}, expected bfloat16 or float16, both the same"
        )
    if dim % 64 or dim > 256:
        raise NotImplementedError(f"got head dim {dim}, expected 64, 128, 192 or 256")
    if q.size == 0:
        return jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)
    group = heads // kv_heads
    rows = fold(q, kv_heads, _ROWS)
    limit = q_start[:, None] + jnp.arange(1, queries + 1, dtype=jnp.int32)[None, :]
    limit = by_row(jnp.maximum(limit, 0), group, rows.shape[2], padding=-1)
    tiles = rows.shape[2] // _ROWS
    units = batch * kv_heads * tiles
    dense = k_table.shape[1] == 0
    if dense:
        chunk = GPU_KEYS
    if chunk % 8 or GPU_KEYS % chunk:
        raise NotImplementedError(
            f"got chunks of {chunk} tokens, expected a multiple of 8 that divides {GPU_KEYS}"
        )
    per_step = GPU_KEYS // chunk
    listed = k_table.shape[1] + pl.cdiv(k_new.shape[1], chunk)
    each = pieces_each(listed, units, per_step, target.cores)
    pieces = cut(count, chunk, k_table, v_table, lengths, k_new, v_new, q_start, queries, each)
    pieces = spread(pieces, each, per_step)
    steps = pieces.order.shape[1] // GPU_KEYS
    share = max(1, steps * units // target.cores)
    pool = pieces.k_new if dense else pages  # dense: an operand of its form, never looked at
    out, lse = _call(rows, limit, pool, pieces, pl.cdiv(steps, share), interpret)
    return unfold(out.astype(q.dtype), queries, group), unfold(lse, queries, group)


def _call(
    rows: Array,
    limit: Array,
    pool: Array,
    pieces: PieceTable,
    splits: int,
    interpret: Any,
) -> tuple[Array, Array]:
    """out float32 [B, K, rows, D] and lse [B, K, rows], the splits merged."""
    keys, ahead = GPU_KEYS, GPU_STEPS
    batch, kv_heads, num_rows, dim = rows.shape
    chunk = pieces.k_new.shape[2]
    steps = pieces.order.shape[1] // keys
    share = pl.cdiv(steps, splits)
    per_step = keys // chunk
    k_new, v_new = (
        x.reshape(batch, -1, chunk, kv_heads, dim) for x in (pieces.k_new, pieces.v_new)
    )
    ends = _ends(pieces.order.reshape(batch, steps, keys), limit.reshape(batch, -1, _ROWS))

    def kernel(*refs: Any) -> None:
        rows_ref, limit_ref, pages_ref, k_new_ref, v_new_ref = refs[:5]
        k_table_ref, v_table_ref, order_ref, dirty_ref, ends_ref = refs[5:10]
        out_ref, lse_ref, q_smem, k_smem, v_smem, p_smem = refs[10:16]
        order_smem, limit_smem, lse_smem, q_barrier, barriers = refs[16:]
        unit = lax.axis_index("unit")
        b, head = lax.div(unit, kv_heads), lax.rem(unit, kv_heads)
        tile_index = lax.axis_index("tile")
        tile = pl.ds(tile_index * _ROWS, _ROWS)
        split = lax.axis_index("split")
        first = split * share
        last = jnp.minimum(first + share, ends_ref[b, tile_index])

        def load(step: Array, slot: Array | int) -> None:
            for i in range(per_step):
                into = pl.ds(i * chunk, chunk)
                for table_ref, new_ref, smem in (
                    (k_table_ref, k_new_ref, k_smem),
                    (v_table_ref, v_new_ref, v_smem),
                ):
                    entry = table_ref[b, step * per_step + i]

                    @pl.when(entry >= 0)
                    def _page(entry: Array = entry, smem: Any = smem, into: Any = into) -> None:
                        plgpu.copy_gmem_to_smem(
                            pages_ref.at[entry, :, head, :], smem.at[slot, into], barriers.at[slot]
                        )

                    @pl.when(entry < 0)
                    def _new(
                        entry: Array = entry,
                        new_ref: Any = new_ref,
                        smem: Any = smem,
                        into: Any = into,
                    ) -> None:
                        plgpu.copy_gmem_to_smem(
                            new_ref.at[b, -1 - entry, :, head, :],
                            smem.at[slot, into],
                            barriers.at[slot],
                        )

            plgpu.copy_gmem_to_smem(
                order_ref.at[b, pl.ds(step * keys, keys)], order_smem.at[slot], barriers.at[slot]
            )

        plgpu.copy_gmem_to_smem(rows_ref.at[b, head, tile], q_smem, q_barrier)
        plgpu.copy_gmem_to_smem(limit_ref.at[b, tile], limit_smem, q_barrier)
        for slot in range(ahead):
            pl.when(first + slot < last)(functools.partial(load, first + slot, slot))
        plgpu.barrier_wait(q_barrier)

        def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, top, total = carry
            slot = lax.rem(step - first, ahead)
            plgpu.barrier_wait(barriers.at[slot])

            def logits(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].transpose((1, 0)))
                return acc_ref[...]

            x = pl.run_scoped(logits, plgpu.WGMMAAccumulatorRef((_ROWS, keys), jnp.float32))
            seen = lax.broadcast_in_dim(order_smem[slot], x.shape, (1,)) <= lax.broadcast_in_dim(
                limit_smem[...], x.shape, (0,)
            )
            x = jnp.where(seen, x * (1.0 / math.sqrt(dim)), -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(x, axis=1))
            shrink = jnp.exp(top - new_top)
            p = jnp.exp(x - lax.broadcast_in_dim(new_top, x.shape, (0,)))
            total = total * shrink + jnp.sum(p, axis=1)
            p_smem[...] = p.astype(p_smem.dtype)

            @pl.when(dirty_ref[b, step] > 0)
            def _clean() -> None:
                v = v_smem[slot]
                clean = lax.broadcast_in_dim(order_smem[slot], v.shape, (0,)) < NEVER
                v_smem[slot] = jnp.where(clean, v, jnp.zeros_like(v))

            plgpu.commit_smem()

            def values(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, p_smem, v_smem.at[slot])
                return acc_ref[...]

            part = pl.run_scoped(values, plgpu.WGMMAAccumulatorRef((_ROWS, dim), jnp.float32))
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, (0,)) + part

            @pl.when(step + ahead < last)
            def _next() -> None:
                plgpu.commit_smem()  # every warp is done with this slot
                load(step + ahead, slot)

            return acc, new_top, total

        acc, top, total = lax.fori_loop(
            first,
            last,
            body,
            (
                jnp.zeros((_ROWS, dim), jnp.float32),
                jnp.full((_ROWS,), _LOWEST, jnp.float32),
                jnp.zeros((_ROWS,), jnp.float32),
            ),
        )
        divisor = jnp.where(total > 0, total, jnp.ones_like(total))
        out_ref[b, head, split, tile] = acc / lax.broadcast_in_dim(divisor, acc.shape, (0,))
        lse_smem[...] = jnp.where(total > 0, top + jnp.log(divisor), jnp.full_like(total, -jnp.inf))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[b, head, split, tile])
        plgpu.wait_smem_to_gmem(0)

    # One form for all operands of both products: rows of `keys` probabilities have to fit.
    tiled = (plgpu.TilingTransform((8, min(64, keys))), plgpu.SwizzleTransform(2 * min(64, keys)))
    shape = (batch, kv_heads, splits, num_rows)
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((_ROWS, dim), rows.dtype, transforms=tiled),
            plgpu.SMEM((ahead, keys, dim), rows.dtype, transforms=tiled),
            plgpu.SMEM((ahead, keys, dim), rows.dtype, transforms=tiled),
            plgpu.SMEM((_ROWS, keys), rows.dtype, transforms=tiled),
            plgpu.SMEM((ahead, keys), jnp.int32),
            plgpu.SMEM((_ROWS,), jnp.int32),
            plgpu.SMEM((_ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 * per_step + 1, num_barriers=ahead),
        ),
        grid=(batch * kv_heads, num_rows // _ROWS, splits),
        grid_names=("unit", "tile", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **of_gpu(plgpu.kernel, attention_cost(rows, steps * keys, num_rows // _ROWS)),
    )(
        rows,
        limit,
        pool.reshape(-1, chunk, kv_heads, dim),
        k_new,
        v_new,
        pieces.k_table,
        pieces.v_table,
        pieces.order,
        pieces.dirty,
        ends,
    )
    return _merged(out, lse)


def _ends(order: Array, limit: Array) -> Array:
    """Steps int32 [B, tiles] up to the last that a row of the tile sees anything of.

    order [B, steps, keys]; limit [B, tiles, rows].
    """
    first, most = jnp.min(order, axis=2), jnp.max(limit, axis=2)
    seen = first[:, None, :] <= most[:, :, None]  # [B, tiles, steps]
    ends = jnp.where(seen, jnp.arange(1, order.shape[1] + 1, dtype=jnp.int32), 0)
    return jnp.max(ends, axis=2)


def _merged(out: Array, lse: Array) -> tuple[Array, Array]:
    """Of disjoint shares of the keys, out [B, K, splits, rows, D] and lse [B, K, splits, rows].

    The division comes last: weights that are divided first cost one more kernel.
    """
    top = jnp.maximum(jnp.max(lse, axis=2), _LOWEST)
    weight = jnp.exp(lse - top[:, :, None])
    total = jnp.sum(weight, axis=2)
    divisor = jnp.where(total > 0, total, 1.0)
    merged = jnp.sum(out * weight[..., None], axis=2) / divisor[..., None]
    return merged, jnp.where(total > 0, top + jnp.log(divisor), -jnp.inf)
