"""Random weights whose selections look like a trained model's.

Weights drawn at random attend to everything alike: no chunk is critical, and what one layer
selects says nothing about the next. Benchmarks need selections with the statistics that the papers
measured. Here tokens carry a few latent features in their embeddings; keys read them into the head
dimensions that RoPE hardly turns, and queries weigh them: with a weighting that turns from layer to
layer, with a part of each head's own, and with a part of the request's topic. Shapes, dtypes and
operations are those of any other model; only values differ.

Each parameter is set by a published figure:

- `topic_spread`, and `turn` against it: coverage between adjacent periods, 52% to 64%
  (ContiguousKV Figure 7b), with neighbouring layers more alike than distant ones (7a). What the
  request asks for is common to all layers, so it makes layers alike and requests different.
- `topic_spread` again, and `TOPICS`: how little of what one request needs the next one does. They
  decide what IMPRESS's reordering by average importance saves, 1.2 times (its Figure 20), and so
  the tokens that are loaded of what it loads: 5.7% to 6.6% (ContiguousKV Table 2).
- `head_spread`: the Jaccard index of heads' sets of important tokens, 0.48 at 10% and 0.68 at 40%
  (IMPRESS §4.2 for OPT-30B; smaller models have less).
- Tokens are independent, so important ones scatter over chunks as if by chance: at 50% a chunk of
  64 holds 46% important ones, 2.2 times amplification (IMPRESS Figure 5a; by chance 50%, 2.0).

Not published, and so a choice: `features`, `salience`, and `sharpness`, which sets how much of the
attention the chosen chunks hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Attention, Transformer
from ckv_jax.model.weights import random_model

TOPICS = 64
"""Token id modulo this is the topic that its queries ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """How strong each source of importance is."""

    features: int = 16
    """Latent features of a token, in as many of the slowest RoPE dimensions of a head."""
    salience: float = 4.0
    """Size of a feature beside the embedding's noise of 1 a dimension."""
    sharpness: float = 3.0
    """Standard deviation of a query's logits over the prefix."""
    turn: float = 0.25
    """Radians by which a layer's weights turn against the layer before."""
    head_spread: float = 1.1
    """Weight of each head's own taste, against 1 of the layer's."""
    topic_spread: float = 2.2
    """Weight of the request's topic, against 1 of the layer's."""


def structured_model(
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    seed: int = 42,
    structure: Structure | None = None,
) -> Transformer:
    """A random model of `config` with `structure` written into its embedding, keys and queries."""
    s = structure or Structure()
    if 2 * s.features > min(config.hidden_size, config.head_dim):
        raise ValueError(f"got {s.features} features, expected at most half of head_dim")
    rng = np.random.default_rng(seed)
    model = random_model(config, dtype=dtype, seed=seed)
    basis, _ = np.linalg.qr(rng.normal(size=(config.hidden_size, 2 * s.features)))
    keys, topics = np.split(basis, 2, axis=1)  # [E, R] each: read by keys, read by queries
    model.embedding[...] = _embedding(rng, model.embedding[...], keys, topics, s)
    for layer, weight in zip(model.layers, _turning(rng, config.num_layers, s), strict=True):
        _write(layer.attention, config, rng, keys, topics, weight, s)
    return model


def topic_tokens(rng: np.random.Generator, n: int, vocab_size: int) -> np.ndarray:
    """A suffix int32 [n] whose tokens all ask for one topic, drawn at random."""
    topic = int(rng.integers(TOPICS))
    return (TOPICS * rng.integers(0, vocab_size // TOPICS, n) + topic).astype(np.int32)


def _embedding(
    rng: np.random.Generator, table: Array, keys: np.ndarray, topics: np.ndarray, s: Structure
) -> Array:
    """Unit noise, so that the layers' own noise does not drown it, plus features and topic."""
    vocabulary = table.shape[0]
    noise = table.astype(jnp.float32) / jnp.std(table.astype(jnp.float32))
    features = rng.normal(size=(vocabulary, s.features))
    tastes = rng.normal(size=(TOPICS, s.features))
    asked = tastes[np.arange(vocabulary) % TOPICS]
    left = jnp.asarray(s.salience * np.concatenate([features, asked], axis=1), jnp.float32)
    right = jnp.asarray(np.concatenate([keys, topics], axis=1), jnp.float32)
    return (noise + left @ right.T).astype(table.dtype)  # on the device: tables are large


def _turning(rng: np.random.Generator, layers: int, s: Structure) -> np.ndarray:
    """Unit weights [L, R]; each is the one before, turned in a new direction."""
    weight = rng.normal(size=s.features)
    weights = np.zeros((layers, s.features))
    for row in weights:
        weight /= np.linalg.norm(weight)
        row[:] = weight
        aside = rng.normal(size=s.features)
        aside -= weight * (aside @ weight)
        weight = weight + math.tan(s.turn) * aside / np.linalg.norm(aside)
    return weights


def _write(
    attention: Attention,
    config: ModelConfig,
    rng: np.random.Generator,
    keys: np.ndarray,
    topics: np.ndarray,
    weight: np.ndarray,
    s: Structure,
) -> None:
    """Slow key dimensions become features; slow query dimensions weigh them."""
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    slow = np.arange(dim // 2 - s.features, dim // 2)
    # After the norm a row is divided by its RMS, and a feature has this standard deviation.
    rms = math.sqrt(1 + 2 * s.features * s.salience**2 / config.hidden_size)
    size = s.salience / rms
    total = math.sqrt(1 + s.head_spread**2 + s.topic_spread**2)
    scale = s.sharpness * math.sqrt(dim) / (size * total)
    own = rng.normal(size=(heads, s.features)) / math.sqrt(s.features)
    bias = np.zeros((heads, dim))
    bias[:, slow] = scale * (weight[None] + s.head_spread * own)
    attention.query_bias[...] = jnp.asarray(bias.reshape(-1), attention.query_bias[...].dtype)

    def columns(count: int, read: np.ndarray, out_first: bool) -> tuple[np.ndarray, np.ndarray]:
        where = (np.arange(count)[:, None] * dim + slow[None]).reshape(-1)
        values = np.tile(read, (1, count))  # [E, count * R]
        return where, values.T if out_first else values

    gain = scale * s.topic_spread / (size * math.sqrt(s.features))
    for kernel, count, read in (
        (attention.query_kernel, heads, gain * topics),
        (attention.kv_kernel, kv_heads, keys),
    ):
        where, values = columns(count, read, attention.out_first)
        old = kernel[...]
        new = jnp.asarray(values, old.dtype)
        kernel[...] = old.at[where].set(new) if attention.out_first else old.at[:, where].set(new)
