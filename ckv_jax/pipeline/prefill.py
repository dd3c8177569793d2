"""Dense prefill in blocks: what ingest stores, what recompute costs, what replaces a bad chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.pipeline.layers import Compute, compiled

STEP_LAYERS = 4

Buffers = list[tuple[tuple[Array, Array], ...]]
"""For each step of layers, each layer's (K, V) [1, R, K, D]."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block's outcome. `kv` is still being computed when it is handed out."""

    first: int
    """Position of the block's first token."""
    length: int
    kv: Array
    """[L, 2, block, K, D] in the pool's element type; rows past `length` mean nothing."""
    hidden: Array
    """[1, block, E] after the last layer."""


def context_bucket(tokens: int, block: int) -> int:
    """Rows of the key buffer that are attended: block times a power of two."""
    blocks = -(-tokens // block)
    return block * (1 << (blocks - 1).bit_length())


class DensePrefill:
    """Dense causal prefill of one sequence, `block` tokens a call, four layers a call."""

    def __init__(self, compute: Compute, *, block: int) -> None:
        self._compute = compute
        self._block = block
        config = compute.config
        self._row = (config.num_kv_heads, config.head_dim)
        layers = range(compute.num_layers)
        self._steps = [layers[i : i + STEP_LAYERS] for i in layers[::STEP_LAYERS]]
        # No pages: one invalid page keeps the call's shape the same.
        self._no_pages = jnp.zeros((1, STEP_LAYERS, 2, 1, *self._row), compute.kv_dtype)
        self._no_slots = jnp.full((1, 1, 1), -1, jnp.int32)
        self._no_lengths = jnp.zeros((1, 1), jnp.int32)
        self._join = jax.jit(_join, static_argnames="block")

    def run(
        self, tokens: np.ndarray, *, start: int = 0, before: np.ndarray | None = None
    ) -> Iterator[Block]:
        """Blocks of `tokens` int32 [n], in order.

        `before` [L, 2, start, K, D] is the KV of the `start` tokens ahead of them.
        """
        total = start + len(tokens)
        # A block is written whole, padding included, so the buffer ends on one.
        rows = context_bucket(start + -(-len(tokens) // self._block) * self._block, self._block)
        buffers = self._buffers(rows, before)
        for first in range(start, total, self._block):
            part = tokens[first - start : first - start + self._block]
            padded = np.zeros((1, self._block), np.int32)
            padded[0, : len(part)] = part
            hidden = self._compute.embed(padded)
            context = context_bucket(first + self._block, self._block)
            at = np.array([first], np.int32)
            new = []
            for step, layers in enumerate(self._steps):
                hidden, buffers[step] = self._compute.extend(
                    layers, hidden, at, buffers[step], at, self._no_pages, self._no_slots,
                    self._no_lengths, context=min(context, rows),
                )  # fmt: skip
                new.append(self._join(buffers[step], at[0], block=self._block))
            yield Block(first, len(part), jnp.concatenate(new), hidden)

    def logits(self, tokens: np.ndarray) -> tuple[Array, Array]:
        """Float32 logits [1, V] after the last of `tokens`, and their argmax [1]."""
        last: Block | None = None
        for block in self.run(tokens):
            last = block
        if last is None:
            raise ValueError("got no tokens, expected at least one")
        return self._compute.head(last.hidden, np.array([last.length - 1], np.int32))

    def executables(self) -> int:
        """How many programs of its own have been compiled so far."""
        return compiled(self._join)

    def _buffers(self, rows: int, before: np.ndarray | None) -> Buffers:
        dtype = self._compute.kv_dtype

        def buffer(layer: int, kind: int) -> Array:
            full = np.zeros((1, rows, *self._row), dtype)
            if before is not None:
                full[0, : before.shape[2]] = before[layer, kind].view(dtype)
            return jnp.array(full)  # a copy: the buffer will be donated

        return [tuple((buffer(i, 0), buffer(i, 1)) for i in layers) for layers in self._steps]


def _join(buffers: tuple[tuple[Array, Array], ...], first: Array, *, block: int) -> Array:
    """The block's rows of each layer: [layers, 2, block, K, D]."""

    def rows(buffer: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(buffer[0], first, block, axis=0)

    return jnp.stack([jnp.stack([rows(keys), rows(values)]) for keys, values in buffers])
