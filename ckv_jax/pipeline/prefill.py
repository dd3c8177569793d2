"""Dense prefill in blocks, for ingest, recompute and the recovery of bad chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.shardings import HEADS, PAGES
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.pieces import Pieces

STEP_LAYERS = 4
LONGER_BLOCKS = 3  # that buffers may be longer than what they have to hold


class Earlier(Protocol):
    """Keys and values of tokens ahead of a prefill, wherever they are kept."""

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        """[layers, 2, stop - first, K, D] of positions [first, stop), as the store keeps them."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block's outcome. `kv` may still be being computed when it is handed out."""

    first: int
    """Position of the block's first token."""
    length: int
    kv: Array | np.ndarray
    """[L, 2, block, K*D] in the pool's element type; rows past `length` mean nothing."""
    hidden: Array
    """[1, block, E] after the last layer."""
    head_dim: int

    def tokens_kv(self, dtype: np.dtype) -> np.ndarray:
        """[L, 2, length, K, D] as elements of `dtype`, in host memory; waits for it."""
        kv: np.ndarray = np.asarray(self.kv)[:, :, : self.length].view(dtype)
        return kv.reshape(*kv.shape[:3], -1, self.head_dim)


def context_bucket(tokens: int, block: int) -> int:
    """Rows of the key buffer that are attended: block times a power of two."""
    blocks = -(-tokens // block)
    return block * (1 << (blocks - 1).bit_length())


def window_within(
    room_bytes: int | None, window: int, config: ModelConfig, *, block: int, itemsize: int,
    devices: int = 1,
) -> int:  # fmt: skip
    """Tokens of a prefill's window: `window`, or fewer where a device has room for fewer.

    Args:
      room_bytes: of each device, beside weights and pool; None: not known, `window` it is.
      itemsize: bytes of an element of keys and values.
      devices: over how many a model of this `config` is split.

    A block's arithmetic is taken to need float32 rows as wide as the layer's widest, and buffers to
    be up to three blocks longer than the window. One block at least, room or not.
    """
    if room_bytes is None:
        return window
    widest = config.intermediate_size + config.num_heads * config.head_dim
    arithmetic = 4 * block * 2 * (widest // devices + config.hidden_size)
    row = config.num_kv_heads * config.head_dim // devices
    token = 2 * config.num_layers * row * itemsize
    blocks = (room_bytes - arithmetic) // (token * block) - LONGER_BLOCKS
    return min(window, max(1, blocks) * block)


class Prefills:
    """Makes dense prefills over one model: `block` tokens per call, four layers per call."""

    def __init__(self, layers: Layers, *, block: int, window: int) -> None:
        self.layers = layers
        self.block = block
        self.window = -(-window // block) * block
        self.pieces = Pieces(layers)
        config = layers.config
        self.head_dim = config.head_dim
        self.row = config.num_kv_heads * config.head_dim
        every = range(layers.num_layers)
        self.steps = [every[i : i + STEP_LAYERS] for i in every[::STEP_LAYERS]]
        self.no_tables = np.zeros((2, 1, 0), np.int32)
        self.join = layers.programs.jit(_join, static=("block",))

    @classmethod
    def within(cls, room_bytes: int | None, layers: Layers, *, block: int, window: int) -> Prefills:
        """With a window that devices with so much room can hold, see `window_within`."""
        fits = window_within(
            room_bytes, window, layers.config, block=block, itemsize=layers.kv_dtype.itemsize,
            devices=layers.shardings.size,
        )  # fmt: skip
        return cls(layers, block=block, window=fits)

    @cached_property
    def no_pages(self) -> Array:
        """A pool of one slot that nothing attends to."""
        nothing = np.zeros(self.no_pages_shape, self.layers.kv_dtype)
        pages: Array = self.layers.shardings.put(nothing, PAGES)
        return pages

    @property
    def no_pages_shape(self) -> tuple[int, ...]:
        """Of that pool."""
        return 1, STEP_LAYERS, 2, 1, self.row

    def begin(
        self,
        tokens: np.ndarray,
        *,
        start: int = 0,
        earlier: Earlier | None = None,
        bounded: bool = True,
    ) -> Prefill:
        """The prefill of `tokens` int32 [n], n >= 1, at positions from `start` on.

        `earlier` has the KV of what is before them, and, if `bounded`, of each block past `window`
        tokens by the time the next is computed: it is read back from there.
        """
        return Prefill(self, tokens, start, earlier, bounded)


class Prefill:
    """One sequence's dense causal prefill, a block at a time. Engine thread only.

    Device memory holds the KV of `window` tokens at most. A text that fits goes four layers at a
    time, over buffers. Each block of a longer one, from the first on, attends to those tokens and
    then to the others, which are read back, in pieces that are merged by their log-sum-exp: so it
    needs no programs of both kinds, of which the former are the larger.
    """

    def __init__(
        self,
        own: Prefills,
        tokens: np.ndarray,
        start: int,
        earlier: Earlier | None,
        bounded: bool,
    ) -> None:
        self._own = own
        self._tokens = tokens
        self._start = start
        self._earlier = earlier
        self._next = start
        self.total = start + len(tokens)
        block = own.block
        self._window = own.window if bounded else self.total
        rows = context_bucket(max(self.total, start + block), block)
        longest = own.window + block if bounded else self.total + LONGER_BLOCKS * block
        self._rows = min(rows, longest)
        self._window_kv: KeptWindow | None = None
        self._buffers: list[LayerKv] = []
        if self.total > self._window:
            self._window_kv = self._kept()
        else:
            self._buffers = [self._buffer(layers) for layers in own.steps]

    @property
    def done(self) -> bool:
        """Whether every token has been computed."""
        return self._next == self.total

    @property
    def needs(self) -> int:
        """Tokens whose KV `earlier` has to have before the next block can be computed."""
        return self._next if self._next >= self._window else min(self._start, self._next)

    @property
    def kv(self) -> LayerKv:
        """Each layer's (K, V) [1, R, K*D] so far, of a prefill that fits the window."""
        return tuple(pair for step in self._buffers for pair in step)

    def advance(self) -> Block:
        """Computes the next block; blocks end where multiples of the block size do."""
        own, first = self._own, self._next
        stop = min(self.total, (first // own.block + 1) * own.block)
        padded = np.zeros((1, own.block), np.int32)
        padded[0, : stop - first] = self._tokens[first - self._start : stop - self._start]
        hidden = own.layers.embed(padded)
        at = np.array([first], np.int32)
        kv: Array | np.ndarray
        if self._window_kv is not None:
            kv, hidden = self._extend_pieces(hidden, at, self._window_kv)
        else:
            kv, hidden = self._extend_block(hidden, at)
        self._next = stop
        return Block(first, stop - first, kv, hidden, own.head_dim)

    def _extend_block(self, hidden: Array, at: np.ndarray) -> tuple[Array, Array]:
        own, first = self._own, int(at[0])
        context = min(context_bucket(first + own.block, own.block), self._rows)
        new = []
        for step, layers in enumerate(own.steps):
            hidden, self._buffers[step] = own.layers.extend(
                layers, hidden, at, self._buffers[step], at, own.no_pages, own.no_tables,
                context=context,
            )  # fmt: skip
            new.append(own.join(self._buffers[step], at[0], block=own.block))
        return jnp.concatenate(new), hidden

    def _extend_pieces(
        self, hidden: Array, at: np.ndarray, kept: KeptWindow
    ) -> tuple[np.ndarray, Array]:
        own, first = self._own, int(at[0])
        new = []
        for layer in range(own.layers.num_layers):
            before = part = own.pieces.open(layer, hidden, at)
            for rows in kept.rows(layer):
                before, part = part, own.pieces.over_rows(part, *rows)
            for piece in spans(self._window, first, own.block):
                earlier = self._read(layer, *piece)  # while others compute
                before.out.block_until_ready()  # else pieces of any number pile up in memory
                before, part = part, own.pieces.over_rows(part, *earlier)
            hidden = own.pieces.close(layer, hidden, part)
            if first < self._window:
                kept.add(layer, part.k, part.v)
            new.append(np.stack([np.asarray(part.k)[0], np.asarray(part.v)[0]]))
        return np.stack(new), hidden

    def _kept(self) -> KeptWindow:
        """KV before the first token, within the window."""
        own, ahead = self._own, min(self._start, self._window)
        kept = KeptWindow(own.pieces, own.layers.num_layers, own.block)
        for layer in range(own.layers.num_layers):
            for piece in spans(0, ahead, own.block):
                keys, values = self._read(layer, *piece)
                put = own.layers.shardings.put
                kept.keep(layer, put(keys, HEADS), put(values, HEADS))
        return kept

    def _read(self, layer: int, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(K, V) [1, n, K*D] of one layer, from where earlier tokens are kept."""
        assert self._earlier is not None  # a bounded prefill has it
        kv = self._earlier.read(range(layer, layer + 1), first, stop)
        kv = kv.view(self._own.layers.dtype)  # as blocks have it: no program for each
        kv = kv.reshape(2, 1, stop - first, -1)
        return kv[0], kv[1]

    def _buffer(self, layers: range) -> LayerKv:
        """Zeros for some layers, with the KV of what is before the first token."""
        ahead = min(self._start, self._window)
        dtype = self._own.layers.kv_dtype
        known = (
            self._earlier.read(layers, 0, ahead).view(dtype) if self._earlier and ahead else None
        )

        def one(place: int, kind: int) -> Array:
            full = np.zeros((1, self._rows, self._own.row), dtype)
            if known is not None:
                full[0, :ahead] = known[place, kind].reshape(ahead, -1)
            copy = jnp.array(full)  # since the buffer will be donated
            placed: Array = self._own.layers.shardings.put(copy, HEADS)
            return placed

        return tuple((one(i, 0), one(i, 1)) for i in range(len(layers)))


def _join(buffers: LayerKv, first: Array, *, block: int) -> Array:
    """The block's rows of each layer: [layers, 2, block, K*D]."""

    def rows(buffer: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(buffer[0], first, block, axis=0)

    return jnp.stack([jnp.stack([rows(keys), rows(values)]) for keys, values in buffers])


PIECE_BLOCKS = 4  # blocks of earlier tokens that are attended to at a time


def spans(first: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Positions [first, stop) in pieces of `PIECE_BLOCKS` blocks, then of one: two lengths, each of
    which is a program. The last is shorter where `stop` is within a block."""
    size = PIECE_BLOCKS * block
    while first < stop:
        end = min(stop, first + (size if first + size <= stop else block))
        yield first, end
        first = end


class KeptWindow:
    """Each layer's (K, V) [1, R, K*D] of some tokens, in pieces as long as those of `spans`.

    Which piece has which tokens does not matter: later tokens see all of them.
    """

    def __init__(self, pieces: Pieces, num_layers: int, block: int) -> None:
        self._pieces = pieces
        self._block = block
        self._kept: list[list[tuple[Array, Array]]] = [[] for _ in range(num_layers)]

    def rows(self, layer: int) -> list[tuple[Array, Array]]:
        """Returns the kept rows of one layer."""
        return self._kept[layer]

    def keep(self, layer: int, keys: Array, values: Array) -> None:
        """Takes a piece as it is."""
        self._kept[layer].append((keys, values))

    def add(self, layer: int, keys: Array, values: Array) -> None:
        """Takes the next block [1, block, K*D]; only its first rows where it goes on with a block
        of which some are kept already."""
        kept = self._kept[layer]
        kept.append((keys, values))
        if len(kept) > 1 and kept[-2][0].shape[1] < self._block:
            self._join(kept, 2, self._block)
        single = [keys.shape[1] == self._block for keys, _ in kept[-PIECE_BLOCKS:]]
        if len(single) == PIECE_BLOCKS and all(single):
            self._join(kept, PIECE_BLOCKS, PIECE_BLOCKS * self._block)

    def _join(self, kept: list[tuple[Array, Array]], count: int, rows: int) -> None:
        """The last `count` pieces become one of so many rows."""
        keys, values = zip(*kept[-count:], strict=True)
        kept[-count:] = [(self._pieces.join(keys, rows), self._pieces.join(values, rows))]
