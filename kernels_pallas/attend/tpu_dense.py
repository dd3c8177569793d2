# mypy: disallow-untyped-calls=False
"""Causal attention over one contiguous run of keys, for TPUs: what a dense prefill does.

All rows of a KV head (or of as many heads as make whole lanes of a token's row) stay on the chip
while its keys go by once. A step is one tile of rows and one block of keys; blocks that no query of
a tile sees are not computed, and those that no query at all sees are not fetched. Rows lie along
the lanes and keys above each other: maxima and sums are then between registers, and what is kept of
a row is one number, not one for each lane.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ckv_jax.kernels_pallas.attend.pieces import fold, held_rows, unfold
from ckv_jax.kernels_pallas.attend.softmax import LANES, LOWEST
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
    held, tile = held_rows(queries * group, blocks.held // together, blocks.rows, cores, LANES)
    rows, _ = fold(q, kv_heads, q_start, held)
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
            _kernel, tile=tile, strip=blocks.strip, part=blocks.part, queries=queries,
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


def _kernel(
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
    # In floats, exact below 2**22 rows: a TPU divides integers by long sequences of instructions.
    row = lax.broadcasted_iota(jnp.int32, (1, tile), 1) + first
    query = jnp.floor((row.astype(jnp.float32) + 0.5) * (1.0 / group)).astype(jnp.int32)
    return jnp.where(query < queries, jnp.clip(start + query + 1, 0, tokens), 0)
