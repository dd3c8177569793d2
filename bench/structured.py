"""Random weights whose selections look like a trained model's.

Weights drawn at random attend to everything alike: no chunk is critical, and what one layer
selects says nothing about the next. Benchmarks need selections with the statistics that the papers
measured. Here tokens carry a few latent features in their embeddings; keys read them into the head
dimensions that RoPE hardly turns, and queries weigh them: with a weighting that turns from layer to
layer, with a part of each head's own, and with a part of the request's topic. Shapes, dtypes and
operations are those of any other model; only values differ.

Each parameter is set by a published figure, and `bench.similarity` prints ours beside it:

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
  `bench.workload.Synthetic` can cluster them.
- `alike`, off by itself: topics come in groups that ask for much the same. Questions over one
  prefix ask within one group where traffic is to be stable (`alike_for`).

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
GROUPS = 8
"""Of as many topics each, one after the other."""
STABLE_AT = 0.25
"""The share of tokens at which stability is meant: important ones are so many."""


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
    alike: float = 0.0
    """Correlation of what two topics of one group ask for."""


def alike_for(stability: float, structure: Structure | None = None) -> float:
    """The `alike` with which two questions of one group share so many of their important tokens.

    Found on random features, as one layer of eight heads weighs them; 0 where questions that have
    nothing to do with each other share as many. `stability`: a share, at `STABLE_AT` of the tokens.
    """
    s = structure or Structure()
    rng = np.random.default_rng(7)
    features = rng.normal(size=(4096, s.features))
    layer = rng.normal(size=s.features)
    heads = rng.normal(size=(8, s.features)) / math.sqrt(s.features)
    fixed = layer / np.linalg.norm(layer) + s.head_spread * heads  # [H, R]
    common, one, other = rng.normal(size=(3, 24, s.features)) / math.sqrt(s.features)
    total = math.sqrt(1 + s.head_spread**2 + s.topic_spread**2)

    def important(tastes: np.ndarray) -> list[set[int]]:
        """Of each question [Q, R], the tokens that the heads together attend to most."""
        queries = fixed + s.topic_spread * tastes[:, None]  # [Q, H, R]
        logits = s.sharpness / total * np.einsum("qhr,tr->qht", queries, features)
        mass = np.exp(logits - logits.max(axis=2, keepdims=True))
        mass = (mass / mass.sum(axis=2, keepdims=True)).sum(axis=1)
        count = round(STABLE_AT * len(features))
        return [set(row.tolist()) for row in np.argpartition(-mass, count, axis=1)[:, :count]]

    steps = 1 - np.linspace(1, 0, 11) ** 2  # close together where little is left to differ
    shared = []
    for alike in steps:
        kept, own = math.sqrt(alike), math.sqrt(1 - alike)
        pairs = zip(
            important(kept * common + own * one),
            important(kept * common + own * other),
            strict=True,
        )
        shared.append(np.mean([len(a & b) / len(a) for a, b in pairs]))
    return float(np.interp(stability, np.maximum.accumulate(shared), steps))


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


def topic_tokens(
    rng: np.random.Generator, n: int, vocab_size: int, group: int | None = None
) -> np.ndarray:
    """A suffix int32 [n] whose tokens all ask for one topic, drawn at random (of a group)."""
    size = TOPICS // GROUPS
    first, count = (0, TOPICS) if group is None else (group % GROUPS * size, size)
    topic = first + int(rng.integers(count))
    return (TOPICS * rng.integers(0, vocab_size // TOPICS, n) + topic).astype(np.int32)


def _embedding(
    rng: np.random.Generator, table: Array, keys: np.ndarray, topics: np.ndarray, s: Structure
) -> Array:
    """Unit noise, so that the layers' own noise does not drown it, plus features and topic."""
    vocabulary = table.shape[0]
    noise = table.astype(jnp.float32) / jnp.std(table.astype(jnp.float32))
    features = rng.normal(size=(vocabulary, s.features))
    tastes = rng.normal(size=(TOPICS, s.features))
    if s.alike:
        common = np.repeat(rng.normal(size=(GROUPS, s.features)), TOPICS // GROUPS, axis=0)
        tastes = math.sqrt(s.alike) * common + math.sqrt(1 - s.alike) * tastes
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
