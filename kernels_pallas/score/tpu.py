# mypy: disallow-untyped-calls=False
"""Equation 1 for TPUs: two sweeps over the probe in one kernel, weights a key at a time out.

The grid runs over sequence and KV head, tiles of query rows, the two sweeps and blocks of keys. The
first sweep finds every row's maximum and sum, the second writes each key's sum of weights. Codes
are unpacked a block at a time in VMEM; product-quantised codes meet the rows' lookup tables
(row . codebook entry) in a one-hot matmul.
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

from ckv_jax.kernels_pallas.attend.pieces import tile_rows
from ckv_jax.kernels_pallas.blocks import TpuScore, tpu_blocks
from ckv_jax.kernels_pallas.cost import score_cost
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Int8Keys, Keys, PqKeys, TokenProbe
from ckv_jax.kernels_pallas.score.rows import chunk_sums, fold_queries
from ckv_jax.kernels_pallas.target import Target

__all__ = ["score"]

_LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


@functools.partial(jax.jit, static_argnames=("chunk_tokens", "target", "blocks", "interpret"))
def score(
    q: Array,
    probe: TokenProbe,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    *,
    target: Target,
    blocks: TpuScore | None = None,
    interpret: Any = False,
) -> Array:
    """See `api.score`. Codes are brought into head-major order first, still compressed.

    Raises:
      NotImplementedError: other queries than bfloat16 or float32, or keys as bit patterns.
    """
    blocks = blocks or tpu_blocks(target).score
    dim = q.shape[3]
    tokens, kv_heads, _ = probe.shape
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"got q {q.dtype}, expected bfloat16 or float32")
    if isinstance(probe, Keys) and not jnp.issubdtype(probe.keys.dtype, jnp.floating):
        raise NotImplementedError(f"got keys as bit patterns {probe.keys.dtype}, expected floats")
    if q.size == 0:
        return jnp.zeros((q.shape[0], kv_heads, tokens // chunk_tokens), jnp.float32)
    group_rows = q.shape[1] * (q.shape[2] // kv_heads)
    cores = -(-target.cores // (q.shape[0] * kv_heads))
    tile = tile_rows(group_rows, blocks.rows, cores)
    rows, valid = fold_queries(q, kv_heads, q_lengths, tile)
    batch, _, num_rows, _ = rows.shape
    tiles, steps = num_rows // tile, pl.cdiv(tokens, blocks.keys)
    rows, operands, specs, logits = _head_major(rows, probe, blocks.keys)

    def of_tile(width: int, heads: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, tile, width),
            lambda b, h, t, sweep, s, limit: (b, h if heads > 1 else 0, t, 0),
        )

    weights = pl.pallas_call(
        functools.partial(_kernel, logits=logits, keys=blocks.keys, scale=1.0 / math.sqrt(dim)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, tiles, 1, tokens), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, tiles, 2, steps),
            in_specs=[of_tile(rows.shape[3], kv_heads), of_tile(1, 1), *specs],
            out_specs=pl.BlockSpec(
                (1, 1, 1, 1, blocks.keys),
                lambda b, h, t, sweep, s, limit: (b, h, t, 0, s * sweep),
            ),
            scratch_shapes=[pltpu.VMEM((tile, 1), jnp.float32)] * 2,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=score_cost(rows, tokens, sum(x.size * x.dtype.itemsize for x in operands), 2),
        interpret=interpret,
    )(
        num_tokens.reshape(1),
        rows,
        valid.astype(jnp.float32)[:, None, :, None],
        *operands,
    )
    return chunk_sums(weights[:, :, :, 0], chunk_tokens)


def _kernel(
    limit_ref: Any,
    rows_ref: Any,
    valid_ref: Any,
    *refs: Any,
    logits: Any,
    keys: int,
    scale: float,
) -> None:
    *probe_refs, out_ref, top_ref, total_ref = refs
    sweep, step = pl.program_id(3), pl.program_id(4)

    @pl.when(jnp.logical_and(sweep == 0, step == 0))
    def _start() -> None:
        top_ref[...] = jnp.full_like(top_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)

    x = logits(rows_ref[0, 0], *probe_refs) * scale  # [rows, keys]
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1) + step * keys
    seen = column < limit_ref[0]
    x = jnp.where(seen, x, _LOWEST)

    @pl.when(sweep == 0)
    def _stats() -> None:
        old = top_ref[...]
        top = jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
        part = jnp.sum(jnp.where(seen, jnp.exp(x - top), 0.0), axis=1, keepdims=True)
        total_ref[...] = total_ref[...] * jnp.exp(old - top) + part
        top_ref[...] = top

    @pl.when(sweep == 1)
    def _sums() -> None:
        total = total_ref[...]
        share = valid_ref[0, 0] / jnp.where(total > 0, total, 1.0)  # [rows, 1]
        p = jnp.where(seen, jnp.exp(x - top_ref[...]) * share, 0.0)
        out_ref[0, 0, 0] = jnp.sum(p, axis=0, keepdims=True)


def _head_major(
    rows: Array, probe: TokenProbe, keys: int
) -> tuple[Array, list[Array], list[Any], Any]:
    """What the kernel multiplies: rows (or their tables), operands, their specs, and how."""
    subspaces = probe.codes.shape[2] if isinstance(probe, PqKeys) else 0

    def tokens_last(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, width, keys), lambda b, h, t, sweep, s, limit: (h, 0, s))

    def tokens_first(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, keys, width), lambda b, h, t, sweep, s, limit: (h, s, 0))

    match probe:
        case Keys(full):
            full = full.astype(rows.dtype).swapaxes(0, 1)
            return rows, [full], [tokens_first(full.shape[2])], _dot
        case Int8Keys(codes, scale) | Int4Keys(codes, scale):
            operands = [codes.swapaxes(0, 1), scale.swapaxes(0, 1)[:, None]]
            specs = [tokens_first(codes.shape[2]), tokens_last(1)]
            return rows, operands, specs, _dot8 if isinstance(probe, Int8Keys) else _dot4
        case PqKeys(codes, codebooks):
            batch, kv_heads, num_rows, _ = rows.shape
            split = rows.reshape(batch, kv_heads, num_rows, subspaces, -1)
            tables = jnp.einsum(
                "bkrms,kmcs->bkrmc",
                split,
                codebooks.astype(rows.dtype),
                preferred_element_type=jnp.float32,
            )
            tables = tables.reshape(batch, kv_heads, num_rows, -1).astype(rows.dtype)
            return tables, [codes.transpose(1, 2, 0)], [tokens_last(subspaces)], _dot_tables


def _matmul(rows: Array, keys: Array) -> Array:
    return lax.dot_general(rows, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _dot(rows: Array, keys_ref: Any) -> Array:
    return _matmul(rows, keys_ref[0])


def _dot8(rows: Array, codes_ref: Any, scale_ref: Any) -> Array:
    codes: Array = codes_ref[0].astype(jnp.float32).astype(rows.dtype)
    scale: Array = scale_ref[0]
    return _matmul(rows, codes) * scale


def _dot4(rows: Array, codes_ref: Any, scale_ref: Any) -> Array:
    codes = codes_ref[0].astype(jnp.int32)
    half = codes.shape[1]
    low = ((codes & 15) - 8).astype(jnp.float32).astype(rows.dtype)
    high = ((codes >> 4) - 8).astype(jnp.float32).astype(rows.dtype)
    scale: Array = scale_ref[0]
    return (_matmul(rows[:, :half], low) + _matmul(rows[:, half:], high)) * scale


def _dot_tables(tables: Array, codes_ref: Any) -> Array:
    codes = codes_ref[0].astype(jnp.int32)  # [Msub, keys]
    subspaces, keys = codes.shape
    size = tables.shape[1] // subspaces
    entry = lax.broadcasted_iota(jnp.int32, (size, keys), 0)
    x = jnp.zeros((tables.shape[0], keys), jnp.float32)
    for m in range(subspaces):
        hit = (entry == codes[m : m + 1]).astype(jnp.float32).astype(tables.dtype)
        x = x + jnp.dot(
            tables[:, m * size : (m + 1) * size], hit, preferred_element_type=jnp.float32
        )
    return x
