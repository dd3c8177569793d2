"""Block sizes of every kernel, by target, in one table; and what kernels cost.

Sizes follow from what the compilers say of each (instructions, registers, spills, on-chip memory),
and from how many blocks it takes to occupy a chip at batch 1. Costs are for XLA, whose schedule and
estimates else take a kernel for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jax import Array
from jax.experimental import pallas as pl

from ckv_jax.kernels_pallas.target import Target


def _multiple(name: str, value: int, of: int) -> None:
    if value % of or value < of:
        raise ValueError(f"got {name} {value}, expected a multiple of {of}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuAttend:
    """held: query rows that stay on the chip; rows: of one tile; keys: tokens of one step."""

    held: int = 512
    rows: int = 128
    keys: int = 128

    def __post_init__(self) -> None:
        _multiple("held", self.held, 16)
        _multiple("rows", self.rows, 16)
        _multiple("keys", self.keys, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuDense:
    """Of attention over no pages. held: query rows, times the heads of a block, that stay on the
    chip; rows: of one step; strip: of them at a time; keys: tokens of one step; part: of them at a
    time; memory: bytes on the chip for all of it."""

    held: int = 8192
    rows: int = 2048
    strip: int = 256
    keys: int = 512
    part: int = 128
    memory: int = 32 << 20

    def __post_init__(self) -> None:
        _multiple("held", self.held, 128)
        _multiple("rows", self.rows, 128)
        _multiple("strip", self.strip, 128)
        _multiple("keys", self.keys, 128)
        _multiple("part", self.part, 128)
        _multiple("memory", self.memory, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuScore:
    """held: query rows that stay on the chip; rows: of one tile; keys: of one step; memory: bytes
    on the chip for all of it."""

    held: int = 256
    rows: int = 128
    keys: int = 256
    memory: int = 32 << 20

    def __post_init__(self) -> None:
        _multiple("held", self.held, 16)
        _multiple("rows", self.rows, 16)
        _multiple("keys", self.keys, 128)
        _multiple("memory", self.memory, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuGather:
    """entries: table entries of one grid step, whose copies are in flight together."""

    entries: int = 16

    def __post_init__(self) -> None:
        _multiple("entries", self.entries, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttend:
    """keys: tokens of one step at most; steps: how many of them are loaded ahead."""

    keys: int = 64
    steps: int = 2

    def __post_init__(self) -> None:
        _multiple("keys", self.keys, 64)
        _multiple("steps", self.steps, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuScore:
    """keys: of one step; steps: how many of them are loaded ahead."""

    keys: int = 64
    steps: int = 2

    def __post_init__(self) -> None:
        _multiple("keys", self.keys, 64)
        _multiple("steps", self.steps, 1)


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
