"""H2O on top of AttentionStore (`as-h2o-lru`, `as-h2o-lfu`).

- Loading: all keys asynchronously, then the important values (IMPRESS §6.1). Keys of two layers are
  read while one computes; they yield to values that are waited for.
- Importance of a token: the sum of its column in the attention matrix (IMPRESS §4.1), softmax over
  prefix and suffix, causal. H2O's own paper (arXiv 2306.14048) also keeps the latest tokens, for
  half of the budget; here the sums alone decide.
- Selection: the sums of all heads select together; each head has its own tokens in IMPRESS's
  comparison (§4.3, step 2).
- Cache: least recently or least frequently used, over chunks of 64 tokens.
- First tokens alone are served, as in both comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ckv_jax.baselines.layerwise import (
    LayerCalls,
    LayerSchedule,
    LayerwiseExecutor,
    Qkv,
    TokenSelection,
    importance_of,
    keys_of,
    kv_apart,
    layer_by_layer,
)
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import HEADS, PAGES, WHOLE, Shardings
from ckv_jax.pipeline.layers import Layers
from ckv_jax.selection.base import chunk_counts, select_units
from ckv_jax.serving.worker import Worker


def h2o(worker: Worker) -> LayerwiseExecutor:
    """The executor of both systems."""
    return LayerwiseExecutor(worker, partial(KeysFirst, worker, KeyCalls(worker.layers)))


_OWN = OwnParts(layout=kv_apart, executor=h2o, selects="token", generates=False)
AS_H2O_LRU = layer_by_layer("as-h2o-lru", policy="lru", own=_OWN)
AS_H2O_LFU = layer_by_layer("as-h2o-lfu", policy="lfu", own=_OWN)


class KeysFirst(LayerSchedule):
    """Each layer over the tokens that all its keys select."""

    _layers: KeyCalls

    def read_ahead(self, layer: int) -> None:
        """All keys, before all other reads ahead."""
        self._packs.ahead(0, 2 * layer, self._all, early=True)

    def attend(self, layer: int, hidden: Array) -> Array:
        """The layer over its important tokens and the suffix."""
        qkv = self._project(layer, hidden)
        table = self._all_keys(layer, lambda: self._read_ahead(layer + self._ahead))
        with self._span("dispatch", layer):
            selection = self._layers.select_by_keys(
                qkv, self._batch.lengths, self._memory.pool.pages, table, self._tokens,
                self._batch.limits, n=self._budget,
            )  # fmt: skip
        counts, _ = self._fetch(layer, selection)
        return self._attend_selected(layer, hidden, qkv, selection, counts, table)


class KeyCalls(LayerCalls):
    """And the one that selects by all keys of a layer."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        by_keys = layers.once(_by_keys_of, layers.target, layers.shardings)
        takes = (HEADS, WHOLE, PAGES, WHOLE, WHOLE, WHOLE)
        self.select_by_keys: Callable[..., TokenSelection] = self._jit(
            layers.split(by_keys, takes, WHOLE), "n"
        )
        """(qkv, q_lengths [B], pages [slots, 1, 1, C, K*D], key slots [M], num_tokens, limits [B],
        n) -> the `limits[b]` <= n tokens with the largest column sums over all heads."""


def column_sums(
    q: Float[Array, "S H D"],
    keys: Float[Array, "T K D"],
    k_new: Float[Array, "S K D"],
    valid: Bool[Array, " T"],
    q_length: Int32[Array, ""],
) -> Float32[Array, "K T"]:
    """Attention that each prefix token gets from the suffix, for each KV head by itself.

    The softmax is the layer's own: over the valid prefix keys and, causally, the suffix keys.
    Summed over the G query heads of a KV head and the first `q_length` queries; tokens that are
    not valid get -inf. With fewer KV heads (a probe of the first ones), their query heads alone
    are to be given.
    """
    queries, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(dim)
    steps = jnp.arange(queries, dtype=jnp.int32)
    causal = jnp.repeat(steps[None, :] <= steps[:, None], group, axis=0)  # [S*G, S]
    counted = jnp.repeat(steps < q_length, group)  # [S*G]
    sums = []
    for head in range(kv_heads):  # one matmul a head: no [H, S, T] array, no transposed keys
        rows = q[:, head * group : (head + 1) * group].reshape(queries * group, dim)
        old = _logits(rows, keys[:, head]) * scale
        new = _logits(rows, k_new[:, head]) * scale
        old = jnp.where(valid[None, :], old, -jnp.inf)
        new = jnp.where(causal, new, -jnp.inf)
        top = jnp.maximum(jnp.max(old, axis=1), jnp.max(new, axis=1))[:, None]
        old, new = jnp.exp(old - top), jnp.exp(new - top)
        total = jnp.sum(old, axis=1) + jnp.sum(new, axis=1)
        weight = jnp.where(counted, 1.0 / total, 0.0)  # [S*G]
        sums.append(jnp.sum(old * weight[:, None], axis=0))
    return jnp.where(valid[None, :], jnp.stack(sums), -jnp.inf)


def _logits(rows: Array, keys: Array) -> Array:
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(rows, keys, contract, preferred_element_type=jnp.float32)


def sums_of(q: Array, keys: Array, k_new: Array, num_tokens: Array, q_lengths: Array) -> Array:
    valid = jnp.arange(keys.shape[0], dtype=jnp.int32) < num_tokens
    rows = [
        column_sums(q[b], keys, k_new[b], valid, q_lengths[b]) for b in range(q.shape[0])
    ]  # a Python loop: rows of a batch share the keys, and vmap would copy them
    return jnp.stack(rows)


def _by_keys_of(target: Target, shardings: Shardings) -> Callable[..., TokenSelection]:
    def by_keys(
        qkv: Qkv, q_lengths: Array, pages: Array, key_slots: Array, num_tokens: Array,
        limits: Array, *, n: int,
    ) -> TokenSelection:  # fmt: skip
        q, k, _ = qkv
        chunk_tokens = pages.shape[3]
        keys = keys_of(pages, key_slots, k, target)
        sums = sums_of(q, keys, k, num_tokens, q_lengths)  # [B, K, T]
        scores = shardings.sum(jnp.sum(sums, axis=1))
        selected = select_units(scores, n, limits)
        counts = chunk_counts(selected.ids, chunk_tokens=chunk_tokens, chunks=key_slots.shape[0])
        agreement = jnp.ones(scores.shape[:1], jnp.float32)
        return TokenSelection(selected.ids, counts, selected.mass, agreement, importance_of(scores))

    return by_keys
