"""Each kernel by itself, at the sizes of one layer of a request: instructions, registers, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import Array

from bench.aot.shapes import (
    BASELINE_CHUNK,
    BASELINE_TOKENS,
    BLOCK,
    CHUNK,
    PREFIX,
    SUFFIX,
    WINDOW_ROWS,
    Program,
    Sizes,
    abstract,
    ints,
    nbytes,
)
from ckv_jax.kernels_pallas.attend import attend, attend_rows
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.score import score
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.pipeline.prefill import context_bucket

_ITEM = 2  # bytes of an element of bfloat16
_FEWER_SPILLS = "versions that spill about a tenth or less take 1.4 times the instructions or more"
_SPILLING = ("TPU v4", "TPU v6", "TPU7x")
"""Where dense attention spills (bench/results/NOTEBOOK.md); on a v4 `attend` does, too."""


def _attend(batch: int, length: int, rows: int) -> Callable[[Sizes], Program]:
    """`length` new tokens over the chosen pages and over `rows` tokens of their own."""

    def program(sizes: Sizes) -> Program:
        slots = sizes.pool()
        pages = jax.eval_shape(lambda x: x.reshape(-1, *x.shape[3:]), slots)
        q, new, table = (
            sizes.queries(batch, length),
            sizes.rows(batch, rows),
            ints(batch, sizes.chosen),
        )
        args = (q, pages, table, table, table, new, new, ints(batch))
        row = sizes.row * _ITEM
        read = batch * sizes.chosen * CHUNK * 2 * row + nbytes((q, new, new))
        written = nbytes(q) + 4 * batch * length * sizes.config.num_heads
        return Program(
            jitted=jax.jit(partial(attend, target=sizes.target)), args=args, kernels=1,
            tokens=batch * length, big=(slots.shape,), must_read=read + written,
            example=lambda: _pages_example(args, at=rows - length),
            moves_more=_read_by_each_core(sizes, batch),
            spills_more=_FEWER_SPILLS if sizes.target.kind == "TPU v4" else None,
        )  # fmt: skip

    return program


def _read_by_each_core(sizes: Sizes, batch: int) -> str | None:
    """Why keys may be read more than once: with more cores than sequences no core idles."""
    if sizes.target.platform != "tpu" or sizes.target.cores <= batch:
        return None
    return "rows are split between the device's cores, each of which reads the keys"


def _attend_rows(sizes: Sizes) -> Program:
    """A block of a dense prefill over the rows before it and its own."""
    rows = context_bucket(PREFIX, BLOCK)
    q, new = sizes.queries(1, BLOCK), sizes.rows(1, rows)
    return Program(
        jitted=jax.jit(partial(attend_rows, target=sizes.target)),
        args=(q, new, new, ints(1)), kernels=1, tokens=BLOCK,
        must_read=2 * nbytes(q) + 2 * nbytes(new) + 4 * BLOCK * sizes.config.num_heads,
        room=16 * rows * sizes.row,
        moves_more=_read_by_each_core(sizes, 1),
        spills_more=_FEWER_SPILLS if sizes.target.kind.startswith(_SPILLING) else None,
        example=lambda: (
            *(np.zeros(x.shape, x.dtype) for x in (q, new, new)),
            np.full(1, rows - BLOCK, np.int32),
        ),
    )  # fmt: skip


def _pages_example(args: tuple[Any, ...], *, at: int) -> tuple[Any, ...]:
    """Tables of pages that all differ, and every new token seen."""
    q, pages, table, _, _, new, _, start = args
    keys = 2 * np.arange(math.prod(table.shape), dtype=np.int32).reshape(table.shape)
    pool = np.zeros((2 * keys.size, *pages.shape[1:]), pages.dtype)
    rows = np.zeros(new.shape, new.dtype)
    return (
        np.zeros(q.shape, q.dtype), pool, keys, keys + 1,
        np.full(table.shape, CHUNK, np.int32), rows, rows, np.full(start.shape, at, np.int32),
    )  # fmt: skip


def _score(kind: str) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        def scored(q: Array, probe: Probe, num_tokens: Array, q_lengths: Array) -> Array:
            return score(
                q, probe, num_tokens=num_tokens, q_lengths=q_lengths, chunk_tokens=CHUNK,
                target=sizes.target,
            )  # fmt: skip

        length = SUFFIX if kind == "keys" else 4
        q, probe = sizes.queries(1, length), sizes.probe(kind, sizes.chunks * CHUNK)
        return Program(
            jitted=jax.jit(scored), args=(q, probe, ints(), ints(1)), kernels=1,
            tokens=length, must_read=nbytes((q, probe)) + 4 * sizes.chunks,
            example=lambda: (
                *jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (q, probe)),
                np.int32(PREFIX), np.full(1, length, np.int32),
            ),
        )  # fmt: skip

    return program


def _gather(unit: str) -> Callable[[Sizes], Program]:
    """A baseline's pages of 64 tokens, all of a layer's keys; or 256 single tokens."""

    def program(sizes: Sizes) -> Program:
        pool = sizes.pool(layers=1, kinds=1, chunk=BASELINE_CHUNK)
        count = -(-PREFIX // BASELINE_CHUNK)
        shape = (pool.shape[0], BASELINE_CHUNK, sizes.row)
        if unit == "tokens":
            shape, count = (pool.shape[0] * BASELINE_CHUNK, sizes.row), BASELINE_TOKENS
        table = np.arange(count, dtype=np.int32)[None]
        whole = "copies on a TPU move whole tiles of rows, 16 of them in 16 bits"
        return Program(
            jitted=jax.jit(partial(gather, target=sizes.target)),
            args=(abstract(shape), ints(1, count)), kernels=1, tokens=0,
            big=(pool.shape,), must_read=2 * count * math.prod(shape[1:]) * _ITEM,
            example=lambda: (np.zeros((1024, *shape[1:]), pool.dtype), table),
            moves_more=whole if unit == "tokens" and sizes.target.platform == "tpu" else None,
        )  # fmt: skip

    return program


KERNELS: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        "kernel-attend": _attend(1, SUFFIX, SUFFIX),
        "kernel-attend-b8": _attend(8, SUFFIX, SUFFIX),
        "kernel-attend-decode": _attend(1, 1, WINDOW_ROWS),
        "kernel-attend-rows": _attend_rows,
        **{f"kernel-score-{kind}": _score(kind) for kind in ("keys", "int4")},
        "kernel-gather": _gather("pages"),
        "kernel-gather-tokens": _gather("tokens"),
    }
)
"""By name."""
