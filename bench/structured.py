"""Random weights whose selections look like a trained model's.

Weights drawn at random attend to everything alike: no chunk is critical, and what one layer
selects says nothing about the next. Benchmarks need selections with the statistics that the papers
measured. Here tokens carry a few latent features in their embeddings; keys read them into the head
dimensions that RoPE hardly turns, and queries weigh them: with a weighting that turns from layer to
layer, with a part of each head's own, and with a part of the request's topic. Shapes, dtypes and
operations are those of any other model; only values differ.

Each constant is set by a published figure:

- `TOPIC_SPREAD`, and `TURN` against it: coverage between adjacent periods, 52% to 64%
  (ContiguousKV Figure 7b), with neighbouring layers more alike than distant ones (7a). What the
  request asks for is common to all layers, so it makes layers alike and requests different.
- `TOPIC_SPREAD` again, and `TOPICS`: how little of what one request needs the next one does. They
  decide what IMPRESS's reordering by average importance saves, 1.2 times (its Figure 20), and so
  the tokens that are loaded of what it loads: 5.7% to 6.6% (ContiguousKV Table 2).
- `HEAD_SPREAD`: the Jaccard index of heads' sets of important tokens, 0.48 at 10% and 0.68 at 40%
  (IMPRESS §4.2 for OPT-30B; smaller models have less).
- Tokens are independent, so important ones scatter over chunks as if by chance: at 50% a chunk of
  64 holds 46% important ones, 2.2 times amplification (IMPRESS Figure 5a; by chance 50%, 2.0).

Not published: `FEATURES`, `SALIENCE`, and `SHARPNESS`, which sets how much of the attention the
selected chunks hold.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Attention, Transformer
from ckv_jax.model.weights import random_model

TOPICS = 64
"""Token id modulo this is the topic that its queries ask for."""


FEATURES = 16
"""Latent features of a token, in as many of the slowest RoPE dimensions of a head."""
SALIENCE = 4.0
"""Size of a feature beside the embedding's noise of 1 a dimension."""
SHARPNESS = 3.0
"""Standard deviation of a query's logits over the prefix."""
TURN = 0.25
"""Radians by which a layer's weights turn against the layer before."""
HEAD_SPREAD = 1.1
"""Weight of each head's own taste, against 1 of the layer's."""
TOPIC_SPREAD = 2.2
"""Weight of the request's topic, against 1 of the layer's."""


def structured_model(
    config: ModelConfig, *, dtype: str = "bfloat16", seed: int = 42
) -> Transformer:
    """A random model of `config` with structure written into its embedding, keys and queries."""
    rng = np.random.default_rng(seed)
    model = random_model(config, dtype=dtype, seed=seed)
    basis, _ = np.linalg.qr(rng.normal(size=(config.hidden_size, 2 * FEATURES)))
    keys, topics = np.split(basis, 2, axis=1)  # [E, R] each: read by keys, read by queries
    model.embedding[...] = _embedding(rng, model.embedding[...], keys, topics)
    for layer, weight in zip(model.layers, _turning(rng, config.num_layers), strict=True):
        _write(layer.attention, config, rng, keys, topics, weight)
    return model


def topic_tokens(rng: np.random.Generator, n: int, vocab_size: int) -> np.ndarray:
    """A suffix int32 [n] whose tokens all ask for one topic, drawn at random."""
    topic = int(rng.integers(TOPICS))
    return (TOPICS * rng.integers(0, vocab_size // TOPICS, n) + topic).astype(np.int32)


def _embedding(
    rng: np.random.Generator, table: Array, keys: np.ndarray, topics: np.ndarray
) -> Array:
    """Unit noise, so that the layers' own noise does not drown it, plus features and topic."""
    vocabulary = table.shape[0]
    noise = table.astype(jnp.float32) / jnp.std(table.astype(jnp.float32))
    features = rng.normal(size=(vocabulary, FEATURES))
    tastes = rng.normal(size=(TOPICS, FEATURES))
    asked = tastes[np.arange(vocabulary) % TOPICS]
    left = jnp.asarray(SALIENCE * np.concatenate([features, asked], axis=1), jnp.float32)
    right = jnp.asarray(np.concatenate([keys, topics], axis=1), jnp.float32)
    return (noise + left @ right.T).astype(table.dtype)  # on the device: tables are large


def _turning(rng: np.random.Generator, layers: int) -> np.ndarray:
    """Unit weights [L, R]; each is the one before, turned in a new direction."""
    weight = rng.normal(size=FEATURES)
    weights = np.zeros((layers, FEATURES))
    for row in weights:
        weight /= np.linalg.norm(weight)
        row[:] = weight
        aside = rng.normal(size=FEATURES)
        aside -= weight * (aside @ weight)
        weight = weight + math.tan(TURN) * aside / np.linalg.norm(aside)
    return weights


def _write(
    attention: Attention,
    config: ModelConfig,
    rng: np.random.Generator,
    keys: np.ndarray,
    topics: np.ndarray,
    weight: np.ndarray,
) -> None:
    """Slow key dimensions become features; slow query dimensions weigh them."""
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    slow = np.arange(dim // 2 - FEATURES, dim // 2)
    # After the norm a row is divided by its RMS, and a feature has this standard deviation.
    rms = math.sqrt(1 + 2 * FEATURES * SALIENCE**2 / config.hidden_size)
    size = SALIENCE / rms
    total = math.sqrt(1 + HEAD_SPREAD**2 + TOPIC_SPREAD**2)
    scale = SHARPNESS * math.sqrt(dim) / (size * total)
    own = rng.normal(size=(heads, FEATURES)) / math.sqrt(FEATURES)
    bias = np.zeros((heads, dim))
    bias[:, slow] = scale * (weight[None] + HEAD_SPREAD * own)
    attention.query_bias[...] = jnp.asarray(bias.reshape(-1), attention.query_bias[...].dtype)
    gain = scale * TOPIC_SPREAD / (size * math.sqrt(FEATURES))
    for kernel, count, read in (
        (attention.query_kernel, heads, gain * topics),
        (attention.kv_kernel, kv_heads, keys),
    ):
        where = (np.arange(count)[:, None] * dim + slow[None]).reshape(-1)
        old = kernel[...]
        new = jnp.asarray(np.tile(read, (1, count)), old.dtype)  # [E, count * R]
        kernel[...] = old.at[where].set(new.T) if attention.out_first else old.at[:, where].set(new)
