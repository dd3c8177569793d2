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

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

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
    sums_of,
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
        self.select_by_keys: Callable[..., TokenSelection] = layers.programs.jit(
            layers.split(by_keys, takes, WHOLE), static=("n",)
        )
        """(qkv, q_lengths [B], pages [slots, 1, 1, C, K*D], key slots [M], num_tokens, limits [B],
        n) -> the `limits[b]` <= n tokens with the largest column sums over all heads."""


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
