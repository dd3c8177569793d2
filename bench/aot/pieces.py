"""Contexts that go through in parts, and the buffers of decode batches, as programs to compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from bench.aot.shapes import BLOCK, CALL_LAYERS, SUFFIX, WINDOW_ROWS, Program, Sizes, ints, of
from ckv_jax.decode.decoder import KvRows
from ckv_jax.model.shardings import HEADS
from ckv_jax.pipeline.pieces import OpenLayer, Pieces
from ckv_jax.pipeline.prefill import PIECE_BLOCKS

ROWS = np.arange(4, dtype=np.int32)


def _open(sizes: Sizes) -> Program:
    own = Pieces(sizes.layers)
    return of(sizes, lambda: own.open(0, sizes.hidden(1, SUFFIX), ints(1)), tokens=SUFFIX)


def _part(sizes: Sizes, length: int = SUFFIX) -> OpenLayer:
    q, k = sizes.queries(1, length), sizes.rows(1, length)
    out, lse = (sizes.split(shape, jnp.float32, HEADS) for shape in (q.shape, q.shape[:3]))
    return OpenLayer(q, k, k, out, lse)


def _over_pages(sizes: Sizes) -> Program:
    pool, chosen = sizes.pool(), sizes.chosen
    return of(
        sizes,
        lambda: Pieces(sizes.layers).over_pages(
            _part(sizes), 0, pool, ints(1, chosen), ints(1, chosen)
        ),
        kernels=1,
        tokens=SUFFIX,
        big=(pool.shape,),
    )


def _over_rows(length: int) -> Callable[[Sizes], Program]:
    """A suffix, or a block of a text longer than the window, over a piece of what is before it."""

    def program(sizes: Sizes) -> Program:
        keys = sizes.rows(1, PIECE_BLOCKS * BLOCK)
        return of(
            sizes,
            lambda: Pieces(sizes.layers).over_rows(_part(sizes, length), keys, keys),
            kernels=1,
            tokens=length,
            room=8 * PIECE_BLOCKS * BLOCK * sizes.row,
        )

    return program


def _join(sizes: Sizes) -> Program:
    """Blocks that become a piece."""
    blocks = [sizes.rows(1, BLOCK)] * PIECE_BLOCKS
    rows = PIECE_BLOCKS * BLOCK
    return of(sizes, lambda: Pieces(sizes.layers).join(blocks, rows), tokens=0)


def _insert(sizes: Sizes) -> Program:
    buffer = sizes.rows(1, WINDOW_ROWS)
    own = Pieces(sizes.layers)
    return of(sizes, lambda: own.insert((buffer, buffer), _part(sizes), ints(1)), tokens=SUFFIX)


def _close(sizes: Sizes) -> Program:
    own = Pieces(sizes.layers)
    hidden = sizes.hidden(1, SUFFIX)
    return of(sizes, lambda: own.close(0, hidden, _part(sizes)), kernels=1, sums=2, tokens=SUFFIX)


def _grow(sizes: Sizes) -> Program:
    """A batch of decode buffers to twice the rows."""
    buffer = sizes.rows(8, WINDOW_ROWS)
    own = KvRows(sizes.layers)
    kv = ((buffer, buffer),) * CALL_LAYERS
    return of(sizes, lambda: own.resize(kv, 2 * WINDOW_ROWS), tokens=0)


def _pick(sizes: Sizes) -> Program:
    """One sequence out of such a batch."""
    many, own = sizes.rows(8, WINDOW_ROWS), KvRows(sizes.layers)
    return of(sizes, lambda: own.pick(((many, many),) * CALL_LAYERS, 0, WINDOW_ROWS), tokens=0)


def _take(sizes: Sizes) -> Program:
    """Half of its sequences."""
    many, own = sizes.rows(8, WINDOW_ROWS), KvRows(sizes.layers)
    return of(sizes, lambda: own.take(((many, many),) * CALL_LAYERS, ROWS), tokens=0)


def _keep(sizes: Sizes) -> Program:
    """What one of them has generated, to be stored."""
    many, own = sizes.rows(8, WINDOW_ROWS), KvRows(sizes.layers)
    return of(sizes, lambda: own.read(((many, many),) * CALL_LAYERS, 0, 0, 1), tokens=0)


def _put(sizes: Sizes) -> Program:
    """One sequence into a batch of decode buffers."""
    many, one = sizes.rows(8, WINDOW_ROWS), sizes.rows(1, WINDOW_ROWS)
    own = KvRows(sizes.layers)
    return of(
        sizes,
        lambda: own.put(((many, many),) * CALL_LAYERS, ((one, one),) * CALL_LAYERS, 0),
        tokens=0,
    )


PIECES: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        "pieces-open": _open,
        "pieces-pages": _over_pages,
        "pieces-rows": _over_rows(SUFFIX),
        "pieces-earlier": _over_rows(BLOCK),
        "pieces-join": _join,
        "pieces-insert": _insert,
        "pieces-close": _close,
        "buffers-grow": _grow,
        "buffers-put": _put,
        "buffers-pick": _pick,
        "buffers-take": _take,
        "buffers-keep": _keep,
    }
)
"""By name."""
