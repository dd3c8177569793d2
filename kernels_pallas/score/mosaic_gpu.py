# mypy: disallow-untyped-calls=False
"""Equation 1 for Hopper GPUs (WGMMA), in two passes over the probe.

The first finds every query row's log-sum-exp, the second the sum over rows of exp(logit - lse),
key by key: a `[B, K, tiles, T]` array is all that reaches device memory. Peaks need every row's
own weights, which go to device memory in tiles of 64 rows: few queries score by peaks. A thread
block owns 64 rows of one KV head and a share of the keys; compressed keys are decoded a block at a
time, in shared memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ckv_jax.kernels_pallas.blocks import GPU_KEYS, GPU_STEPS, by_row, fold, of_gpu, score_cost
from ckv_jax.kernels_pallas.score import over_queries
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Keys, valid_queries, weights_of
from ckv_jax.kernels_pallas.target import Target, require_wgmma

_ROWS = 64  # of one WGMMA
_LOWEST = -1e30  # start of the running maximum: finite, so that differences stay numbers


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
    interpret: Any = None,
) -> Array:
    """See `score`.

    Raises:
      NotImplementedError: queries other than bfloat16 or float16, keys of another dtype than the
        queries, D not a multiple of 64 up to 256, or peaks of chunks that a block of keys cuts.
    """
    require_wgmma(target)
    dim, keys = q.shape[3], GPU_KEYS
    tokens, kv_heads, _ = probe.shape
    padded = max(keys, -(-tokens // 16) * 16)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"got q {q.dtype}, expected bfloat16 or float16")
    if dim % 64 or dim > 256:
        raise NotImplementedError(f"got head dim {dim}, expected 64, 128, 192 or 256")
    more = padded - tokens
    probe = jax.tree.map(lambda x: jnp.pad(x, ((0, more),) + ((0, 0),) * (x.ndim - 1)), probe)
    plan = _full(probe, q.dtype) if isinstance(probe, Keys) else _int4(probe, q.dtype)
    if peaks and (keys % chunk_tokens or padded % chunk_tokens):
        raise NotImplementedError(
            f"got chunks of {chunk_tokens} tokens, expected a divisor of {keys} and of "
            f"{padded} for peaks"
        )
    if q.size == 0:
        several = (2,) if peaks else ()
        return jnp.zeros((*several, q.shape[0], kv_heads, tokens // chunk_tokens), jnp.float32)
    rows = fold(valid_queries(q, q_lengths), kv_heads, _ROWS)  # [B, K, rows, D]
    steps = pl.cdiv(padded, keys)
    units = rows.shape[0] * kv_heads * (rows.shape[2] // _ROWS)
    share = max(1, steps * units // target.cores)
    splits = pl.cdiv(steps, share)
    limit = num_tokens.reshape(1)

    tops, totals = _stream(rows, plan, limit, None, padded, splits, interpret)
    top = jnp.max(tops, axis=2)
    total = jnp.sum(totals * jnp.exp(tops - top[:, :, None]), axis=2)  # [B, K, rows]
    lse = top + jnp.log(jnp.where(total > 0, total, 1.0))
    group = q.shape[2] // kv_heads
    valid = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :] < q_lengths[:, None]  # [B, S]
    valid = by_row(valid, group, rows.shape[2])  # [B, rows]
    lse = jnp.where((total > 0) & valid[:, None], lse, jnp.inf)  # such a row's weights are 0
    if peaks:
        weights = by_row(weights_of(q_lengths, q.shape[1], peaks), group, rows.shape[2])
        lse = lse - jnp.log(jnp.where(weights > 0, weights, 1.0))[:, None]
    sums = _stream(rows, plan, limit, lse, padded, splits, interpret, peaks)[0]
    fresh = padded - (steps - 1) * keys  # of the last block, at its end
    if peaks:  # [B, K, tiles, steps, rows, keys]
        by_chunk = jnp.sum(sums.reshape(*sums.shape[:5], -1, chunk_tokens), axis=6)
        both = over_queries(by_chunk, peaks, axis=4).sum(axis=3)  # [2, B, K, steps, chunks]
        last = both[..., -1, (keys - fresh) // chunk_tokens :]
        found = jnp.concatenate([both[..., :-1, :].reshape(*both.shape[:3], -1), last], axis=-1)
        return found[..., : tokens // chunk_tokens]
    parts = [sums[..., :-1, :].reshape(*sums.shape[:3], -1), sums[..., -1, keys - fresh :]]
    by_token = jnp.concatenate(parts, axis=-1)[..., :tokens]
    return jnp.sum(by_token.reshape(*sums.shape[:3], -1, chunk_tokens), axis=(2, 4))


def _stream(
    rows: Array,
    plan: KeyBlocks,
    num_tokens: Array,
    lse: Array | None,
    tokens: int,
    splits: int,
    interpret: Any,
    each_row: bool = False,
) -> tuple[Array, ...]:
    """Without lse: maxima and sums of exponentials, [B, K, splits, rows] both. With lse
    [B, K, rows]: every key's sum of weights over the rows of a tile, [B, K, tiles, steps, keys];
    with `each_row` the weights themselves, [B, K, tiles, steps, 64, keys].
    """
    batch, kv_heads, num_rows, dim = rows.shape
    keys, tiles = GPU_KEYS, num_rows // _ROWS
    steps = pl.cdiv(tokens, keys)
    share = pl.cdiv(steps, splits)
    operands = (rows, num_tokens, *plan.operands) + (() if lse is None else (lse,))
    nbytes = sum(x.size * x.dtype.itemsize for x in plan.operands)
    of_rows = jax.ShapeDtypeStruct((batch, kv_heads, splits, num_rows), jnp.float32)
    one = (_ROWS, keys) if each_row else (keys,)
    of_keys = jax.ShapeDtypeStruct((batch, kv_heads, tiles, steps, *one), jnp.float32)
    out_type = (of_rows, of_rows) if lse is None else (of_keys,)

    def kernel(*refs: Any) -> None:
        inputs, rest = refs[: len(operands)], refs[len(operands) :]
        rows_ref, limit_ref, *probe_refs = inputs
        out_refs, rest = rest[: len(out_type)], rest[len(out_type) :]
        q_smem, lse_smem, start_barrier, barriers, *scratch = rest
        unit = lax.axis_index("unit")
        b, head = lax.div(unit, kv_heads), lax.rem(unit, kv_heads)
        tile_index = lax.axis_index("tile")
        tile = pl.ds(tile_index * _ROWS, _ROWS)
        split = lax.axis_index("split")
        begin = split * share
        end = jnp.minimum(begin + share, steps)
        limit = limit_ref[0]

        def first_key(step: Array) -> Array:
            return jnp.minimum(step * keys, tokens - keys)  # the last block overlaps its neighbour

        def load(step: Array, slot: Array | int) -> None:
            plan.load(probe_refs, scratch, head, first_key(step), slot, barriers.at[slot])

        plgpu.copy_gmem_to_smem(rows_ref.at[b, head, tile], q_smem, start_barrier)
        if lse is not None:
            plgpu.copy_gmem_to_smem(probe_refs[-1].at[b, head, tile], lse_smem, start_barrier)
        for ahead in range(GPU_STEPS):
            pl.when(begin + ahead < end)(functools.partial(load, begin + ahead, ahead))
        plgpu.barrier_wait(start_barrier)

        def logits(step: Array) -> Array:
            """[rows, keys], -inf past the last token."""
            slot = lax.rem(step - begin, GPU_STEPS)
            plgpu.barrier_wait(barriers.at[slot])
            parts, scale = plan.decode(scratch, slot)

            def dot(acc_ref: Any) -> Any:
                width = dim // len(parts)
                for i, part in enumerate(parts):
                    of_part = q_smem.at[:, pl.ds(i * width, width)]
                    plgpu.wgmma(acc_ref, of_part, part.transpose((1, 0)))
                return acc_ref[...]

            x = pl.run_scoped(dot, plgpu.WGMMAAccumulatorRef((_ROWS, keys), jnp.float32)) * (
                1.0 / math.sqrt(dim)
            )
            if scale is not None:
                x = x * lax.broadcast_in_dim(scale, x.shape, (1,))
            column = lax.broadcasted_iota(jnp.int32, x.shape, 1) + first_key(step)
            seen = column < limit
            if lse is None:  # a key that two blocks hold counts once
                seen = seen & (column >= step * keys)
            x = jnp.where(seen, x, -jnp.inf)

            @pl.when(step + GPU_STEPS < end)
            def _next() -> None:
                plgpu.commit_smem()  # every warp is done with this slot
                load(step + GPU_STEPS, slot)

            return x

        def stats(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            top, total = carry
            x = logits(step)
            new_top = jnp.maximum(top, jnp.max(x, axis=1))
            p = jnp.exp(x - lax.broadcast_in_dim(new_top, x.shape, (0,)))
            return new_top, total * jnp.exp(top - new_top) + jnp.sum(p, axis=1)

        def sums(step: Array, carry: None) -> None:
            x = logits(step)
            p = jnp.exp(x - lax.broadcast_in_dim(lse_smem[...], x.shape, (0,)))
            out_refs[0][b, head, tile_index, step] = p if each_row else jnp.sum(p, axis=0)

        if lse is not None:
            lax.fori_loop(begin, end, sums, None)
            return
        start = (jnp.full((_ROWS,), _LOWEST, jnp.float32), jnp.zeros((_ROWS,), jnp.float32))
        top, total = lax.fori_loop(begin, end, stats, start)
        out_refs[0][b, head, split, tile] = top
        out_refs[1][b, head, split, tile] = total

    outs: tuple[Array, ...] = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=(
            plgpu.SMEM((_ROWS, dim), rows.dtype, transforms=plan.transforms),
            plgpu.SMEM((_ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + (lse is not None)),
            plgpu.Barrier(num_arrivals=plan.loaded, num_barriers=GPU_STEPS),
            *plan.scratch,
        ),
        grid=(batch * kv_heads, tiles, splits),
        grid_names=("unit", "tile", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **of_gpu(plgpu.kernel, score_cost(rows, tokens, nbytes)),
    )(*operands)
    return outs


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlocks:
    """How a kernel loads and decodes one probe; `refs` are the operands, `scratch` as listed.

    load(refs, scratch, head, first, slot, barrier) starts `loaded` copies of the keys from
    `first` on; decode(scratch, slot) gives references to parts of keys [keys, D / parts], side by
    side, and their scales or None.
    """

    operands: tuple[Array, ...]
    scratch: tuple[Any, ...]
    transforms: tuple[Any, ...]
    loaded: int
    load: Callable[[Sequence[Any], Sequence[Any], Array, Array, Array | int, Any], None]
    decode: Callable[[Sequence[Any], Array], tuple[list[Any], Array | None]]


def _swizzled(width: int) -> tuple[Any, ...]:
    """The layout WGMMA wants of 16-bit operands, in tiles `width` elements wide."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def _full(probe: Keys, dtype: Any) -> KeyBlocks:
    """The plan for exact keys, all in `dtype`."""
    if probe.keys.dtype != dtype:
        raise NotImplementedError(f"got keys {probe.keys.dtype}, expected {dtype} like q")

    def load(
        refs: Sequence[Any],
        scratch: Sequence[Any],
        head: Array,
        first: Array,
        slot: Array | int,
        on: Any,
    ) -> None:
        part = refs[0].at[pl.ds(first, GPU_KEYS), head, :]
        plgpu.copy_gmem_to_smem(part, scratch[0].at[slot], on)

    return KeyBlocks(
        operands=(probe.keys,),
        scratch=(
            plgpu.SMEM((GPU_STEPS, GPU_KEYS, probe.shape[2]), dtype, transforms=_swizzled(64)),
        ),
        transforms=_swizzled(64),
        loaded=1,
        load=load,
        decode=lambda scratch, slot: ([scratch[0].at[slot]], None),
    )


def _int4(probe: Int4Keys, dtype: Any) -> KeyBlocks:
    """The plan for int4 keys, which are decoded to `dtype`."""
    width, dim = probe.codes.shape[2], probe.shape[2]
    tiled = _swizzled(min(64, width))  # a write of `width` columns is of whole tiles

    def load(
        refs: Sequence[Any],
        scratch: Sequence[Any],
        head: Array,
        first: Array,
        slot: Array | int,
        on: Any,
    ) -> None:
        codes, scales, _ = scratch
        keys = pl.ds(first, GPU_KEYS)
        plgpu.copy_gmem_to_smem(refs[0].at[keys, head, :], codes.at[slot], on)
        plgpu.copy_gmem_to_smem(refs[1].at[head, keys], scales.at[slot], on)

    def decode(scratch: Sequence[Any], slot: Array) -> tuple[list[Any], Array]:
        codes, scales, decoded = scratch
        wide = codes[slot].astype(jnp.int32)
        for i, nibbles in enumerate((wide & 15, wide >> 4)):
            decoded[:, pl.ds(i * width, width)] = (nibbles - 8).astype(dtype)
        plgpu.commit_smem()
        return [decoded], scales[slot]

    return KeyBlocks(
        operands=(probe.codes, probe.scale.swapaxes(0, 1)),
        scratch=(
            plgpu.SMEM((GPU_STEPS, GPU_KEYS, width), probe.codes.dtype),
            plgpu.SMEM((GPU_STEPS, GPU_KEYS), jnp.float32),
            plgpu.SMEM((GPU_KEYS, dim), dtype, transforms=tiled),
        ),
        transforms=tiled,
        loaded=2,
        load=load,
        decode=decode,
    )
