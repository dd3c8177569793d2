# mypy: disallow-untyped-calls=False
"""Attention for TPUs: over pages that a page table names, and over one contiguous run of keys.

Pages arrive by the table that the grid pipeline reads ahead. A step takes as many pages of C tokens
as fill it, all KV heads of them side by side, each through a block spec of its own whose index is
looked up in the table; the pipeline fetches the next step's while this one computes. The request's
own tokens are the last steps. All query rows stay on the chip while pages and tokens go by once.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.blocks import (
    NEVER,
    attention_cost,
    fold,
    held_rows,
    tpu_blocks,
    unfold,
)
from ckv_jax.kernels_pallas.target import Target


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
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See `attend`.

    Raises:
      NotImplementedError: other dtypes than bfloat16 or float32 throughout, or chunks that do not
        divide `TpuAttend.keys`.
    """
    blocks = tpu_blocks(target).attend
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
        return attend_dense(q, k_new, v_new, q_start, target=target, interpret=interpret)
    if blocks.keys % chunk:
        raise NotImplementedError(
            f"got chunks of {chunk} tokens, expected a divisor of {blocks.keys}"
        )
    group, tail, keys = heads // kv_heads, k_new.shape[1], blocks.keys
    steps = _steps(count, chunk, k_table, v_table, lengths, tail, q_start, queries, keys)
    held, tile = held_rows(queries * group, blocks.held, blocks.rows, -(-target.cores // batch))
    rows = fold(q, kv_heads, held)
    num_rows, num_steps, per_step = rows.shape[2], steps.order.shape[1], keys // chunk
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
            (1, min(keys, tail), width), lambda b, r, s, t, *_: (b, jnp.maximum(s - of_pages, 0), 0)
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
                pltpu.VMEM((kv_heads, held, dim), jnp.float32),
                pltpu.VMEM((kv_heads, held, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, held, LANES), jnp.float32),
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
    """The running softmax of query rows, one block of keys after another.

    Maxima are kept of the bare logits; their scale and the step from e to 2 are one factor inside
    the exponential, so that a logit costs one multiplication. A row's maximum stands in every lane,
    and its total is kept lane by lane: nothing moves between lanes but the maximum of each block.
    """
    *sources, out_ref, lse_ref, keys_ref, values_ref, acc_ref, top_ref, total_ref = refs
    page_refs, new_refs = sources[: 2 * per_step], sources[2 * per_step :]
    b, step = pl.program_id(0), pl.program_id(2)
    number = pl.program_id(1) * pl.num_programs(3) + pl.program_id(3)  # of the tile
    first_tile = pl.program_id(3) == 0
    at = pl.ds(pl.multiple_of(pl.program_id(3) * tile, tile), tile)
    heads, dim = rows_ref.shape[1], rows_ref.shape[3]
    keys, chunk = keys_ref.shape[0], page_refs[0].shape[1]
    factor = scale * math.log2(math.e)

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
        width = values_ref.shape[1]
        column = jnp.broadcast_to(order, (LANES, keys)).T  # [keys, LANES]
        for first in range(0, width, LANES):
            few = min(LANES, width - first)
            lanes = pl.ds(first, few)
            values = values_ref[:, lanes]
            usable = wide(column, few) < NEVER
            values_ref[:, lanes] = jnp.where(usable, values, jnp.zeros((), values.dtype))

    @pl.when(step == 0)
    def _start() -> None:
        acc_ref[:, at] = jnp.zeros((heads, tile, dim), jnp.float32)
        top_ref[:, at] = jnp.full((heads, tile, LANES), LOWEST, jnp.float32)
        total_ref[:, at] = jnp.zeros((heads, tile, LANES), jnp.float32)

    query = _query_of(number * tile, (tile, LANES), 0, group)
    limit = jnp.where(query < queries, jnp.maximum(start_ref[b] + query + 1, 0), -1)
    seen = order <= wide(limit, keys)
    for head in range(heads):
        of_head = slice(head * dim, (head + 1) * dim)
        q, k, values = rows_ref[0, head, at], keys_ref[:, of_head], values_ref[:, of_head]
        dims = (((1,), (1,)), ((), ()))
        x = lax.dot_general(q, k, dims, preferred_element_type=jnp.float32)
        x = jnp.where(seen, x, LOWEST)
        old = top_ref[head, at]
        top = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
        # Where a row has seen nothing yet, a base of 0 makes its weights vanish: an operation for
        # each row and not for each logit.
        base = jnp.where(top > LOWEST, top, 0.0)
        p = jnp.exp2((x - wide(base, keys)) * factor)
        shrink = jnp.exp2((old - top) * factor)
        total = total_ref[head, at] * shrink
        for first in range(0, keys, LANES):
            total = total + p[:, first : first + LANES]
        part = jnp.dot(p.astype(values.dtype), values, preferred_element_type=jnp.float32)
        acc_ref[head, at] = acc_ref[head, at] * wide(shrink, dim) + part
        total_ref[head, at] = total
        top_ref[head, at] = top

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish() -> None:
        for head in range(heads):
            total = jnp.sum(total_ref[head, at], axis=1, keepdims=True)
            divisor = jnp.where(total > 0, total, 1.0)
            top = top_ref[head, at][:, :1]
            lse = jnp.where(total > 0, top * scale + jnp.log(divisor), -jnp.inf)
            out = acc_ref[head, at] / divisor
            lse_ref[0, head, at] = lse
            out_ref[0, head, at] = out.astype(out_ref.dtype)


LANES = 128
LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


def _query_of(first: Array, shape: tuple[int, int], axis: int, group: int) -> Array:
    """int32 of a shape: the query of each row from number `first` on along an axis, `group` rows a
    query."""
    # In floats, exact below 2**22 rows: a TPU divides integers by long sequences of instructions.
    row = lax.broadcasted_iota(jnp.int32, shape, axis) + first
    return jnp.floor((row.astype(jnp.float32) + 0.5) * (1.0 / group)).astype(jnp.int32)


def wide(x: Array, width: int) -> Array:
    """[rows, LANES], the same in every lane, as [rows, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def attend_dense(
    q: Array,
    keys: Array,
    values: Array,
    q_start: Array,
    *,
    target: Target,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`api.attend_rows`: query i of q [B, S, H, D] sees the first q_start[b] + i + 1 of keys and
    values [B, R, K*D].

    All rows of a KV head (or of as many heads as make whole lanes of a token's row) stay on the
    chip while its keys go by once. A step is one tile of rows and one block of keys; blocks that no
    query of a tile sees are not computed, and those that no query at all sees are not fetched. Rows
    go along the lanes and keys above each other: maxima and sums are then between registers, and
    what is kept of a row is one number, not one for each lane.
    """
    blocks = tpu_blocks(target).dense
    batch, queries, heads, dim = q.shape
    tokens, width = keys.shape[1:]
    if tokens == 0:
        return jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    kv_heads = width // dim
    group = heads // kv_heads
    together = _heads_together(kv_heads, dim)
    size = min(blocks.keys, -(-tokens // LANES) * LANES)
    cores = -(-target.cores // (batch * (kv_heads // together)))
    held, tile = held_rows(queries * group, blocks.held // together, blocks.rows, cores, LANES)
    rows = fold(q, kv_heads, held)
    num_rows = rows.shape[2]
    tiles, steps = held // tile, pl.cdiv(tokens, size)

    last = (jnp.arange(1, num_rows // tile + 1, dtype=jnp.int32) * tile - 1) // group
    ends = jnp.clip(q_start[:, None] + jnp.minimum(last, queries - 1)[None, :] + 1, 0, tokens)
    # int32 [B, all tiles]: tokens that the tile sees anything of

    def of_keys() -> pl.BlockSpec:
        def index(b: Array, h: Array, r: Array, s: Array, t: Array, _: Any, ends: Any) -> Any:
            needed = ends[b, (r + 1) * tiles - 1]  # by the last tile of those held
            return b, jnp.minimum(s, lax.div(jnp.maximum(needed - 1, 0), size)), h

        return pl.BlockSpec((1, size, together * dim), index)

    def of_held(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, together, width, held), lambda b, h, r, *_: (b, h, 0, r))

    out, lse = pl.pallas_call(
        functools.partial(
            _dense_kernel, tile=tile, strip=blocks.strip, part=blocks.part, queries=queries,
            tokens=tokens, group=group, scale=math.log2(math.e) / math.sqrt(dim),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((batch, kv_heads, dim, num_rows), rows.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, 1, num_rows), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads // together, num_rows // held, steps, tiles),
            in_specs=[of_held(dim), of_keys(), of_keys()],
            out_specs=(of_held(dim), of_held(1)),
            scratch_shapes=[
                pltpu.VMEM((together * dim, size), rows.dtype),
                pltpu.VMEM((together, dim, held), jnp.float32),
                pltpu.VMEM((together, 1, held), jnp.float32),
                pltpu.VMEM((together, 1, held), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.memory,
        ),
        cost_estimate=attention_cost(rows, tokens, num_rows // held),
        interpret=interpret,
    )(q_start, ends, rows.swapaxes(2, 3), keys, values)  # fmt: skip
    return unfold(out.swapaxes(2, 3), queries, group), unfold(lse[:, :, 0], queries, group)


def _heads_together(kv_heads: int, dim: int) -> int:
    """KV heads of one block: as many as make whole lanes, or all of them."""
    least = max(1, LANES // math.gcd(LANES, dim))
    return least if kv_heads % least == 0 else kv_heads


def _dense_kernel(
    start_ref: Any,
    ends_ref: Any,
    rows_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    turned_ref: Any,
    acc_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    tile: int,
    strip: int,
    part: int,
    queries: int,
    tokens: int,
    group: int,
    scale: float,
) -> None:
    b, step, tile_index = pl.program_id(0), pl.program_id(3), pl.program_id(4)
    first_tile = pl.program_id(2) * pl.num_programs(4)  # of those held, of the sequence's
    number, last = first_tile + tile_index, first_tile + pl.num_programs(4) - 1
    at = pl.ds(pl.multiple_of(tile_index * tile, tile), tile)
    heads, dim = rows_ref.shape[1:3]
    size = keys_ref.shape[1]

    @pl.when(step == 0)
    def _start() -> None:
        acc_ref[:, :, at] = jnp.zeros((heads, dim, tile), jnp.float32)
        top_ref[:, :, at] = jnp.full((heads, 1, tile), LOWEST, jnp.float32)
        total_ref[:, :, at] = jnp.zeros((heads, 1, tile), jnp.float32)

    @pl.when(jnp.logical_and(tile_index == 0, step * size < ends_ref[b, last]))
    def _turn() -> None:
        known = jnp.clip(start_ref[b] + queries, 0, tokens)  # what lies behind may be anything

        def turn(i: Array, carry: None) -> None:
            piece = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
            values = values_ref[0, piece].astype(jnp.float32)
            place = lax.broadcasted_iota(jnp.int32, values.shape, 0) + (step * size + i * LANES)
            turned_ref[:, piece] = jnp.where(place < known, values, 0.0).T.astype(turned_ref.dtype)

        lax.fori_loop(0, size // LANES, turn, None)

    @pl.when(step * size < ends_ref[b, number])
    def _step() -> None:
        # Strips of rows inside of parts of keys: what one strip waits for, another computes.
        limit = _limits(number * tile, tile, start_ref[b], queries, tokens, group) - step * size
        for first, begin in itertools.product(range(0, size, part), range(0, tile, strip)):
            n, m = min(part, size - first), min(strip, tile - begin)
            of_strip = pl.ds(pl.multiple_of(tile_index * tile, LANES) + begin, m)
            place = lax.broadcasted_iota(jnp.int32, (n, m), 0) + first
            seen = place < limit[:, begin : begin + m]  # [keys, rows] < [1, rows]
            for head in range(heads):
                of_head = pl.ds(head * dim, dim)
                keys, q = keys_ref[0, pl.ds(first, n), of_head], rows_ref[0, head, :, of_strip]
                x = jnp.where(seen, jnp.dot(keys, q, preferred_element_type=jnp.float32), LOWEST)
                old = top_ref[head, :, of_strip]
                top = jnp.maximum(old, jnp.max(x, axis=0, keepdims=True))
                # Where a row has seen nothing yet, a base of 0 makes its weights vanish.
                p = jnp.exp2((x - jnp.where(top > LOWEST, top, 0.0)) * scale)
                shrink = jnp.exp2((old - top) * scale)
                values = turned_ref[of_head, pl.ds(first, n)]
                new = jnp.dot(values, p.astype(values.dtype), preferred_element_type=jnp.float32)
                total = total_ref[head, :, of_strip] * shrink + jnp.sum(p, axis=0, keepdims=True)
                acc_ref[head, :, of_strip] = acc_ref[head, :, of_strip] * shrink + new
                total_ref[head, :, of_strip] = total
                top_ref[head, :, of_strip] = top

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish() -> None:
        total, top = total_ref[:, :, at], top_ref[:, :, at]
        divisor = jnp.where(total > 0, total, 1.0)
        lse = top * (scale * math.log(2)) + jnp.log(divisor)
        lse_ref[0, :, :, at] = jnp.where(total > 0, lse, -jnp.inf)
        out_ref[0, :, :, at] = (acc_ref[:, :, at] / divisor).astype(out_ref.dtype)


def _limits(first: Array, tile: int, start: Array, queries: int, tokens: int, group: int) -> Array:
    """int32 [1, rows]: how many tokens each row sees, from row number `first` on."""
    query = _query_of(first, (1, tile), 1, group)
    return jnp.where(query < queries, jnp.clip(start + query + 1, 0, tokens), 0)
