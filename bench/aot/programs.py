"""Every program of a request, as the engine itself calls it: functions to lower, arrays as shapes.

A program is caught on its way: the engine's own caller is called with shapes in place of arrays,
and what it would have run is handed over instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from bench.aot.shapes import (
    CALL_LAYERS,
    CHUNK,
    PACK,
    PREFIX,
    PROBES,
    RIVAL_CHUNK,
    SUFFIX,
    Sizes,
    abstract,
    ints,
)  # fmt: skip
from ckv_jax.kernels_pallas.gather.api import gather
from ckv_jax.memory import device
from ckv_jax.pipeline.kv_rows import KvRows
from ckv_jax.pipeline.pieces import Part, Pieces
from ckv_jax.pipeline.prefill import Prefills, context_bucket
from ckv_jax.rivals.layers import RivalLayers
from ckv_jax.selection.chunks import attention_mass

BLOCK = 512
WINDOW_ROWS = 64
"""Rows of a decode buffer when it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One function and the shapes it is compiled for."""

    jitted: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    kernels: int = 0
    """How many kernels it calls: what a device should run by a kernel of ours."""
    tokens: int
    """New tokens that it computes, all rows together."""
    room: int = 0
    """Bytes of temporary arrays that its own arithmetic needs beside those of a layer."""
    big: tuple[tuple[int, ...], ...] = ()
    """Shapes of arrays that must never be copied: the pool, and what is donated."""
    must_read: int | None = None
    """Of one kernel by itself: bytes that it has to read and write."""
    whole_model: float = 1.0
    """Donated buffers of the whole model over those of this call."""
    example: Callable[[], tuple[Any, ...]] | None = None
    """Arrays to count its traffic with."""
    pinned: bool = False
    """The arguments lie in pinned host memory."""


class _Caught(Exception):
    """Carries what was about to run."""


def caught(sizes: Sizes, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The jitted function that `call` would run, with its arguments."""

    def watcher(_: str, jitted: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        raise _Caught(jitted, args, named)

    with sizes.layers.programs.watch(watcher):
        try:
            call()
        except _Caught as found:
            jitted, args, named = found.args
            return jitted, args, named
    raise AssertionError("the caller ran nothing")


def _of(sizes: Sizes, call: Callable[[], Any], **facts: Any) -> Program:
    jitted, args, named = caught(sizes, call)
    return Program(jitted=jitted, args=args, named=named, **facts)


def _embed(sizes: Sizes) -> Program:
    return _of(sizes, lambda: sizes.layers.embed(ints(1, SUFFIX)), tokens=SUFFIX)


def _head(sizes: Sizes) -> Program:
    hidden = sizes.hidden(1, SUFFIX)
    room = 8 * sizes.config.vocab_size
    return _of(sizes, lambda: sizes.layers.head(hidden, ints(1)), tokens=1, room=room)


def _select(kind: str) -> Callable[[Sizes], Program]:
    """Full keys as `contiguous-kv` selects, digests as `ckv` does."""

    def program(sizes: Sizes) -> Program:
        layers = [0] if kind == "keys" else [0, 1, 2]
        tokens = sizes.chunks * CHUNK
        window = None if kind == "keys" else 4
        probes = [sizes.probe(kind, tokens) for _ in layers]
        return _of(
            sizes,
            lambda: sizes.layers.select(
                layers, sizes.hidden(1, SUFFIX), ints(1), ints(1), probes, ints(), ints(), ints(1),
                score=attention_mass, n=sizes.chosen, window=window, chunk_tokens=CHUNK,
            ),
            kernels=len(layers),
            tokens=SUFFIX,
            room=8 * tokens * sizes.config.num_heads * (window or SUFFIX) // 16,
        )  # fmt: skip

    return program


def _run(batch: int) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        pool, slots = sizes.pool(), ints(CALL_LAYERS // PACK, batch, sizes.chosen)
        return _of(
            sizes,
            lambda: sizes.layers.run(
                range(CALL_LAYERS), sizes.hidden(batch, SUFFIX), ints(batch), pool, slots,
                ints(batch, sizes.chosen),
            ),
            kernels=CALL_LAYERS,
            tokens=batch * SUFFIX,
            big=(pool.shape,),
        )  # fmt: skip

    return program


def _decode(batch: int) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        pool, slots = sizes.pool(), ints(CALL_LAYERS // PACK, batch, sizes.chosen)
        buffer = sizes.rows(batch, WINDOW_ROWS)
        return _of(
            sizes,
            lambda: sizes.layers.extend(
                range(CALL_LAYERS), sizes.hidden(batch, 1), ints(batch),
                ((buffer, buffer),) * CALL_LAYERS, ints(batch), pool, slots,
                ints(batch, sizes.chosen), context=WINDOW_ROWS,
            ),
            kernels=CALL_LAYERS,
            tokens=batch,
            big=(pool.shape,),
            whole_model=sizes.config.num_layers / CALL_LAYERS,
        )  # fmt: skip

    return program


def _prefill(sizes: Sizes) -> Program:
    own = Prefills(sizes.layers, block=BLOCK, window=8192)
    rows = context_bucket(PREFIX, BLOCK)
    buffer = sizes.rows(1, rows)
    return _of(
        sizes,
        lambda: sizes.layers.extend(
            range(CALL_LAYERS), sizes.hidden(1, BLOCK), ints(1), ((buffer, buffer),) * CALL_LAYERS,
            ints(1), abstract(own.no_pages.shape), ints(*own.no_slots.shape),
            ints(*own.no_lengths.shape), context=rows,
        ),
        kernels=CALL_LAYERS,
        tokens=BLOCK,
        room=16 * rows * math.prod(sizes.row),
        whole_model=sizes.config.num_layers / CALL_LAYERS,
    )  # fmt: skip


def _join(sizes: Sizes) -> Program:
    own = Prefills(sizes.layers, block=BLOCK, window=8192)
    buffer = sizes.rows(1, context_bucket(PREFIX, BLOCK))
    buffers = ((buffer, buffer),) * CALL_LAYERS
    return _of(sizes, lambda: own.join((), buffers, ints(), block=BLOCK), tokens=BLOCK)


def _write(sizes: Sizes, *, pinned: bool = False) -> Program:
    pool, fresh = sizes.pool(), abstract((16, *sizes.pack()))
    return Program(
        jitted=jax.jit(device._write, donate_argnums=0),
        args=(pool, fresh, ints(16)),
        named={},
        tokens=0,
        big=(pool.shape,),
    )


def _read(sizes: Sizes) -> Program:
    pool = sizes.pool()
    jitted = jax.jit(lambda pages, slots: pages[slots])
    return Program(jitted=jitted, args=(pool, ints(16)), named={}, tokens=0, big=(pool.shape,))


def _stage(sizes: Sizes) -> Program:
    """A block of packs from pinned host memory."""
    fresh = abstract((16, *sizes.pack()))
    onto = jax.memory.Space.Device
    jitted = jax.jit(lambda rows: jax.device_put(rows, onto))
    return Program(jitted=jitted, args=(fresh,), named={}, tokens=0, pinned=True)


def _gather(sizes: Sizes) -> Program:
    pool = sizes.pool(layers=1, kinds=1, chunk=RIVAL_CHUNK)
    table = ints(1, -(-PREFIX // RIVAL_CHUNK))
    return Program(
        jitted=jax.jit(partial(gather, target=sizes.target)),
        args=(pool, table),
        named={},
        kernels=1,
        tokens=0,
        big=(pool.shape,),
    )


def _open(sizes: Sizes) -> Program:
    own = Pieces(sizes.layers)
    return _of(sizes, lambda: own.open(0, sizes.hidden(1, SUFFIX), ints(1)), tokens=SUFFIX)


def _part(sizes: Sizes) -> Part:
    q, k = sizes.queries(1, SUFFIX), sizes.rows(1, SUFFIX)
    out, lse = abstract(q.shape, jnp.float32), abstract(q.shape[:3], jnp.float32)
    return Part(q, k, k, out, lse)


def _over_pages(sizes: Sizes) -> Program:
    pool, chosen = sizes.pool(), sizes.chosen
    return _of(
        sizes,
        lambda: Pieces(sizes.layers).over_pages(
            _part(sizes), 0, pool, ints(1, chosen), ints(1, chosen)
        ),
        kernels=1,
        tokens=SUFFIX,
        big=(pool.shape,),
    )


def _over_rows(sizes: Sizes) -> Program:
    keys = sizes.rows(1, 4 * BLOCK)
    return _of(
        sizes,
        lambda: Pieces(sizes.layers).over_rows(_part(sizes), keys, keys),
        kernels=1,
        tokens=SUFFIX,
        room=8 * 4 * BLOCK * math.prod(sizes.row),
    )


def _insert(sizes: Sizes) -> Program:
    buffer = sizes.rows(1, WINDOW_ROWS)
    own = Pieces(sizes.layers)
    return _of(sizes, lambda: own.insert((buffer, buffer), _part(sizes), ints(1)), tokens=SUFFIX)


def _close(sizes: Sizes) -> Program:
    own = Pieces(sizes.layers)
    hidden = sizes.hidden(1, SUFFIX)
    return _of(sizes, lambda: own.close(0, hidden, _part(sizes)), kernels=1, tokens=SUFFIX)


def _grow(sizes: Sizes) -> Program:
    """A batch of decode buffers to twice the rows."""
    buffer = sizes.rows(8, WINDOW_ROWS)
    own = KvRows(sizes.layers)
    kv = ((buffer, buffer),) * CALL_LAYERS
    return _of(sizes, lambda: own.resize(kv, 2 * WINDOW_ROWS), tokens=0)


def _put(sizes: Sizes) -> Program:
    """One sequence into a batch of decode buffers."""
    many, one = sizes.rows(8, WINDOW_ROWS), sizes.rows(1, WINDOW_ROWS)
    own = KvRows(sizes.layers)
    return _of(
        sizes,
        lambda: own.put(((many, many),) * CALL_LAYERS, ((one, one),) * CALL_LAYERS, 0),
        tokens=0,
    )


def _rival(name: str) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        own = RivalLayers(sizes.layers)
        pool = sizes.pool(layers=1, kinds=1, chunk=RIVAL_CHUNK)
        chunks = -(-PREFIX // RIVAL_CHUNK)
        tokens, chosen = chunks * RIVAL_CHUNK, 256
        hidden, k = sizes.hidden(1, SUFFIX), sizes.rows(1, SUFFIX)
        qkv = (sizes.queries(1, SUFFIX), k, k)
        table = ints(chunks)
        calls: dict[str, tuple[int, Callable[[], Any]]] = {
            "project": (0, lambda: own.project(0, hidden, ints(1))),
            "by-keys": (
                1, lambda: own.choose_by_keys(qkv, ints(1), pool, table, ints(), ints(1), n=chosen),
            ),
            "by-probe": (
                0,
                lambda: own.choose_by_probe(
                    qkv, ints(1), abstract((tokens, min(3, sizes.row[0]), sizes.row[1])), ints(),
                    ints(1), n=chosen, chunk_tokens=RIVAL_CHUNK,
                ),
            ),
            "attend-tokens": (
                1,
                lambda: own.attend_tokens(0, hidden, qkv, pool, table, table, ints(1, chosen)),
            ),
            "attend-all": (
                1, lambda: own.attend_all(0, hidden, ints(1), pool, table, table, table)
            ),
        }  # fmt: skip
        kernels, call = calls[name]
        scores = 16 * sizes.config.num_heads * SUFFIX * tokens  # float32, a few of them at a time
        room = scores if name.startswith("by") else 0
        return _of(sizes, call, kernels=kernels, tokens=SUFFIX, big=(pool.shape,), room=room)

    return program


PROGRAMS: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        "embed": _embed,
        "head": _head,
        **{f"select-{kind}": _select(kind) for kind in PROBES},
        "run": _run(1),
        "run-b8": _run(8),
        "decode": _decode(1),
        "decode-b8": _decode(8),
        "prefill": _prefill,
        "prefill-rows": _join,
        "pool-write": _write,
        "pool-read": _read,
        "stage": _stage,
        "pieces-open": _open,
        "pieces-pages": _over_pages,
        "pieces-rows": _over_rows,
        "pieces-insert": _insert,
        "pieces-close": _close,
        "buffers-grow": _grow,
        "buffers-put": _put,
        "rival-gather": _gather,
        **{
            f"rival-{name}": _rival(name)
            for name in ("project", "by-keys", "by-probe", "attend-tokens", "attend-all")
        },
    }
)
"""By name, in a request's order."""
