"""Every program of a request: functions to lower, arrays as shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from bench.aot.baselines import BASELINES
from bench.aot.choosing import CHOOSING
from bench.aot.pieces import PIECES
from bench.aot.shapes import (
    BLOCK,
    CALL_LAYERS,
    CALLS,
    CHUNK,
    DTYPE,
    LANDMARKS,
    PACK,
    PROBES,
    SUFFIX,
    WINDOW_ROWS,
    Program,
    Sizes,
    abstract,
    ints,
    of,
)
from ckv_jax.config import layout_of
from ckv_jax.model.shardings import PAGES
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefill import Prefills
from ckv_jax.pipeline.resident import PackMap, Resident, Selector, stack
from ckv_jax.prefix import pools as device
from ckv_jax.prefix.landing import decoding
from ckv_jax.selection.base import Rule, Selection, Share
from ckv_jax.selection.select import Coarse, Stages
from ckv_jax.storage.codec import CODECS
from ckv_jax.storage.layout import PLAIN
from ckv_jax.systems import preset


def _embed(sizes: Sizes) -> Program:
    return of(sizes, lambda: sizes.layers.embed(ints(1, SUFFIX)), tokens=SUFFIX)


def _head(sizes: Sizes) -> Program:
    hidden = sizes.hidden(1, SUFFIX)
    room = 8 * sizes.config.vocab_size
    return of(
        sizes, lambda: sizes.layers.head(hidden, ints(1)), tokens=1, room=room,
        gathers="the largest of the logits, of which each device has some rows",
    )  # fmt: skip


def _select(kind: str) -> Callable[[Sizes], Program]:
    """Full keys as `contiguous-kv` selects, digests as `ckv` does, landmarks as baselines of long
    decode do."""

    def program(sizes: Sizes) -> Program:
        digest = kind in ("int4", "pq")
        layers = [0, 1] if digest else [0]
        tokens = sizes.chunks * CHUNK
        window = None if kind == "keys" else 16
        probes = [sizes.probe(kind, tokens) for _ in layers]
        return of(
            sizes,
            lambda: sizes.layers.select(
                sizes.layers.scorer(layers, probes), sizes.hidden(1, SUFFIX), ints(1), ints(1),
                ints(), ints(), ints(1),
                Rule(n=sizes.chosen, chunk_tokens=CHUNK, window=window, peaks=digest),
                Share(abstract((1,), jnp.float32), ints(1)),
            ),
            kernels=sizes.scores(kind, len(layers)),
            sums=1,
            tokens=SUFFIX,
            room=8 * tokens * sizes.config.num_heads * (window or SUFFIX) // 16,
        )  # fmt: skip

    return program


def _select_in_two_stages(batch: int) -> Callable[[Sizes], Program]:
    """What a coarse pass over an int4 digest leaves, scored by all queries; `batch` rows of which
    one has everything scored."""

    def program(sizes: Sizes) -> Program:
        layers, tokens = [0, 1], sizes.chunks * CHUNK
        stages = Stages(Coarse(), 64, batch > 1)
        return of(
            sizes,
            lambda: sizes.layers.select(
                sizes.layers.scorer(layers, [sizes.probe("int4", tokens) for _ in layers]),
                sizes.hidden(batch, SUFFIX), ints(batch), ints(batch), ints(), ints(), ints(batch),
                Rule(n=sizes.chosen, chunk_tokens=CHUNK, window=4, peaks=True, stages=stages),
                Share(abstract((batch,), jnp.float32), ints(batch)),
            ),
            kernels=1 + sizes.scores("int4", len(layers)) * (1 + stages.some_whole),
            sums=2 + stages.some_whole,
            tokens=batch * SUFFIX,
            room=8 * batch * tokens * sizes.config.num_heads * 4 // 16,
        )  # fmt: skip

    return program


def _run(batch: int) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        pool, tables = sizes.pool(), ints(CALL_LAYERS // PACK + 1, batch, sizes.chosen)
        return of(
            sizes,
            lambda: sizes.layers.run(
                range(CALL_LAYERS), sizes.hidden(batch, SUFFIX), ints(batch), pool, tables
            ),
            kernels=CALL_LAYERS,
            sums=2 * CALL_LAYERS,
            tokens=batch * SUFFIX,
            big=(pool.shape,),
        )  # fmt: skip

    return program


def _period(sizes: Sizes) -> Program:
    """A period of a request over packs that are on the device, in one call, with the queries that
    are cut and the table that is looked up."""
    system, layers, tokens = preset("ckv"), sizes.layers, sizes.chunks * CHUNK
    plan = Plan.of(PACK, system)
    scorer = layers.scorer(range(PACK), [sizes.probe("int4", tokens) for _ in range(PACK)])
    rule = Rule(n=sizes.chosen, chunk_tokens=CHUNK, window=16, peaks=True, always=system.always)
    one, pool = ints(1), sizes.pool()
    selector = Selector(
        start=one, lengths=one, skipped=one, rows=one, none=one, tokens=ints(), chunks=ints(),
        limits=one, share=Share(abstract((1,), jnp.float32), one), rule=rule, shape=(1, 16),
    )  # fmt: skip
    with patch.object(layers, "put", lambda array: ints(*np.shape(array))):
        resident = Resident(layers, cast(Any, None), plan)  # of no tiers
    where = PackMap(ints(1, 1, sizes.chunks), ints(1, sizes.chunks))
    return of(
        sizes,
        lambda: resident.period(
            0, scorer, selector, sizes.hidden(1, SUFFIX), one, pool, where, ints(), sizes.chosen,
            CALLS,
        ),
        kernels=PACK + sizes.scores("int4", PACK),
        sums=2 * PACK + 1,
        tokens=SUFFIX,
        room=8 * tokens * sizes.config.num_heads,
        big=(pool.shape,),
    )  # fmt: skip


def _stack(sizes: Sizes) -> Program:
    """What all periods of a request selected, in one record."""
    together, n = sizes.layers.programs.jit(stack), sizes.chosen
    floats = [abstract(shape, jnp.float32) for shape in ((1, n), (1,), (1, sizes.chunks))]
    found = (Selection(ints(1, n), *floats),) * -(-sizes.config.num_layers // PACK)
    return of(sizes, lambda: together(found), tokens=0)


def _decode(batch: int) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        pool, tables = sizes.pool(), ints(CALL_LAYERS // PACK + 1, batch, sizes.chosen)
        buffer = sizes.rows(batch, WINDOW_ROWS)
        return of(
            sizes,
            lambda: sizes.layers.extend(
                range(CALL_LAYERS), sizes.hidden(batch, 1), ints(batch),
                ((buffer, buffer),) * CALL_LAYERS, ints(batch), pool, tables,
                context=WINDOW_ROWS,
            ),
            kernels=CALL_LAYERS,
            sums=2 * CALL_LAYERS,
            tokens=batch,
            big=(pool.shape,),
            whole_model=sizes.config.num_layers / CALL_LAYERS,
        )  # fmt: skip

    return program


def _prefill(sizes: Sizes) -> Program:
    own = Prefills(sizes.layers, block=BLOCK, window=sizes.prefill_window)
    rows = sizes.prefill_rows
    buffer = sizes.rows(1, rows)
    return of(
        sizes,
        lambda: sizes.layers.extend(
            range(CALL_LAYERS), sizes.hidden(1, BLOCK), ints(1), ((buffer, buffer),) * CALL_LAYERS,
            ints(1), sizes.split(own.no_pages_shape, DTYPE, PAGES), ints(*own.no_tables.shape),
            context=rows,
        ),
        kernels=CALL_LAYERS,
        sums=2 * CALL_LAYERS,
        tokens=BLOCK,
        room=16 * rows * sizes.row,
        whole_model=sizes.config.num_layers / CALL_LAYERS,
    )  # fmt: skip


def _join(sizes: Sizes) -> Program:
    own = Prefills(sizes.layers, block=BLOCK, window=sizes.prefill_window)
    buffer = sizes.rows(1, sizes.prefill_rows)
    buffers = ((buffer, buffer),) * CALL_LAYERS
    return of(sizes, lambda: own.join(buffers, ints(), block=BLOCK), tokens=BLOCK)


def _write(sizes: Sizes) -> Program:
    pool, fresh = sizes.pool(), sizes.split((16, *sizes.pack()), DTYPE, PAGES)
    jitted, args = jax.jit(device._write, donate_argnums=0), (pool, fresh, ints(16))
    return Program(jitted=jitted, args=args, tokens=0, big=(pool.shape,))


def _read(sizes: Sizes) -> Program:
    pool = sizes.pool()
    jitted = jax.jit(lambda pages, slots: pages[slots])
    return Program(jitted=jitted, args=(pool, ints(16)), tokens=0, big=(pool.shape,))


def _stage(sizes: Sizes) -> Program:
    """A block of packs from pinned host memory."""
    fresh = abstract((16, *sizes.pack()))
    onto = jax.memory.Space.Device
    jitted = jax.jit(lambda rows: jax.device_put(rows, onto))
    return Program(jitted=jitted, args=(fresh,), tokens=0, pinned=True)


def _unpack(codec: str) -> Callable[[Sizes], Program]:
    """A block of packs from what a codec left on the disk."""

    def program(sizes: Sizes) -> Program:
        system = preset("ckv", codec=codec)
        layout, coder = layout_of(system, sizes.config, DTYPE), system.coder
        assert coder is not None
        stored = abstract((16, *layout.stored_shape), jnp.uint8)
        room = 16 * 4 * 3 * math.prod(sizes.pack())  # float32, a few of them at a time
        return Program(jitted=decoding(coder, layout), args=(stored,), tokens=0, room=room)

    return program


PROGRAMS: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        "embed": _embed,
        "head": _head,
        **{f"select-{kind}": _select(kind) for kind in (*PROBES, *LANDMARKS)},
        "select-coarse": _select_in_two_stages(1),
        "select-coarse-b8": _select_in_two_stages(8),
        "run": _run(1),
        "run-b8": _run(8),
        "period": _period,
        "stack": _stack,
        "decode": _decode(1),
        "decode-b8": _decode(8),
        "prefill": _prefill,
        "prefill-rows": _join,
        "pool-write": _write,
        "pool-read": _read,
        "stage": _stage,
        **{f"unpack-{name}": _unpack(name) for name in CODECS if name != PLAIN},
        **PIECES,
        **CHOOSING,
        **BASELINES,
    }
)
"""By name, in a request's order."""

SPLIT = tuple(name for name in PROGRAMS if name not in BASELINES and name != "stage")
"""Those that are compiled for several devices, too."""
