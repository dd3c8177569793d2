"""Selections without the store: one prefix's dense KV, many questions, any rule of choosing.

A study answers the same questions as the engine, by masks over the full KV instead of reads, so
that hundreds of rules can be compared in minutes. It knows what the engine cannot: what every
layer would have chosen had it seen everything (`Oracle.full`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.digests import compress
from bench.tasks.dense import Params, head_logits, layer_of, split, stored_kv
from ckv_jax.config import Heads
from ckv_jax.data.ledger import Ledger
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.selection.coarse import Coarse

__all__ = ["Answers", "Oracle", "Rule", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How chunks are chosen. The paper's `contiguous-kv` is the default with a budget."""

    budget: float = 1.0
    chunk_tokens: int = 16
    every: int = 8
    """Layers that share one selection, made by the query of the first of them."""
    probe: str = "keys"
    """What is scored: see `bench.digests.KINDS`; "heads3": keys, by the first three query heads."""
    window: int | None = None
    """The last so many suffix queries score; None: all of them."""
    heads: str = "pooled"
    """"pooled": one selection of all heads; "each": one per KV head."""
    over: str = "sum"
    """Scores over queries and heads: "sum" of probabilities (Equation 1), or their "max"."""
    suffix: bool = False
    """Scores are shares of the attention to prefix and suffix; False: to the prefix alone."""
    keep_first: int = 0
    """Leading chunks always kept, within the budget."""
    keep_last: int = 0
    """Trailing chunks always kept, within the budget."""
    layers: int = 1
    """So many layers of a group score for it, evenly spaced, each with the queries that it would
    make of the hidden state that enters the group."""
    survivors: int = 0
    """If not 0: a coarse pass leaves so many times the chunks that are chosen, the probe decides
    among those (`ckv_jax.selection.coarse`, without its bound of a quarter)."""
    coarse: str = "int4"
    """What that pass scores: a kind of `bench.digests`."""
    coarse_window: int = 1
    """The last so many suffix queries score it."""
    coarse_layers: int = 1
    """So many of the layers that score."""
    only: Heads = ()
    """(layer, KV head) that score, of the layers that do; (): all heads of them."""

    def count(self, tokens: int) -> int:
        """Chunks the budget buys."""
        chunks = -(-tokens // self.chunk_tokens)
        return max(1, int(np.ceil(round(self.budget * chunks, 9))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a rule did to every question."""

    logits: np.ndarray  # float32 [Q, V]
    chosen: np.ndarray  # bool [L, Q, M], a chunk any head may see
    scores: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    """float32 [L, Q, M]: what each layer's own query gives the true keys. Empty unless watched."""
    ahead: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    """float32 [L, Q, M]: the query of the layer `every` later, asked of this layer's hidden."""


class Oracle:
    """One ledger under one model, KV in bfloat16 like the store's, computing in float32."""

    def __init__(self, model: Transformer, page: Ledger) -> None:
        self.config: ModelConfig = model.config
        params = split(model)
        self.params: Params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        self.page = page
        self.keys, self.values = stored_kv(  # [L, T, K, D]
            self.params, self.config, jnp.asarray(page.tokens)
        )
        self._probes: dict[str, jax.Array] = {"keys": self.keys}

    def probe(self, kind: str) -> jax.Array:
        """The keys as a probe of this kind gives them back, float32 [L, T, K, D]."""
        if kind not in self._probes:
            self._probes[kind] = jnp.asarray(compress(np.asarray(self.keys), kind))
        return self._probes[kind]

    def ask(self, rule: Rule, *, watch: bool = False) -> Answers:
        """Every question under a rule; `watch` also gives `scores` and `ahead`."""
        layers, tokens = self.keys.shape[:2]
        if tokens % rule.chunk_tokens:
            raise ValueError(f"got {tokens} tokens, expected a multiple of {rule.chunk_tokens}")
        chunks = tokens // rule.chunk_tokens
        leads = np.arange(layers) % rule.every == 0
        forced = np.zeros(chunks, np.float32)
        forced[: rule.keep_first] = 1e6
        forced[chunks - rule.keep_last :] = 1e6
        active = np.ones((layers, self.config.num_heads), np.float32)
        if rule.probe == "heads3":
            active[:, 3:] = 0
        if rule.only:
            group = self.config.num_heads // self.config.num_kv_heads
            active[:] = 0
            for layer, head in rule.only:
                active[layer, head * group : (head + 1) * group] = 1
        suffix = self.page.questions.shape[1]
        back = self.page.lengths[:, None] - 1 - np.arange(suffix)[None, :]

        def last(window: int | None) -> np.ndarray:
            return ((back >= 0) & (back < (window or suffix))).astype(np.float32)

        offsets = tuple(i * rule.every // rule.layers for i in range(rule.layers))
        asking = Coarse(score_layers=rule.coarse_layers).layers(rule.layers)
        first = tuple(offsets[index] for index in asking) if rule.survivors else ()
        out = _ask(
            self.params, self.config, self.keys, self.values,
            self.probe("keys" if rule.probe == "heads3" else rule.probe),
            self.probe(rule.coarse if first else "keys"),
            self.page.questions, self.page.lengths, last(rule.window),
            last(rule.coarse_window), leads, forced, active,
            np.int32(rule.count(tokens)), np.int32(rule.survivors * rule.count(tokens)),
            np.int32(rule.every), chunk_tokens=rule.chunk_tokens,
            each=rule.heads == "each", largest=rule.over == "max", offsets=offsets, first=first,
            watch=watch, beside=rule.suffix,
        )  # fmt: skip
        return Answers(
            **dict(zip(("logits", "chosen", "scores", "ahead"), map(np.asarray, out), strict=False))
        )

    def full(self, chunk_tokens: int = 16) -> Answers:
        """Every question with everything attended to."""
        return self.ask(Rule(every=1, chunk_tokens=chunk_tokens), watch=True)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` highest of the last axis, as a mask."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "chunk_tokens",
        "each",
        "largest",
        "offsets",
        "first",
        "watch",
        "beside",
    ),
)
def _ask(
    params: Params, config: ModelConfig, keys: jax.Array, values: jax.Array, probe: jax.Array,
    coarse: jax.Array, questions: jax.Array, lengths: jax.Array, weight: jax.Array,
    coarse_weight: jax.Array, leads: jax.Array, forced: jax.Array, active: jax.Array,
    count: jax.Array, survivors: jax.Array, step: jax.Array, *, chunk_tokens: int, each: bool,
    largest: bool, offsets: tuple[int, ...], first: tuple[int, ...], watch: bool, beside: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    total, tokens, kv_heads, dim = keys.shape
    asked, suffix = questions.shape
    groups = config.num_heads // kv_heads
    chunks = tokens // chunk_tokens
    positions = jnp.broadcast_to(jnp.arange(tokens, tokens + suffix)[None, :], questions.shape)

    def shares(
        q: jax.Array, k: jax.Array, k_new: jax.Array | None, used: jax.Array, weight: jax.Array,
        left: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Attention of every chunk [K, Q, M] over the prefix keys alone (those of the chunks `left`
        [Q, M]), or over `k_new` of the suffix as well (Equation 1)."""
        q = q.reshape(asked, suffix, kv_heads, groups, dim)
        logits = jnp.einsum("qskgd,tkd->kgqst", q, k) * dim**-0.5
        if left is not None:
            seen = jnp.repeat(left, chunk_tokens, axis=-1)[None, None, :, None, :]
            logits = jnp.where(seen, logits, -jnp.inf)
        if k_new is not None:
            near = jnp.einsum("qskgd,qtkd->kgqst", q, k_new) * dim**-0.5
            near = jnp.where(np.tri(suffix, dtype=bool)[None, None, None], near, -jnp.inf)
            logits = jnp.concatenate([logits, near], axis=-1)
        shares = jax.nn.softmax(logits, axis=-1)[..., : k.shape[0]]
        shares = shares.reshape(*shares.shape[:-1], chunks, chunk_tokens).sum(-1)
        shares = shares * weight[None, None, :, :, None]
        shares = shares * used.reshape(kv_heads, groups)[:, :, None, None, None]
        return shares.max((1, 3)) if largest else shares.sum((1, 3))

    def pooled(shares: jax.Array) -> jax.Array:
        """[K or 1, Q, M] of a share for each KV head."""
        if each:
            return shares
        return (shares.max(0) if largest else shares.sum(0))[None]

    def best_of(scores: jax.Array, count: jax.Array, among: jax.Array | bool = True) -> jax.Array:
        scores = jnp.where(among, scores + forced[None, None, :], -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1)
        return rank < count

    def choose(hidden: jax.Array, index: jax.Array) -> jax.Array:
        if not first:
            return best_of(pooled(guess(hidden, index, offsets, probe, weight)), count)
        rough = guess(hidden, index, first, coarse, coarse_weight)
        left = best_of(rough.sum(0)[None], survivors)
        held = jnp.where(left, rough, 0.0).sum(-1, keepdims=True) / rough.sum(-1, keepdims=True)
        fine = pooled(held * guess(hidden, index, offsets, probe, weight, left[0]))
        estimate = rough.sum(0)[None] * (
            fine.sum() / jnp.where(left, rough.sum(0)[None], 0.0).sum()
        )
        return best_of(jnp.where(left, fine, estimate), count, left)

    def query(index: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        layer = layer_of(config, jax.tree.map(lambda leaf: leaf[index], params["layers"]))
        if not beside:
            return layer.query(hidden, positions), None
        q, k_new, _ = layer.project(hidden, positions)
        return q, k_new

    def guess(
        hidden: jax.Array, index: jax.Array, offsets: tuple[int, ...], probe: jax.Array,
        weight: jax.Array, left: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        layers = [jnp.minimum(index + offset, total - 1) for offset in offsets]

        def of(at: jax.Array) -> jax.Array:
            q, k_new = query(at, hidden)
            return shares(q, probe[at], k_new, active[at], weight, left)

        parts = [of(at) for at in layers]
        return sum(parts[1:], parts[0])

    def body(carry: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[Any, Any]:
        hidden, mask = carry
        state, k, v, lead, index = inputs
        layer = layer_of(config, state)
        q, k_new, v_new = layer.project(hidden, positions)
        mask = jax.lax.cond(lead, lambda: choose(hidden, index), lambda: mask)
        seen: tuple[jax.Array, ...] = ()
        if watch:
            everyone = jnp.ones_like(active[0])
            true = pooled(shares(q, k, k_new if beside else None, everyone, weight)).sum(0)
            at = jnp.minimum(index + step, total - 1)
            ahead_q, ahead_k = query(at, hidden)
            ahead = pooled(shares(ahead_q, keys[at], ahead_k, everyone, weight))
            seen = true, ahead.sum(0)
        heads = _attend(q, k, v, k_new, v_new, mask, chunk_tokens)
        return (layer.complete(hidden, heads), mask), (mask.any(0), *seen)

    hidden = params["rest"]["embedding"][questions]
    mask = jnp.zeros((kv_heads if each else 1, asked, chunks), bool)
    index = jnp.arange(total)
    (hidden, _), out = jax.lax.scan(
        body, (hidden, mask), (params["layers"], keys, values, leads, index)
    )
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return head_logits(params, config, last)[:, 0], *out


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, k_new: jax.Array, v_new: jax.Array,
    mask: jax.Array, chunk_tokens: int,
) -> jax.Array:  # fmt: skip
    """Suffix queries over the chosen chunks and their own past: [Q, S, H, D]."""
    asked, suffix, heads, dim = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(asked, suffix, kv_heads, heads // kv_heads, dim) * dim**-0.5
    seen = jnp.repeat(mask, chunk_tokens, axis=-1)[:, None, :, None, :]  # [K or 1, 1, Q, 1, T]
    far = jnp.where(seen, jnp.einsum("qskgd,tkd->kgqst", q, k), -jnp.inf)
    near = jnp.einsum("qskgd,qtkd->kgqst", q, k_new)
    near = jnp.where(np.tri(suffix, dtype=bool)[None, None, None], near, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    far, near = weights[..., : k.shape[0]], weights[..., k.shape[0] :]
    out = jnp.einsum("kgqst,tkd->qskgd", far, v) + jnp.einsum("kgqst,qtkd->qskgd", near, v_new)
    return out.reshape(asked, suffix, heads, dim)
