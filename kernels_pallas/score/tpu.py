# mypy: disallow-untyped-calls=False
"""Equation 1 for TPUs, in one sweep over the probe: chunks of sums wait on the chip for the maxima.

The grid runs over sequence and KV head, blocks of query rows that stay on the chip, blocks of keys
and tiles of the rows. A step leaves each chunk's sum of exponentials, chunks above each other and
rows along the lanes, and its block's maximum; the last one of a tile weighs them by every row's
maximum and total. Codes are unpacked a block at a time in VMEM.
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

from ckv_jax.kernels_pallas.blocks import by_row, fold, held_rows, score_cost, tpu_blocks
from ckv_jax.kernels_pallas.score import dot
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Keys, valid_queries, weights_of
from ckv_jax.kernels_pallas.target import Target

_LANES = 128
_LOWEST = -1e30  # of what must not be seen: finite, so that differences stay numbers


@functools.partial(jax.jit, static_argnames=("chunk_tokens", "peaks", "target", "interpret"))
def score(
    q: Array,
    probe: Keys | Int4Keys,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
    *,
    target: Target,
    interpret: Any = False,
) -> Array:
    """See `score`. Codes are brought into head-major order first, still compressed.

    Raises:
      NotImplementedError: other queries than bfloat16 or float32, keys as bit patterns, or chunks
        that do not divide `TpuScore.keys`.
    """
    blocks = tpu_blocks(target).score
    dim, parts = q.shape[3], 1 + peaks
    tokens, kv_heads, _ = probe.shape
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"got q {q.dtype}, expected bfloat16 or float32")
    if isinstance(probe, Keys) and not jnp.issubdtype(probe.keys.dtype, jnp.floating):
        raise NotImplementedError(f"got keys as bit patterns {probe.keys.dtype}, expected floats")
    keys = blocks.keys
    if keys % chunk_tokens:
        raise NotImplementedError(
            f"got chunks of {chunk_tokens} tokens, expected a divisor of {keys}"
        )
    if q.size == 0:
        empty = (q.shape[0], kv_heads, tokens // chunk_tokens)
        return jnp.zeros((2, *empty) if peaks else empty, jnp.float32)
    group_rows = q.shape[1] * (q.shape[2] // kv_heads)
    cores = -(-target.cores // (q.shape[0] * kv_heads))
    held, tile = held_rows(group_rows, blocks.held, blocks.rows, cores)
    rows = fold(valid_queries(q, q_lengths), kv_heads, held)
    batch, _, num_rows, _ = rows.shape
    weight = by_row(weights_of(q_lengths, q.shape[1], peaks), q.shape[2] // kv_heads, num_rows)
    tiles, steps, chunks = held // tile, pl.cdiv(tokens, keys), keys // chunk_tokens
    operands, specs, logits = _head_major(probe, keys, q.dtype)

    sums = pl.pallas_call(
        functools.partial(
            _kernel,
            logits=logits,
            of_probe=len(operands),
            keys=keys,
            scale=math.log2(math.e) / math.sqrt(dim),
        ),
        out_shape=jax.ShapeDtypeStruct(
            (batch, kv_heads, num_rows // tile, steps, parts, chunks), jnp.float32
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, num_rows // held, steps, tiles),
            in_specs=[
                pl.BlockSpec((1, 1, held, dim), lambda b, h, r, *_: (b, h, r, 0)),
                pl.BlockSpec((1, tiles, 1, tile), lambda b, h, r, *_: (b, r, 0, 0)),
                *specs,
            ],
            out_specs=pl.BlockSpec(
                (1, 1, tiles, steps, parts, chunks), lambda b, h, r, *_: (b, h, r, 0, 0, 0)
            ),
            scratch_shapes=[
                pltpu.VMEM((tiles, steps, chunks, tile), jnp.float32),
                pltpu.VMEM((tiles, steps, 1, tile), jnp.float32),
                pltpu.VMEM((tiles, 1, tile), jnp.float32),
                pltpu.VMEM((tiles, 1, tile), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.memory,
        ),
        cost_estimate=score_cost(rows, tokens, sum(x.size * x.dtype.itemsize for x in operands)),
        interpret=interpret,
    )(num_tokens.reshape(1), rows, weight.reshape(batch, num_rows // tile, 1, tile), *operands)
    by_step = jnp.sum(sums, axis=2).transpose(3, 0, 1, 2, 4)  # [parts, B, K, steps, chunks of one]
    out = by_step.reshape(parts, batch, kv_heads, -1)[..., : tokens // chunk_tokens]
    return out if peaks else out[0]


def _kernel(
    limit_ref: Any,
    rows_ref: Any,
    weight_ref: Any,
    *refs: Any,
    logits: Any,
    of_probe: int,
    keys: int,
    scale: float,
) -> None:
    probe_refs = refs[:of_probe]
    out_ref, sums_ref, tops_ref, top_ref, total_ref = refs[of_probe:]
    step, t = pl.program_id(3), pl.program_id(4)
    num_steps, chunks, tile = sums_ref.shape[1:]
    at = pl.ds(pl.multiple_of(t * tile, tile), tile)

    @pl.when(step == 0)
    def _start() -> None:
        top_ref[t] = jnp.full((1, tile), _LOWEST, jnp.float32)
        total_ref[t] = jnp.zeros((1, tile), jnp.float32)

    x = logits(rows_ref[0, 0, at], *probe_refs)  # [rows, keys]
    column = lax.broadcasted_iota(jnp.int32, (1, keys), 1) + step * keys
    x = jnp.where(column < limit_ref[0], x, _LOWEST)
    most = jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), (tile, _LANES))
    # Where a block has no key, a base of 0 makes its weights vanish.
    base = jnp.where(most > _LOWEST, most, 0.0)
    p = jnp.exp2((x - jnp.concatenate([base] * (keys // _LANES), axis=1)) * scale)
    sums = _by_chunk(p, chunks)
    sums_ref[t, step] = sums
    most = most.T[:1]  # [1, rows]
    tops_ref[t, step] = most
    old = top_ref[t]
    top = jnp.maximum(old, most)
    part = jnp.sum(sums, axis=0, keepdims=True)
    total = total_ref[t] * jnp.exp2((old - top) * scale) + part * jnp.exp2((most - top) * scale)
    top_ref[t], total_ref[t] = top, total

    @pl.when(step == num_steps - 1)
    def _finish() -> None:
        share = weight_ref[0, t] / jnp.where(total > 0, total, 1.0)  # [1, rows]
        ones = jnp.ones((8, tile), jnp.float32)

        def weigh(s: Array, carry: None) -> None:
            weight = share * jnp.exp2((tops_ref[t, s] - top) * scale)
            masses = sums_ref[t, s] * weight
            for part in range(out_ref.shape[4]):
                weighed = lax.dot_general(
                    ones, masses if part == 0 else masses * masses, (((1,), (1,)), ((), ())),
                    precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
                )  # fmt: skip
                out_ref[0, 0, t, s, part] = weighed[0]

        lax.fori_loop(0, num_steps, weigh, None)


def _by_chunk(p: Array, chunks: int) -> Array:
    """float32 [rows, keys] -> the sum of each chunk [chunks, rows], by two products of 16 bits with
    ones: 2**-17 of a weight is lost."""
    keys = p.shape[1]
    size = keys // chunks
    key = lax.broadcasted_iota(jnp.int32, (chunks, keys), 1)
    first = lax.broadcasted_iota(jnp.int32, (chunks, keys), 0) * size
    mine = ((key >= first) & (key < first + size)).astype(jnp.float32).astype(jnp.bfloat16)
    high = p.astype(jnp.bfloat16)
    low = (p - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return dot(mine, high) + dot(mine, low)


def _head_major(
    probe: Keys | Int4Keys, keys: int, dtype: Any
) -> tuple[list[Array], list[Any], Any]:
    """What the kernel multiplies rows with: operands, their specs, and how."""

    def tokens_first(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, keys, width), lambda b, h, r, s, *_: (h, s, 0))

    match probe:
        case Keys(full):
            full = full.astype(dtype).swapaxes(0, 1)
            return [full], [tokens_first(full.shape[2])], _dot
        case Int4Keys(codes, scale):
            operands = [codes.swapaxes(0, 1), scale.swapaxes(0, 1)[:, None]]
            scale_spec = pl.BlockSpec((1, 1, keys), lambda b, h, r, s, *_: (h, 0, s))
            return operands, [tokens_first(codes.shape[2]), scale_spec], _dot4


def _dot(rows: Array, keys_ref: Any) -> Array:
    return dot(rows, keys_ref[0])


def _dot4(rows: Array, codes_ref: Any, scale_ref: Any) -> Array:
    codes = codes_ref[0].astype(jnp.int32)
    half = codes.shape[1]
    low = ((codes & 15) - 8).astype(jnp.float32).astype(rows.dtype)
    high = ((codes >> 4) - 8).astype(jnp.float32).astype(rows.dtype)
    scale: Array = scale_ref[0]
    return (dot(rows[:, :half], low) + dot(rows[:, half:], high)) * scale
