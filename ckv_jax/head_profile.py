"""Which heads of a model find things: profiled on texts, so that these alone score chunks.

Few heads look a thing up, the others attend to what is near or first, whatever is asked
(CompressKV, Lin et al. 2025; retrieval heads, Wu et al. 2024). Here an excerpt of a text is
repeated at its end, and a head finds it as far as it attends to where the excerpt stood first. No
answers are needed for that, so any text will do that is like those to be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from ckv_jax.config import Heads
from ckv_jax.model.decoder import Layer, Transformer, causal_attention

__all__ = ["EXCERPT", "Profile", "measured"]

EXCERPT = 32
"""Tokens that are repeated."""
_ASKING = 16  # of them, the last ones: with those before them they stand nowhere else
_NEAR = 8  # tokens before and after its place that count as found: about a chunk
_CHUNK = 16
_FEW = 20  # one chunk in so many
_SEED = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """What the KV heads of a model attend to.

    Attributes:
      found: float32 [L, K], the share of a head's attention to where an excerpt stood first.
      chance: what that is of a head that attends to everything alike.
      held: float32 [L, K], the share that the best twentieth of a text's chunks have.
    """

    found: Float32[np.ndarray, "L K"]
    chance: float
    held: Float32[np.ndarray, "L K"]

    def best(self, period: int, layers: int) -> Heads:
        """Of each `period` of layers the best head of so many `layers`, those with the best ones.

        Those that find something, more than twice what chance would; then those that hold most in
        few chunks: what they attend to can be chosen, if it is not what is asked about.
        """
        worth = np.where(self.found > 2 * self.chance, 1 + self.found, self.held)
        heads = []
        for first in range(0, len(worth), period):
            part = worth[first : first + period]
            order = np.argsort(-part.max(axis=1), kind="stable")[:layers]
            heads += [(first + int(at), int(part[at].argmax())) for at in np.sort(order)]
        return tuple(heads)


def measured(
    model: Transformer,
    period: int,
    pieces: Sequence[np.ndarray],
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Profile:
    """Profiles the heads of a model on one device over pieces of text int32 [n], of 64 tokens at
    least; means of the pieces.

    Queries are those that score: each layer makes its own of what enters the `period` of layers
    that it belongs to. `progress(done, all)` counts layers.
    """
    rng = np.random.default_rng(_SEED)
    graph, _ = nnx.split(model.layers[0])
    states = [nnx.to_pure_dict(nnx.state(layer)) for layer in model.layers]
    through = _through_of(lambda state: nnx.merge(graph, state))
    found, held = np.zeros((2, len(states), model.config.num_kv_heads), np.float32)
    for number, piece in enumerate(pieces):
        first = int(rng.integers(len(piece) - EXCERPT))
        source = first + np.arange(EXCERPT - _ASKING, EXCERPT, dtype=np.int32)
        tokens = np.concatenate([piece, piece[first : first + EXCERPT]])
        hidden = entering = model.embed(jnp.asarray(tokens)[None])
        for index, state in enumerate(states):
            if index % period == 0:
                entering = hidden
            hidden, shares = through(state, hidden, entering, source)
            found[index] += np.asarray(shares[0]) / len(pieces)
            held[index] += np.asarray(shares[1]) / len(pieces)
            progress(number * len(states) + index + 1, len(pieces) * len(states))
    chance = float(np.mean([(2 * _NEAR + 1) / len(piece) for piece in pieces]))
    return Profile(found, chance, held)


def _through_of(layer_of: Callable[[Any], Layer]) -> Callable[..., tuple[Array, Array]]:
    """A layer's output, and what its heads give to the source of what they are asked, and to the
    few chunks that they give most."""

    @jax.jit
    def through(
        state: Any, hidden: Float[Array, "1 S E"], entering: Float[Array, "1 S E"],
        source: Int32[Array, " Q"],
    ) -> tuple[Array, Array]:  # fmt: skip
        layer, length = layer_of(state), hidden.shape[1]
        positions = jnp.arange(length)[None]
        q, keys, values = layer.project(hidden, positions)
        asked = layer.query(entering[:, -_ASKING:], positions[:, -_ASKING:])
        shares = _shares(asked[0], keys[0, : length - EXCERPT], source)
        return layer.complete(hidden, causal_attention(q, keys, values)), shares

    return through


def _shares(
    asked: Float[Array, "Q H D"], keys: Float[Array, "T K D"], source: Int32[Array, " Q"]
) -> Float32[Array, "2 K"]:
    tokens, kv_heads, dim = keys.shape
    q = asked.reshape(len(asked), kv_heads, -1, dim).astype(jnp.float32)
    logits = jnp.einsum("qkgd,tkd->kgqt", q, keys.astype(jnp.float32)) * dim**-0.5
    away = jnp.abs(jnp.arange(tokens, dtype=jnp.int32)[None, :] - source[:, None])
    weights = jax.nn.softmax(logits, axis=-1)
    found = jnp.where(away <= _NEAR, weights, 0.0).sum(axis=-1).mean(axis=(1, 2))
    padded = jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, -tokens % _CHUNK)))
    chunks = padded.reshape(*weights.shape[:-1], -1, _CHUNK).sum(axis=(1, 2, 4))  # [K, M]
    few, _ = jax.lax.top_k(chunks, -(-chunks.shape[1] // _FEW))
    return jnp.stack([found, few.sum(axis=-1) / chunks.sum(axis=-1)])
