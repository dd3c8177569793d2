"""What decode chooses, token by token: the shipped checkpoint fed with given tokens.

Every token of a suffix is one step of decode. It attends to what it chose and to the steady tokens
(the first 16 and the last 64 of the prefix, which no window holds), so that the next layer's
choice is the one that a decode at this budget would make. Scores and choices are the product's own
(`score`, `selection.choose`, the store's digests); attention is by masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode_oracle import attend_seen
from bench.tasks.dense import Params, head_logits, layer_of, split, stored_kv
from bench.tasks.suffixes import Told
from ckv_jax.kernels_pallas.score.api import Int4Keys, MeanKeys, Probe, score
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.selection.base import choose
from ckv_jax.storage import Layout
from ckv_jax.storage.digest import landmarks
from ckv_jax.storage.digest.data import quantise

__all__ = ["CHOOSING", "CHUNK", "Choosing", "Trace", "Tracer"]

CHUNK = 16
STEADY = (16, 64)
"""First and last tokens of the prefix that are always attended, and never chosen."""
_ABREAST = 8  # sequences of one pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """Who chooses, and by what."""

    name: str
    probe: Literal["int4", "means"]
    heads: Literal["all", "each"]
    every: int
    """Layers that share one choice: a layer group."""
    layers: int
    """So many of them score for it."""
    queries: int = 1
    """So many of the latest tokens score."""

    def heads_apart(self, config: ModelConfig) -> int:
        """J: how many choose in one layer group."""
        return config.num_kv_heads if self.heads == "each" else 1

    def rows(self, config: ModelConfig) -> int:
        """R: layer groups x what chooses in each."""
        return config.num_layers // self.every * self.heads_apart(config)

    def pack_bytes(self, config: ModelConfig) -> int:
        """Of what one row fetches for one chunk: keys and values in bfloat16."""
        heads = 1 if self.heads == "each" else config.num_kv_heads
        return self.every * 2 * CHUNK * heads * config.head_dim * 2


_POOLED = Choosing(name="int4 pooled", probe="int4", heads="all", every=4, layers=3)
CHOOSING = (
    _POOLED,
    replace(_POOLED, name="int4 pooled, by 4 tokens", queries=4),
    replace(_POOLED, name="int4 pooled, by 8 tokens", queries=8),
    replace(_POOLED, name="int4 pooled, by 16 tokens", queries=16),
    Choosing(name="means, each head", probe="means", heads="each", every=1, layers=1),
)
"""`ckv`'s, all heads of four layers together, and KVDrive's over tokens side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The choices of S sequences over one document, T steps each; see `cache.window.Choice`."""

    ids: np.ndarray
    """int32 [T, S, R, N]."""
    scores: np.ndarray
    """float32 [T, S, R, M]; -inf for chunks of steady tokens."""
    right: float
    """Share of what was asked that was answered right."""


class Tracer:
    """One document under one model, KV in bfloat16 like the store's, computing in float32."""

    def __init__(self, model: Transformer, tokens: np.ndarray) -> None:
        self.config: ModelConfig = model.config
        self.params: Params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float32), split(model)
        )
        self.keys, self.values = stored_kv(  # [L, T, K, D]
            self.params, self.config, jnp.asarray(tokens)
        )
        self._probes: dict[str, Probe] = {}

    def record(self, choosing: Choosing, told: Told, budget: float) -> Trace:
        """Every step of every sequence, at `budget` of the chunks."""
        tokens = self.keys.shape[1]
        count = max(1, int(np.ceil(round(budget * tokens / CHUNK, 9))))
        parts = [
            _record(
                self.params, self.config, self.keys, self.values, self._probe(choosing.probe),
                told.tokens[first : first + _ABREAST], choosing=choosing, count=count,
            )
            for first in range(0, len(told.tokens), _ABREAST)
        ]  # fmt: skip
        ids, scores, said = (
            np.concatenate([np.asarray(part[i]) for part in parts], axis=axis)
            for i, axis in enumerate((1, 1, 0))
        )
        asked = told.wanted >= 0
        return Trace(ids=ids, scores=scores, right=float((said == told.wanted)[asked].mean()))

    def _probe(self, kind: str) -> Probe:
        """All layers' probes, stacked along a leading axis."""
        if kind not in self._probes:
            self._probes[kind] = _probe_of(np.asarray(self.keys), kind)
        return self._probes[kind]


def _probe_of(keys: np.ndarray, kind: str) -> Probe:
    layers, tokens, heads, dim = keys.shape
    if kind == "int4":
        codes, scale = quantise(keys - keys.mean(1, keepdims=True), "int4")
        return Int4Keys(jnp.asarray(codes), jnp.asarray(scale))
    layout = Layout(
        num_layers=layers, num_kv_heads=heads, head_dim=dim, chunk_tokens=CHUNK, digest="means"
    )
    codes = np.stack([landmarks.encode(layer, layout) for layer in keys])
    arrays = landmarks.decode(codes, layout, tokens)
    return MeanKeys(jnp.asarray(arrays["mean"]), jnp.asarray(arrays["log_size"]))


@partial(jax.jit, static_argnames=("config", "choosing", "count"))
def _record(
    params: Params, config: ModelConfig, keys: jax.Array, values: jax.Array, probe: Any,
    told: jax.Array, *, choosing: Choosing, count: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Choices [S', Q, R, N], their scores [S', Q, R, M], and the likeliest next tokens [Q, S']."""
    tokens = keys.shape[1]
    asked, steps = told.shape
    rows, chunks, every = asked * steps, tokens // CHUNK, choosing.every
    positions = jnp.broadcast_to(jnp.arange(tokens, tokens + steps)[None, :], told.shape)
    place = np.arange(tokens)
    steady = (place < STEADY[0]) | (place >= tokens - STEADY[1])
    fixed = jnp.asarray(steady.reshape(chunks, CHUNK).any(1))
    target = Target.here()

    def scores_of(layer: Any, probe: Probe, hidden: jax.Array) -> jax.Array:
        """[Q * S', J, M]: a step is a sequence of one query."""
        q = layer.query(hidden, positions).reshape(rows, 1, config.num_heads, config.head_dim)
        found: jax.Array = score(
            q, probe, num_tokens=jnp.int32(tokens), q_lengths=jnp.ones(rows, jnp.int32),
            chunk_tokens=CHUNK, target=target, heads=choosing.heads,
        )  # fmt: skip
        return found

    def latest(found: jax.Array) -> jax.Array:
        """[Q, S', J, M], each step's scores with those of the tokens just before it."""
        return sum(
            jnp.pad(found, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, :steps]
            for back in range(choosing.queries)
        )

    def group(hidden: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        states, k, v, probes = inputs
        layers = [layer_of(config, jax.tree.map(lambda leaf, i=i: leaf[i], states))
                  for i in range(every)]  # fmt: skip
        scoring = [i * every // choosing.layers for i in range(choosing.layers)]
        found = sum(
            scores_of(layers[i], jax.tree.map(lambda leaf, i=i: leaf[i], probes), hidden)
            for i in scoring
        )
        found = latest(found.reshape(asked, steps, -1, chunks)).reshape(found.shape)
        found = jnp.where(fixed[None, None, :], -jnp.inf, found)
        flat = found.reshape(-1, chunks)
        ids = choose(flat, count, jnp.full(len(flat), count, jnp.int32)).ids
        mask = jnp.zeros(flat.shape, bool).at[jnp.arange(len(flat))[:, None], ids].set(True)
        seen = jnp.repeat(mask.reshape(found.shape).swapaxes(0, 1), CHUNK, axis=-1)
        seen = seen | jnp.asarray(steady)[None, None, :]  # [J, Q * S', T]
        for i, layer in enumerate(layers):
            q, k_new, v_new = layer.project(hidden, positions)
            hidden = layer.complete(hidden, attend_seen(q, k[i], v[i], k_new, v_new, seen))
        return hidden, (
            ids.reshape(asked, steps, -1, count),
            found.reshape(asked, steps, -1, chunks),
        )

    def grouped(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(-1, every, *leaf.shape[1:])

    hidden = params["rest"]["embedding"][told]
    hidden, (ids, scores) = jax.lax.scan(
        group, hidden, jax.tree.map(grouped, (params["layers"], keys, values, probe))
    )  # [G, Q, S', J, ...]
    said = head_logits(params, config, hidden).argmax(-1)

    def by_step(x: jax.Array) -> jax.Array:
        return x.transpose(2, 1, 0, 3, 4).reshape(steps, asked, -1, x.shape[-1])

    return by_step(ids), by_step(scores), said
