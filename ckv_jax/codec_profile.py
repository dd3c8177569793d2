"""What rounding costs each layer of a model: profiled on texts, so that a table of bits can be
made for its codec (`storage/bits_table.py`).

A layer's loss with some bits is the squared error of what its attention gives, relative to what it
gives exactly (KVTuner's attention output error), over the last quarter of the queries of each
piece of text, every layer seeing the exact hidden state. Keys and values are rounded by the very
code that writes them to disk.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ckv_jax.model.decoder import Layer, Transformer, causal_attention
from ckv_jax.storage.bits_table import fitting, pairs_of, table
from ckv_jax.storage.codec import codec_id, decoded, encoded
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.quantised import ALIGN, Quantised

__all__ = ["Choice", "Profile", "measured"]

_QUERIES = 4  # one in so many, the last ones


@dataclass(frozen=True, slots=True)
class Choice:
    """A table, what it costs and what it takes.

    Attributes:
      codec: the table's.
      layers: loss of each layer, the root of its mean square: 0.01 is an error of 1%.
      loss: the same of all layers together.
      bytes_per_token: on disk, of all layers, padding included.
    """

    codec: Quantised
    layers: list[float]
    loss: float
    bytes_per_token: float

    def to_json(self) -> dict[str, Any]:
        """As `storage.bits_table.read_table` reads it."""
        return {
            "bits": [list(pair) for pair in self.codec.bits],
            "bytes_per_token": self.bytes_per_token,
            "loss": self.loss,
            "loss_of_layers": self.layers,
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """What each of `pairs_of(layout)` costs each layer.

    Attributes:
      layout: of packs as they are computed.
      squares: float64 [L, P], mean squared relative errors.
    """

    layout: Layout
    squares: np.ndarray

    def within_bytes(self, per_token: float) -> Choice:
        """The table of least loss that takes at most so many bytes a token. Raises ValueError where
        not even the fewest bits do."""
        layout = self.layout
        return self._of(int(per_token * layout.chunk_tokens / layout.groups))

    def within_loss(self, loss: float) -> Choice:
        """The table of fewest bytes that loses at most so much. Raises ValueError where 8 bits
        everywhere lose more."""
        layout = self.layout
        most, least = (
            table([pair] * layout.num_layers).num_bytes(layout) // ALIGN
            for pair in (max(pairs_of(layout)), min(pairs_of(layout)))
        )
        sizes = range(least, most + 1)  # a larger pack never loses more
        at = bisect_left(sizes, -loss, key=lambda size: -self._of(size * ALIGN).loss)
        if at == len(sizes):
            raise ValueError(
                f"got a loss of at most {loss:g}, expected at least the "
                f"{self._of(most * ALIGN).loss:.3g} of 8 bits everywhere"
            )
        return self._of(sizes[at] * ALIGN)

    def _of(self, pack_bytes: int) -> Choice:
        layout, pairs = self.layout, pairs_of(self.layout)
        bits, total = fitting(self.squares, layout, pack_bytes)
        codec = table(bits)
        squares = [row[pairs.index(pair)] for row, pair in zip(self.squares, bits, strict=True)]
        size = codec.num_bytes(layout) * layout.groups / layout.chunk_tokens
        return Choice(
            codec, [math.sqrt(x) for x in squares], math.sqrt(total / layout.num_layers), size
        )


def measured(
    model: Transformer,
    layout: Layout,
    pieces: Sequence[np.ndarray],
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Profile:
    """Measures a model on one device over pieces of text; `progress(done, all)` counts layers."""
    pairs = pairs_of(layout)
    widths = sorted({bits for pair in pairs for bits in pair}, reverse=True)
    graph, _ = nnx.split(model.layers[0])
    states = [nnx.to_pure_dict(nnx.state(layer)) for layer in model.layers]
    project, attended = _calls(lambda state: nnx.merge(graph, state))
    squares = np.zeros((len(states), len(widths), len(widths)))
    for number, piece in enumerate(pieces):
        hidden = model.embed(jnp.asarray(piece)[None])
        for index, state in enumerate(states):
            q, k, v = project(state, hidden)
            rounded = [_rounded(k, v, width, layout) for width in widths]
            keys = jnp.stack([k, *(pair[0] for pair in rounded)])
            values = jnp.stack([v, *(pair[1] for pair in rounded)])
            hidden, errors = attended(state, hidden, q, keys, values)
            squares[index] += np.asarray(errors) / len(pieces)
            progress(number * len(states) + index + 1, len(pieces) * len(states))
    order = [(widths.index(keys), widths.index(values)) for keys, values in pairs]
    return Profile(layout, np.array([[row[at] for at in order] for row in squares]))


def _calls(layer_of: Callable[[Any], Layer]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Queries, keys and values of a layer; its output, and what rounding does to its attention."""

    @jax.jit
    def project(state: Any, hidden: Array) -> tuple[Array, Array, Array]:
        positions = jnp.arange(hidden.shape[1])[None]
        return layer_of(state).project(hidden, positions)

    @jax.jit
    def attended(
        state: Any,
        hidden: Float[Array, "1 S E"],
        q: Float[Array, "1 S H D"],
        keys: Float[Array, "N 1 S K D"],  # the exact ones first
        values: Float[Array, "N 1 S K D"],
    ) -> tuple[Array, Array]:
        after = layer_of(state).complete(hidden, causal_attention(q, keys[0], values[0]))
        return after, _errors(q[0], keys[:, 0], values[:, 0])

    return project, attended


def _errors(
    q: Float[Array, "S H D"], keys: Float[Array, "N S K D"], values: Float[Array, "N S K D"]
) -> Float[Array, "M M"]:
    """Squared relative errors of attention by each of the rounded keys, and of rounded values."""
    length, _, dim = q.shape
    first = length - length // _QUERIES
    asked = q[first:].reshape(length - first, keys.shape[2], -1, dim).astype(jnp.float32)
    seen = jnp.arange(length)[None, :] <= jnp.arange(first, length)[:, None]
    wide = values.astype(jnp.float32)

    def by(keys: Array) -> Array:
        scores = jnp.einsum("qkgd,tkd->kgqt", asked, keys.astype(jnp.float32)) * dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("kgqt,ntkd->nqkgd", weights, wide)

    found = jax.lax.map(by, keys)  # [N keys, N values, Q, K, G, D]
    exact = found[0, 0]
    wrong = jnp.square(found[1:, 1:] - exact[None, None]).sum((2, 3, 4, 5))
    return wrong / jnp.square(exact).sum()


def _rounded(k: Array, v: Array, width: int, layout: Layout) -> tuple[Array, Array]:
    """Keys and values [1, S, K, D] as a store gives them back that keeps so many bits of each."""
    size = layout.chunk_tokens
    one = replace(layout, num_layers=1, pack_layers=1, kv_together=True, digest="none",
                  digest_layers=(), probe="none")  # fmt: skip
    codec = Quantised(name="rounded", bits=((width, width),))
    coded = replace(one, codec=codec_id(codec), codec_bytes=codec.num_bytes(one))
    both = np.stack([np.asarray(x)[0] for x in (k, v)])  # [2, S, K, D]
    chunks = -(-both.shape[1] // size)
    padded = np.zeros((2, chunks * size, *both.shape[2:]), both.dtype)
    padded[:, : both.shape[1]] = both
    packs = np.moveaxis(padded.reshape(2, chunks, size, *both.shape[2:]), 1, 0)[:, None]
    stored = encoded(codec, np.ascontiguousarray(packs).view(one.disk_dtype), 0, coded)
    back = decoded(codec, stored, 0, coded)[:, 0]  # [n, 2, C, K, D]
    rows = np.moveaxis(back, 0, 1).reshape(2, -1, *both.shape[2:])[:, : both.shape[1]]
    return jnp.asarray(rows[0])[None], jnp.asarray(rows[1])[None]
