"""Block sizes of every kernel, by target, in one table; what kernels cost; how they cut their work.

Sizes follow from what the compilers say of each (instructions, registers, spills, on-chip memory),
and from how many blocks it takes to occupy a chip at batch 1. Costs are for XLA, whose schedule and
estimates else take a kernel for nothing. Pages of the pool and new tokens are cut into one list of
pieces of C tokens, which the kernels walk.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from ckv_jax.kernels_pallas.target import Target

NEVER = 2**30  # the order of a token that no query sees


def _size(default: int, of: int) -> int:
    """A size that is a multiple of `of`."""
    sized: int = field(default=default, metadata={"of": of})
    return sized


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    def __post_init__(self) -> None:
        for one in fields(self):
            value, of = getattr(self, one.name), one.metadata["of"]
            if value % of or value < of:
                raise ValueError(f"got {one.name} {value}, expected a multiple of {of}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuAttend(_Sizes):
    """held: query rows that stay on the chip; rows: of one tile; keys: tokens of one step."""

    held: int = _size(512, of=16)
    rows: int = _size(128, of=16)
    keys: int = _size(128, of=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuDense(_Sizes):
    """Of attention over no pages. held: query rows, times the heads of a block, that stay on the
    chip; rows: of one step; strip: of them at a time; keys: tokens of one step; part: of them at a
    time; memory: bytes on the chip for all of it."""

    held: int = _size(8192, of=128)
    rows: int = _size(2048, of=128)
    strip: int = _size(256, of=128)
    keys: int = _size(512, of=128)
    part: int = _size(128, of=128)
    memory: int = _size(32 << 20, of=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuScore(_Sizes):
    """held: query rows that stay on the chip; rows: of one tile; keys: of one step; memory: bytes
    on the chip for all of it."""

    held: int = _size(256, of=16)
    rows: int = _size(128, of=16)
    keys: int = _size(256, of=128)
    memory: int = _size(32 << 20, of=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuGather(_Sizes):
    """entries: table entries of one grid step, whose copies are in flight together."""

    entries: int = _size(16, of=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttend(_Sizes):
    """keys: tokens of one step at most; steps: how many of them are loaded ahead."""

    keys: int = _size(64, of=64)
    steps: int = _size(2, of=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuScore(_Sizes):
    """keys: of one step; steps: how many of them are loaded ahead."""

    keys: int = _size(64, of=64)
    steps: int = _size(2, of=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGather:
    """bytes: the part of a page that one thread block moves, at most."""

    bytes: int = 32 * 1024

    def __post_init__(self) -> None:
        if not 128 <= self.bytes <= 112 * 1024:
            raise ValueError(f"got bytes {self.bytes}, expected 128 to {112 * 1024}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuBlocks:
    """What the kernels take on one generation of TPUs."""

    attend: TpuAttend = field(default_factory=TpuAttend)
    dense: TpuDense = field(default_factory=TpuDense)
    score: TpuScore = field(default_factory=TpuScore)
    gather: TpuGather = field(default_factory=TpuGather)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBlocks:
    """What the kernels take on one family of GPUs."""

    attend: GpuAttend = field(default_factory=GpuAttend)
    score: GpuScore = field(default_factory=GpuScore)
    gather: GpuGather = field(default_factory=GpuGather)


_TPU: Mapping[str, TpuBlocks] = MappingProxyType(
    {
        "": TpuBlocks(),
        # Its matrix units hand results on in order, so that more of them wait in registers.
        "TPU v4": TpuBlocks(dense=TpuDense(strip=128, part=256), score=TpuScore(keys=128)),
    }
)
"""By the beginning of the device's name; the longest that fits holds."""
_GPU: Mapping[int, GpuBlocks] = MappingProxyType({9: GpuBlocks()})
"""By the major compute capability; where there is none, Hopper's."""


def tpu_blocks(target: Target) -> TpuBlocks:
    """The block sizes for a TPU."""
    return _TPU[max((name for name in _TPU if target.kind.startswith(name)), key=len)]


def gpu_blocks(target: Target) -> GpuBlocks:
    """The block sizes for a GPU."""
    major = target.capability[0] if target.capability else 9
    return _GPU.get(major, _GPU[9])


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


def score_cost(rows: Array, tokens: int, probe_bytes: int, sweeps: int) -> pl.CostEstimate:
    """Scores of rows [B, K, R, W] over a probe of so many tokens and bytes, swept so often."""
    pairs = rows.size // rows.shape[3] * tokens
    return pl.CostEstimate(
        flops=sweeps * 2 * pairs * rows.shape[3],
        transcendentals=sweeps * pairs,
        bytes_accessed=sweeps * rows.shape[0] * probe_bytes + rows.size * rows.dtype.itemsize,
    )


def of_gpu(kernel: Any, cost: pl.CostEstimate) -> dict[str, Any]:
    """The argument that says so to `plgpu.kernel`, which takes one from JAX 0.12 on."""
    return (
        {"cost_estimate": cost} if "cost_estimate" in inspect.signature(kernel).parameters else {}
    )


class Pieces(NamedTuple):
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
) -> Pieces:
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
    used = jnp.any(valid, axis=2)
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
    partial = used & jnp.any(~valid, axis=2)
    partial = jnp.pad(partial, ((0, 0), (new_pieces, total - num_pages - new_pieces)))
    dirty = jnp.any(partial.reshape(batch, -1, per_step), axis=2)

    def new(tokens: Array) -> Array:
        tokens = jnp.pad(tokens, ((0, 0), (0, (new_pieces + 1) * chunk - tail), (0, 0)))
        keep = jnp.pad(seen, ((0, 0), (0, chunk)))[:, :, None]
        tokens = jnp.where(keep, tokens, jnp.zeros((), tokens.dtype))
        return tokens.reshape(batch, new_pieces + 1, chunk, tokens.shape[2])

    return Pieces(
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


def spread(pieces: Pieces, each: int, per_step: int) -> Pieces:
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


def fold(q: Array, kv_heads: int, q_start: Array, multiple: int) -> tuple[Array, Array]:
    """q [B, S, H, D] -> rows [B, K, S*G, D], padded to a multiple, and limit int32 [B, rows].

    A row sees the tokens whose order is at most its limit; padding sees none.
    """
    batch, queries, heads, dim = q.shape
    group = heads // kv_heads
    rows = q.reshape(batch, queries, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, queries * group, dim)
    pad = -(queries * group) % multiple
    limit = q_start[:, None] + jnp.arange(1, queries + 1, dtype=jnp.int32)[None, :]
    limit = jnp.repeat(jnp.maximum(limit, 0), group, axis=1)
    return (
        jnp.pad(rows, ((0, 0), (0, 0), (0, pad), (0, 0))),
        jnp.pad(limit, ((0, 0), (0, pad)), constant_values=-1),
    )


def tile_rows(rows: int, most: int, tiles: int, of: int = 16) -> int:
    """Rows of a tile, a multiple of `of` up to `most`: no more than there are, in `tiles` tiles at
    least, so that no core idles and nothing is computed for rows that do not exist.
    """
    tiles = max(tiles, -(-rows // most))
    return min(most, -(-rows // (of * tiles)) * of)


def held_rows(rows: int, most: int, tile: int, parts: int, of: int = 16) -> tuple[int, int]:
    """Rows that a kernel holds at a time, at most about `most` and in `parts` parts at least, and
    those of one of their tiles, at most `tile`; multiples of `of`, and the former of the latter.
    """
    held = tile_rows(rows, most, parts, of)
    tiles = max(1, -(-held // tile))
    size = -(-held // (of * tiles)) * of
    return size * tiles, size


def unfold(rows: Array, queries: int, group: int) -> Array:
    """[B, K, rows, ...] -> [B, S, H, ...], without the padding."""
    batch, kv_heads, _, *rest = rows.shape
    rows = rows[:, :, : queries * group].reshape(batch, kv_heads, queries, group, *rest)
    return jnp.moveaxis(rows, 1, 2).reshape(batch, queries, kv_heads * group, *rest)
