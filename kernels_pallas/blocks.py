"""Block sizes of every kernel by target, and the kernels' costs.

Sizes follow from what the compilers say of each (instructions, registers, spills, on-chip memory),
and from how many blocks it takes to occupy a chip at batch 1. Costs are for XLA, whose schedule and
estimates else take a kernel for nothing. Pages of the pool and new tokens are cut into one list of
pieces of C tokens, which the kernels walk.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ckv_jax.kernels_pallas.target import Target

NEVER = 2**30  # the order of a token that no query sees


class TpuAttend(NamedTuple):
    """held: query rows that stay on the chip; rows: of one tile, multiples of 16; keys: tokens of
    one step, a multiple of 128."""

    held: int = 512
    rows: int = 128
    keys: int = 128


class TpuDense(NamedTuple):
    """Of attention over no pages, in multiples of 128. held: query rows, times the heads of a
    block, that stay on the chip; rows: of one step; strip: of them at a time; keys: tokens of one
    step; part: of them at a time; memory: bytes on the chip for all of it."""

    held: int = 8192
    rows: int = 2048
    strip: int = 256
    keys: int = 512
    part: int = 128
    memory: int = 32 << 20


class TpuScore(NamedTuple):
    """held: query rows that stay on the chip; rows: of one tile, multiples of 16; keys: of one
    step, a multiple of 128; memory: bytes on the chip for all of it."""

    held: int = 256
    rows: int = 128
    keys: int = 256
    memory: int = 32 << 20


class TpuBlocks(NamedTuple):
    """Block sizes of the kernels on one generation of TPUs."""

    attend: TpuAttend = TpuAttend()
    dense: TpuDense = TpuDense()
    score: TpuScore = TpuScore()


# The matrix units of v4 hand results on in order, so that more of them wait in registers.
_TPU_V4 = TpuBlocks(dense=TpuDense(strip=128, part=256), score=TpuScore(keys=128))


TPU_GATHERS = 16
"""Table entries of one grid step, whose copies are in flight together."""
GPU_KEYS = 64
"""Keys of one step of attention or of scores, a multiple of 64."""
GPU_STEPS = 2
"""Steps that are loaded ahead."""
GPU_GATHER_BYTES = 32 * 1024
"""The part of a page that one thread block moves, at most: 128 to 112 KiB."""


def tpu_blocks(target: Target) -> TpuBlocks:
    """The block sizes for a TPU."""
    return _TPU_V4 if target.kind.startswith("TPU v4") else TpuBlocks()


def attention_cost(rows: Array, tokens: int, passes: int) -> pl.CostEstimate:
    """Attention of rows [B, K, R, D] over so many tokens, all of which are read `passes` times."""
    batch, kv_heads, num_rows, dim = rows.shape
    pairs = batch * kv_heads * num_rows * tokens
    keys = 2 * batch * passes * tokens * kv_heads * dim * rows.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * pairs * dim,
        transcendentals=pairs,
        bytes_accessed=keys + 2 * rows.size * rows.dtype.itemsize,
    )


def copy_cost(size: int) -> pl.CostEstimate:
    """Reading and writing so many bytes."""
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * size)


def score_cost(rows: Array, tokens: int, probe_bytes: int) -> pl.CostEstimate:
    """Cost of scoring query rows [B, K, R, W] over a probe of `tokens` tokens."""
    pairs = rows.size // rows.shape[3] * tokens
    return pl.CostEstimate(
        flops=2 * pairs * rows.shape[3],
        transcendentals=pairs,
        bytes_accessed=rows.shape[0] * probe_bytes + rows.size * rows.dtype.itemsize,
    )


def of_gpu(kernel: Any, cost: pl.CostEstimate) -> dict[str, Any]:
    """The argument that says so to `plgpu.kernel`, which takes one from JAX 0.12 on."""
    return (
        {"cost_estimate": cost} if "cost_estimate" in inspect.signature(kernel).parameters else {}
    )


class PieceTable(NamedTuple):
    """n pieces of C tokens in whole steps; the order says from which query on a token is seen."""

    k_table: Array  # int32 [B, n]: a page of the pool, or -1 - i for piece i of k_new
    v_table: Array  # int32 [B, n]
    order: Array  # int32 [B, n*C]: 0 for a page token, r + 1 for new token r, NEVER for neither
    dirty: Array  # int32 [B, steps]: 1 where pages of the pool hold tokens that no query may see
    k_new: Array  # [B, pieces + 1, C, K*D], padded with zeros; the last piece is all zeros
    v_new: Array


def cut(
    count: int,
    chunk: int,
    k_table: Array,
    v_table: Array,
    lengths: Array,
    k_new: Array,
    v_new: Array,
    q_start: Array,
    queries: int,
    per_step: int,
) -> PieceTable:
    """`count` pages of `chunk` tokens, the other arguments as in `attend`; a step is
    `per_step` pieces. New tokens come first: entries that hold nothing are last, where no step is
    taken for them."""
    batch, num_pages = k_table.shape
    tail = k_new.shape[1]
    new_pieces = -(-tail // chunk)
    total = -(-max(1, num_pages + new_pieces) // per_step) * per_step

    inside = (k_table >= 0) & (k_table < count) & (v_table >= 0) & (v_table < count)
    lengths = jnp.where(inside, lengths, 0)
    valid = jnp.arange(chunk, dtype=jnp.int32)[None, None, :] < lengths[:, :, None]
    used = lengths > 0
    zeros = -1 - new_pieces
    new_table = -1 - jnp.arange(new_pieces, dtype=jnp.int32)
    new_table = jnp.broadcast_to(new_table[None, :], (batch, new_pieces))
    pad = ((0, 0), (0, total - num_pages - new_pieces))

    def table(of_pages: Array) -> Array:
        entries = jnp.concatenate([new_table, jnp.where(used, of_pages, zeros)], axis=1)
        return jnp.pad(entries, pad, constant_values=zeros)

    position = jnp.arange(new_pieces * chunk, dtype=jnp.int32)[None, :]
    seen = (position < tail) & (position < q_start[:, None] + queries)  # [B, R]
    order = jnp.concatenate(
        [
            jnp.where(seen, position + 1, NEVER),
            jnp.where(valid, 0, NEVER).reshape(batch, num_pages * chunk),
        ],
        axis=1,
    )
    order = jnp.pad(order, ((0, 0), (0, pad[1][1] * chunk)), constant_values=NEVER)
    partial = used & (lengths < chunk)
    partial = jnp.pad(partial, ((0, 0), (new_pieces, total - num_pages - new_pieces)))
    dirty = jnp.any(partial.reshape(batch, -1, per_step), axis=2)

    def new(tokens: Array) -> Array:
        tokens = jnp.pad(tokens, ((0, 0), (0, (new_pieces + 1) * chunk - tail), (0, 0)))
        keep = jnp.pad(seen, ((0, 0), (0, chunk)))[:, :, None]
        tokens = jnp.where(keep, tokens, jnp.zeros((), tokens.dtype))
        return tokens.reshape(batch, new_pieces + 1, chunk, tokens.shape[2])

    return PieceTable(
        k_table=table(k_table),
        v_table=table(v_table),
        order=order.astype(jnp.int32),
        dirty=dirty.astype(jnp.int32),
        k_new=new(k_new),
        v_new=new(v_new),
    )


def pieces_each(pieces: int, units: int, most: int, cores: int) -> int:
    """Of how many pieces a step is: `most`, or fewer where whole steps would not occupy the chip.

    units: thread blocks that walk all pieces side by side.
    """
    return min(most, max(1, pieces * units // cores))


def spread(pieces: PieceTable, each: int, per_step: int) -> PieceTable:
    """Steps of `each` pieces as steps of `per_step`, the rest of which is zeros."""
    batch, total = pieces.k_table.shape
    chunk = pieces.k_new.shape[2]
    zeros = -pieces.k_new.shape[1]  # the last piece of the new tokens

    def wider(x: Array, size: int, value: int) -> Array:
        steps = x.reshape(batch, total // each, each * size)
        pad = (0, (per_step - each) * size)
        return jnp.pad(steps, ((0, 0), (0, 0), pad), constant_values=value).reshape(batch, -1)

    return pieces._replace(
        k_table=wider(pieces.k_table, 1, zeros),
        v_table=wider(pieces.v_table, 1, zeros),
        order=wider(pieces.order, chunk, NEVER),
    )


def fold(q: Array, kv_heads: int, multiple: int) -> Array:
    """q [B, S, H, D] -> rows [B, K, S*G, D], padded with zeros to a multiple."""
    batch, queries, heads, dim = q.shape
    group = heads // kv_heads
    rows = q.reshape(batch, queries, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, queries * group, dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -(queries * group) % multiple), (0, 0)))


def by_row(of_queries: Array, group: int, rows: int, padding: int = 0) -> Array:
    """A number of each query [B, S] for each of its rows, and `padding` behind: [B, rows]."""
    each = jnp.repeat(of_queries, group, axis=1)
    return jnp.pad(each, ((0, 0), (0, rows - each.shape[1])), constant_values=padding)


def held_rows(rows: int, most: int, tile: int, parts: int, of: int = 16) -> tuple[int, int]:
    """Rows that a kernel holds at a time, at most about `most` and in `parts` parts at least, and
    those of one of their tiles, at most `tile`; multiples of `of`, and the former of the latter.

    No core idles, and nothing is computed for rows that do not exist.
    """
    parts = max(parts, -(-rows // most))
    held = min(most, -(-rows // (of * parts)) * of)
    tiles = max(1, -(-held // tile))
    size = -(-held // (of * tiles)) * of
    return size * tiles, size


def unfold(rows: Array, queries: int, group: int) -> Array:
    """[B, K, rows, ...] -> [B, S, H, ...], without the padding."""
    batch, kv_heads, _, *rest = rows.shape
    rows = rows[:, :, : queries * group].reshape(batch, kv_heads, queries, group, *rest)
    return jnp.moveaxis(rows, 1, 2).reshape(batch, queries, kv_heads * group, *rest)
