# mypy: disallow-untyped-calls=False
"""Paged attention for TPUs: pages arrive by the page table that the grid pipeline reads ahead.

A step takes as many pages of C tokens as fill it, all KV heads of them side by side, each through a
block spec of its own whose index is looked up in the table; the pipeline fetches the next step's
while this one computes. The request's own tokens are the last steps. All query rows stay on the
chip while pages and tokens go by once. Attention over no pages at all is `tpu_dense`'s.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.attend import tpu_dense
from ckv_jax.kernels_pallas.attend.pieces import NEVER, fold, held_rows, unfold
from ckv_jax.kernels_pallas.attend.softmax import Rows, cleaned, query_of, wide
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
    group = heads // kv_heads
    steps = _steps(
        count, chunk, k_table, v_table, lengths, k_new.shape[1], q_start, queries, blocks.keys
    )
    held, tile = held_rows(queries * group, blocks.held, blocks.rows, -(-target.cores // batch))
    rows, _ = fold(q, kv_heads, q_start, held)
    out, lse = _call(
        rows, pages, steps, k_new, v_new, q_start, queries, group, held, tile, interpret
    )
    return unfold(out, queries, group), unfold(lse[..., 0], queries, group)


class _Steps(NamedTuple):
    """Steps over pages, then steps over new tokens."""

    k_table: Array  # int32 [B, steps over pages * pages of one]
    v_table: Array
    order: Array  # int32 [B, steps, keys]: from which query + 1 on a token is seen
    dirty: Array  # int32 [B, steps]: 1 where some tokens are never seen and may be anything


def _steps(
    count: int,
    chunk: int,
    k_table: Array,
    v_table: Array,
    lengths: Array,
    tail: int,
    q_start: Array,
    queries: int,
    keys: int,
) -> _Steps:
    batch, entries = k_table.shape
    per_step = keys // chunk
    of_pages, of_new = -(-entries // per_step), -(-tail // keys)
    pad = ((0, 0), (0, of_pages * per_step - entries))
    inside = (k_table >= 0) & (k_table < count) & (v_table >= 0) & (v_table < count)
    lengths = jnp.pad(jnp.where(inside, lengths, 0), pad)
    used = (lengths > 0).reshape(batch, of_pages, per_step)
    # What is not used brings the page that its block spec brought before: nothing is fetched.
    last = lax.cummax(jnp.where(used, jnp.arange(of_pages, dtype=jnp.int32)[None, :, None], 0), 1)

    def table(x: Array) -> Array:
        x = jnp.pad(x, pad).reshape(batch, of_pages, per_step)
        return jnp.clip(jnp.take_along_axis(x, last, axis=1), 0, count - 1).reshape(batch, -1)

    valid = jnp.arange(chunk, dtype=jnp.int32)[None, None, :] < lengths[:, :, None]
    page_order = jnp.where(valid, 0, NEVER)
    at = jnp.arange(of_new * keys, dtype=jnp.int32)[None, :]
    seen = (at < tail) & (at < q_start[:, None] + queries)
    order = jnp.concatenate(
        [
            page_order.reshape(batch, -1, keys),
            jnp.where(seen, at + 1, NEVER).reshape(batch, -1, keys),
        ],
        axis=1,
    )
    dirty = jnp.any(order == NEVER, axis=2)
    return _Steps(table(k_table), table(v_table), order, dirty.astype(jnp.int32))


def _call(
    rows: Array,
    pages: Array,
    steps: _Steps,
    k_new: Array,
    v_new: Array,
    q_start: Array,
    queries: int,
    group: int,
    held: int,
    tile: int,
    interpret: Any,
) -> tuple[Array, Array]:
    """out [B, K, rows, D] and lse float32 [B, K, rows, 1]."""
    batch, kv_heads, num_rows, dim = rows.shape
    chunk, width = pages.shape[1:]
    tail = k_new.shape[1]
    num_steps, keys = steps.order.shape[1:]
    per_step = keys // chunk
    of_pages = steps.k_table.shape[1] // per_step

    def of_page(table: int, i: int) -> pl.BlockSpec:
        def index(b: Array, r: Array, s: Array, t: Array, *tables: Any) -> tuple[Any, ...]:
            return tables[table][b, jnp.minimum(s, of_pages - 1) * per_step + i], 0, 0

        return pl.BlockSpec((1, chunk, width), index)

    def of_held(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, kv_heads, held, width), lambda b, r, *_: (b, 0, r, 0))

    specs = [of_page(table, i) for table in (0, 1) for i in range(per_step)]
    operands = [pages] * len(specs)
    if tail:
        of_new = pl.BlockSpec(
            (1, min(keys, tail), width),
            lambda b, r, s, t, *_: (b, jnp.maximum(s - of_pages, 0), 0),
        )
        specs += [of_new, of_new]
        operands += [k_new, v_new]
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, tile=tile, of_pages=of_pages, per_step=per_step, queries=queries,
            group=group, scale=1.0 / math.sqrt(dim),
        ),
        out_shape=(
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, num_rows, 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, num_rows // held, num_steps, held // tile),
            in_specs=[
                of_held(dim),
                pl.BlockSpec((1, 1, 1, keys), lambda b, r, s, *_: (b, s, 0, 0)),
                *specs,
            ],
            out_specs=(of_held(dim), of_held(1)),
            scratch_shapes=[
                pltpu.VMEM((keys, width), rows.dtype),
                pltpu.VMEM((keys, width), rows.dtype),
                *Rows.scratch(kv_heads, held, dim),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=attention_cost(rows, num_steps * keys, num_rows // held),
        interpret=interpret,
    )(
        steps.k_table, steps.v_table, steps.dirty, q_start,
        rows, steps.order[:, :, None], *operands,
    )  # fmt: skip
    return out, lse


def _kernel(
    k_table_ref: Any,
    v_table_ref: Any,
    dirty_ref: Any,
    start_ref: Any,
    rows_ref: Any,
    order_ref: Any,
    *refs: Any,
    tile: int,
    of_pages: int,
    per_step: int,
    queries: int,
    group: int,
    scale: float,
) -> None:
    *sources, out_ref, lse_ref, keys_ref, values_ref, acc_ref, top_ref, total_ref = refs
    page_refs, new_refs = sources[: 2 * per_step], sources[2 * per_step :]
    b, step = pl.program_id(0), pl.program_id(2)
    number = pl.program_id(1) * pl.num_programs(3) + pl.program_id(3)  # of the tile
    first_tile = pl.program_id(3) == 0
    at = pl.ds(pl.multiple_of(pl.program_id(3) * tile, tile), tile)
    heads, dim = rows_ref.shape[1], rows_ref.shape[3]
    keys, chunk = keys_ref.shape[0], page_refs[0].shape[1]
    kept = Rows(acc_ref, top_ref, total_ref)

    @pl.when(jnp.logical_and(first_tile, step < of_pages))
    def _pages() -> None:
        for into, refs in ((keys_ref, page_refs[:per_step]), (values_ref, page_refs[per_step:])):
            for i, ref in enumerate(refs):
                into[pl.ds(i * chunk, chunk)] = ref[0]

    if new_refs:

        @pl.when(jnp.logical_and(first_tile, step >= of_pages))
        def _new() -> None:
            for into, ref in zip((keys_ref, values_ref), new_refs, strict=True):
                into[pl.ds(0, ref.shape[1])] = ref[0]

    order = order_ref[0, 0]  # [1, keys]

    @pl.when(jnp.logical_and(first_tile, dirty_ref[b, step] > 0))
    def _clean() -> None:
        cleaned(values_ref, order, NEVER)

    @pl.when(step == 0)
    def _start() -> None:
        kept.start(at, tile)

    query = query_of(tile, number * tile, group)
    limit = jnp.where(query < queries, jnp.maximum(start_ref[b] + query + 1, 0), -1)
    seen = order <= wide(limit, keys)
    for head in range(heads):
        of_head = slice(head * dim, (head + 1) * dim)
        kept.update(
            head, at, rows_ref[0, head, at], keys_ref[:, of_head], values_ref[:, of_head], seen,
            scale,
        )  # fmt: skip

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish() -> None:
        for head in range(heads):
            out, lse_ref[0, head, at] = kept.finish(head, at, scale)
            out_ref[0, head, at] = out.astype(out_ref.dtype)
