"""Long prefixes whose KV is written straight by the store's writer: no prefill is waited for.

Keys and values are what every layer makes of the tokens' embeddings alone. With the structured
weights of `bench.structured` these carry the features that queries weigh, so that what a query
chooses has the same statistics as after a prefill; what earlier layers would have added is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.structured import TOPICS
from ckv_jax import Engine
from ckv_jax.pipeline.layers import Layers
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix

BLOCK = 2048
"""Tokens written at a time."""


def stored(engine: Engine, tokens: np.ndarray) -> Prefix:
    """Stores `tokens` int32 [T], unless they are stored."""
    layout, layers = engine.layout, engine.layers
    found = engine.store.longest_prefix(tokens, fingerprint=engine.fingerprint, layout=layout)
    if found.num_tokens == len(tokens):
        return found
    with engine.store.writer(
        fingerprint=engine.fingerprint, layout=layout, tokens=tokens, codec=engine.system.coder
    ) as writer:
        for first, kv in blocks(layers, layout, tokens):
            writer.write(first, kv)
        return writer.commit()


def blocks(layers: Layers, layout: Layout, tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """First token and KV [L, 2, t, K, D] of every block of `tokens` int32 [T], in the layout's
    dtype."""
    project = _project(layers)
    row = layout.num_kv_heads, layout.head_dim
    for first in range(0, len(tokens), BLOCK):
        block = np.zeros((1, BLOCK), np.int32)
        part = tokens[first : first + BLOCK]
        block[0, : len(part)] = part
        hidden = layers.embed(block)
        kv = np.empty((layers.num_layers, 2, len(part), *row), layout.numpy_dtype)
        for layer in range(layers.num_layers):
            for which, found in enumerate(project(layer, hidden, first)):
                kv[layer, which] = np.asarray(found)[0, : len(part)]
        yield first, kv


def walking_tokens(rng: np.random.Generator, n: int, vocab_size: int, *, stay: float) -> np.ndarray:
    """Token ids int32 [n] of a text that keeps to its topic with probability `stay` a token."""
    topics = np.empty(n, np.int64)
    topic = rng.integers(TOPICS)
    for i in range(n):
        if rng.random() >= stay:
            topic = rng.integers(TOPICS)
        topics[i] = topic
    ids: np.ndarray = TOPICS * rng.integers(0, vocab_size // TOPICS, n) + topics
    return ids.astype(np.int32)


def _project(layers: Layers) -> Callable[[int, Array, int], tuple[Array, Array]]:
    return lambda layer, hidden, first: _keys_values(
        layers.state(layer), hidden, np.int32(first), layer_of=layers.layer_of
    )


@partial(jax.jit, static_argnames="layer_of")
def _keys_values(
    state: Any, hidden: Array, first: Array, *, layer_of: Callable[[Any], Any]
) -> tuple[Array, Array]:
    at = first + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
    _, keys, values = layer_of(state).project(hidden, at)
    return keys, values
