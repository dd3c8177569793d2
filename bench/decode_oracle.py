"""Decode's choices without an engine: every token of a question chooses for itself.

One prefix's dense KV, many questions fed token by token, and any rule of choosing, by masks. What
`bench.oracle` is for prefill, where a question chooses once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.digests import compress
from bench.grouping import balanced, by_position, kmeans
from bench.tasks.dense import Params, head_logits, layer_of, split, stored_kv
from ckv_jax.data.ledger import Ledger
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer

__all__ = ["Answers", "DecodeOracle", "DecodeRule", "attend_seen"]

Unit = Literal["position", "balanced", "kmeans"]
Index = Literal["keys", "int4", "pq8", "pq16", "signs", "means", "bounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRule:
    """How each token chooses what it attends to."""

    budget: float
    """Share of the prefix's tokens, steady ones apart."""
    unit: Unit = "position"
    """What a unit is: tokens side by side, or alike ones (`bench.grouping`)."""
    unit_tokens: int = 16
    index: Index = "means"
    """What is scored: every token ("keys", or as `bench.digests` compresses them), or one record
    per unit: its mean key, or the bounds of its keys (Quest)."""
    coarse: int = 0
    """If not 0: the coarse index chooses so many times the budget, the index among those."""
    coarse_index: Index = "means"
    heads: Literal["pooled", "each"] = "each"
    every: int = 1
    """Layers that share one choice."""
    layers: int = 1
    """So many of them score for it, evenly spaced."""
    dense_layers: int = 0
    """The first so many layers attend to everything (Quest: 2)."""
    steady: tuple[int, int] = (16, 64)
    """First and last tokens of the prefix that are always attended, beside the budget."""

    def count(self, tokens: int) -> int:
        """Tokens the budget buys: whole units of the even size, at least one."""
        units = max(1, int(np.ceil(round(self.budget * tokens / self.unit_tokens, 9))))
        return units * self.unit_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a rule did to every question."""

    logits: np.ndarray
    """float32 [Q, V]."""
    needle: np.ndarray
    """float32 [Q]: share of layers in which a head of the last token saw the deciding token."""
    attended: np.ndarray
    """float32 [Q]: share of the prefix's tokens that the last token saw, over layers and heads."""


@dataclass(frozen=True, slots=True)
class _Units:
    """A grouping of one prefix: a unit for each token, by layer and head."""

    member: jax.Array  # int32 [L, J, T], J = 1 or K
    size: jax.Array  # int32 [L, J, M]
    mean: jax.Array  # float32 [L, K, M, D]
    low: jax.Array  # float32 [L, K, M, D]
    high: jax.Array


class DecodeOracle:
    """One ledger under one model, KV in bfloat16 like the store's, computing in float32."""

    def __init__(self, model: Transformer, page: Ledger) -> None:
        self.config: ModelConfig = model.config
        params = split(model)
        self.params: Params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        self.page = page
        self.keys, self.values = stored_kv(  # [L, T, K, D]
            self.params, self.config, jnp.asarray(page.tokens)
        )
        self._units: dict[tuple[Any, ...], _Units] = {}
        self._indexes: dict[str, jax.Array] = {"keys": self.keys}

    def ask(self, rule: DecodeRule) -> Answers:
        """Every question under a rule."""
        layers, tokens = self.keys.shape[:2]
        units = self._grouped(rule)
        steady = np.zeros(tokens, bool)
        steady[: rule.steady[0]] = steady[tokens - rule.steady[1] :] = True
        index, first = self._index(rule.index), self._index(rule.coarse_index)
        out = _ask(
            self.params, self.config, self.keys, self.values, index, first,
            (units.member, units.size, units.mean, units.low, units.high),
            self.page.questions, self.page.lengths, self.page.needles, steady,
            np.arange(layers) % rule.every == 0, np.arange(layers) < rule.dense_layers,
            np.int32(rule.count(tokens)), np.int32(rule.coarse), index_kind=rule.index,
            each=rule.heads == "each", coarse_kind=rule.coarse_index if rule.coarse else None,
            offsets=tuple(i * rule.every // rule.layers for i in range(rule.layers)),
        )  # fmt: skip
        return Answers(
            **dict(zip(("logits", "needle", "attended"), map(np.asarray, out), strict=True))
        )

    def _index(self, kind: str) -> jax.Array:
        """What every token has of an index; of one with a record per unit, nothing is used."""
        kind = "keys" if kind in ("means", "bounds") else kind
        if kind not in self._indexes:
            self._indexes[kind] = jnp.asarray(compress(np.asarray(self.keys), kind))
        return self._indexes[kind]

    def _grouped(self, rule: DecodeRule) -> _Units:
        apart = rule.heads == "each" and rule.unit != "position"
        name = (rule.unit, rule.unit_tokens, apart)
        if name not in self._units:
            self._units[name] = _units(np.asarray(self.keys), *name)
        return self._units[name]


def _units(keys: np.ndarray, unit: Unit, unit_tokens: int, apart: bool) -> _Units:
    layers, tokens, kv_heads, dim = keys.shape
    if unit == "position":
        member = np.broadcast_to(by_position(tokens, unit_tokens), (layers, 1, tokens))
    else:
        group = balanced if unit == "balanced" else kmeans
        heads = (
            [keys[:, :, k] for k in range(kv_heads)]
            if apart
            else [keys.reshape(layers, tokens, -1)]
        )
        member = np.stack(
            [[group(part[layer], unit_tokens) for part in heads] for layer in range(layers)]
        )
    count = int(member.max()) + 1
    by_head = np.broadcast_to(member, (layers, kv_heads, tokens)).reshape(-1, tokens)
    flat = np.moveaxis(keys, 2, 1).reshape(-1, tokens, dim)
    mean, low, high, size = (
        np.stack(part)
        for part in zip(
            *(_records(k, m, count) for k, m in zip(flat, by_head, strict=True)), strict=True
        )
    )
    shape = (layers, kv_heads, count)
    sizes = size.reshape(shape)[:, : member.shape[1]]
    return _Units(
        *(jnp.asarray(x) for x in (member, sizes)),
        *(jnp.asarray(x.reshape(*shape, dim)) for x in (mean, low, high)),
    )


def _records(keys: np.ndarray, member: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """Mean, least and greatest key, and size, of each unit of one head's keys [T, D]."""
    size = np.bincount(member, minlength=count).astype(np.int32)
    mean = np.zeros((count, keys.shape[1]), np.float32)
    np.add.at(mean, member, keys)
    low, high = np.full_like(mean, np.inf), np.full_like(mean, -np.inf)
    np.minimum.at(low, member, keys)
    np.maximum.at(high, member, keys)
    empty = size == 0
    low[empty] = high[empty] = 0
    return mean / np.maximum(size, 1)[:, None], low, high, size


@partial(jax.jit, static_argnames=("config", "index_kind", "coarse_kind", "each", "offsets"))
def _ask(
    params: Params, config: ModelConfig, keys: jax.Array, values: jax.Array, index: jax.Array,
    first: jax.Array, units: tuple[jax.Array, ...], questions: jax.Array, lengths: jax.Array,
    needles: jax.Array, steady: jax.Array, leads: jax.Array, dense: jax.Array, count: jax.Array,
    times: jax.Array, *,
    index_kind: Index, coarse_kind: Index | None, each: bool, offsets: tuple[int, ...],
) -> tuple[jax.Array, ...]:  # fmt: skip
    total, tokens, kv_heads, dim = keys.shape
    asked, suffix = questions.shape
    positions = jnp.broadcast_to(jnp.arange(tokens, tokens + suffix)[None, :], questions.shape)
    rows = asked * suffix
    member, size, mean, low, high = units

    def heads_of(q: jax.Array) -> jax.Array:
        """[K, G, R, D], R = Q * S, scaled."""
        q = q.reshape(rows, kv_heads, -1, dim) * dim**-0.5
        return jnp.moveaxis(q, 0, 2)

    def pooled(shares: jax.Array) -> jax.Array:
        """Shares [K, G, R, M] -> [K or 1, R, M]."""
        return shares.sum(1) if each else shares.sum((0, 1))[None]

    def by_unit(q: jax.Array, at: jax.Array, kind: str) -> jax.Array:
        """Scores of units by their records, [K or 1, R, M]."""
        if kind == "means":
            logits = jnp.einsum("kgrd,kmd->kgrm", q, mean[at])
        else:
            logits = jnp.einsum("kgrd,kmd->kgrm", jnp.maximum(q, 0), high[at])
            logits = logits + jnp.einsum("kgrd,kmd->kgrm", jnp.minimum(q, 0), low[at])
        logits = (
            logits + jnp.log(size[at].astype(jnp.float32))[:, None, None, :]
        )  # -inf: nobody is in it
        return pooled(jax.nn.softmax(logits, axis=-1))

    def by_token(q: jax.Array, at: jax.Array, probe: jax.Array) -> jax.Array:
        """The same by Equation 1 over what every token has of an index."""
        logits = jnp.einsum("kgrd,tkd->kgrt", q, probe[at])
        shares = jax.nn.softmax(logits, axis=-1).sum(1)  # [K, R, T]
        of = jnp.broadcast_to(member[at], (kv_heads, tokens))
        found = jax.vmap(lambda s, m: jax.ops.segment_sum(s.T, m, mean.shape[2]).T)(
            shares, of
        )  # [K, R, M]
        return found if each else found.sum(0)[None]

    def taken(scores: jax.Array, room: jax.Array, at: jax.Array) -> jax.Array:
        """bool [J, R, M]: the best units that fit into `room` tokens, at least one."""
        sizes = jnp.broadcast_to(size[at][:, None, :], (scores.shape[0], *scores.shape[1:]))
        order = jnp.argsort(-scores, axis=-1)
        filled = jnp.cumsum(jnp.take_along_axis(sizes, order, axis=-1), axis=-1)
        fits = (filled <= room) | (jnp.arange(scores.shape[-1]) == 0)[None, None, :]
        return jnp.put_along_axis(jnp.zeros(scores.shape, bool), order, fits, -1, inplace=False)

    def choose(hidden: jax.Array, at: jax.Array) -> jax.Array:
        """bool [K or 1, R, T]: the tokens that each row's choice lets it see."""
        which = [jnp.minimum(at + offset, total - 1) for offset in offsets]
        qs = [heads_of(query(layer, hidden)) for layer in which]

        def scores(kind: Index, probe: jax.Array) -> jax.Array:
            parts = [
                by_unit(q, layer, kind)
                if kind in ("means", "bounds")
                else by_token(q, layer, probe)
                for q, layer in zip(qs, which, strict=True)
            ]
            return sum(parts[1:], parts[0])

        found = scores(index_kind, index)
        if coarse_kind is not None:
            allowed = taken(scores(coarse_kind, first), times * count, at)
            found = jnp.where(allowed, found, -1.0)
        mask = taken(found, count, at)  # [K or 1, R, M]
        shape = mask.shape[0], rows, tokens
        return jnp.take_along_axis(mask, jnp.broadcast_to(member[at][:, None], shape), axis=-1)

    def query(at: jax.Array, hidden: jax.Array) -> jax.Array:
        layer = layer_of(config, jax.tree.map(lambda leaf: leaf[at], params["layers"]))
        return layer.query(hidden, positions)

    last = jnp.arange(asked) * suffix + lengths - 1

    def body(carry: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[Any, Any]:
        hidden, mask = carry
        state, k, v, lead, all_of_it, at = inputs
        layer = layer_of(config, state)
        q, k_new, v_new = layer.project(hidden, positions)
        mask = jax.lax.cond(lead, lambda: choose(hidden, at), lambda: mask)
        seen = mask | (steady | all_of_it)[None, None, :]
        heads = attend_seen(q, k, v, k_new, v_new, seen)
        mine = seen[:, last]  # [K or 1, Q, T]
        needle = jnp.take_along_axis(mine, needles[None, :, None], axis=2)[..., 0].any(0)
        return (layer.complete(hidden, heads), mask), (needle, mine.mean((0, 2)))

    hidden = params["rest"]["embedding"][questions]
    mask = jnp.zeros((kv_heads if each else 1, rows, tokens), bool)
    (hidden, _), (needle, attended) = jax.lax.scan(
        body, (hidden, mask), (params["layers"], keys, values, leads, dense, jnp.arange(total))
    )
    tail = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    logits = head_logits(params, config, tail)[:, 0]
    return logits, needle.mean(0, dtype=jnp.float32), attended.mean(0)


def attend_seen(
    q: jax.Array, k: jax.Array, v: jax.Array, k_new: jax.Array, v_new: jax.Array, seen: jax.Array
) -> jax.Array:
    """Each token over what it chose, `seen` bool [K or 1, Q * S, T], and its own past."""
    asked, suffix, heads, dim = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(asked, suffix, kv_heads, heads // kv_heads, dim) * dim**-0.5
    seen = seen.reshape(seen.shape[0], asked, suffix, -1)[:, None]  # [K or 1, 1, Q, S, T]
    far = jnp.where(seen, jnp.einsum("qskgd,tkd->kgqst", q, k), -jnp.inf)
    near = jnp.einsum("qskgd,qtkd->kgqst", q, k_new)
    near = jnp.where(np.tri(suffix, dtype=bool)[None, None, None], near, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    far, near = weights[..., : k.shape[0]], weights[..., k.shape[0] :]
    out = jnp.einsum("kgqst,tkd->qskgd", far, v) + jnp.einsum("kgqst,qtkd->qskgd", near, v_new)
    return out.reshape(asked, suffix, heads, dim)
