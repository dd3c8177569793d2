"""AttentionStore, without its schedulers (`as-lru`).

Gao et al. 2024 (CachedAttention, arXiv 2403.19708), as IMPRESS and ContiguousKV compare it.

- Loading: all of a prefix's keys and values, asynchronously (IMPRESS §2.2, §6.1), layer by layer.
  Everything of two layers is read while one computes, where the pool has room for it.
- Attention: over everything. A budget changes nothing.
- Cache: least recently used, over chunks of 64 tokens in device and host memory (IMPRESS §6.1).
- Scheduler-aware fetching and eviction are left out, as in both comparisons (IMPRESS §6.1,
  ContiguousKV §5.1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ckv_jax.baselines.layerwise import (
    LayerCalls,
    LayerSchedule,
    LayerwiseExecutor,
    kv_apart,
    layer_by_layer,
    pages_of,
)
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.attend import attend
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer
from ckv_jax.model.shardings import PAGES, WHOLE
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.layers import Layers, LayerState
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_rows, positions
from ckv_jax.serving.worker import Worker
from ckv_jax.trace import Trace


def attention_store(worker: Worker) -> LayerwiseExecutor:
    """The executor of `as-lru`."""
    return LayerwiseExecutor(worker, partial(EveryLayer, worker, EverythingCalls(worker.layers)))


AS_LRU = layer_by_layer(
    "as-lru",
    policy="lru",
    own=OwnParts(layout=kv_apart, executor=attention_store, selects="all", generates=False),
)


class EveryLayer(LayerSchedule):
    """Each layer over the whole prefix."""

    _layers: EverythingCalls

    def __init__(
        self, worker: Worker, calls: EverythingCalls, batch: Batch, packs: Packs, trace: Trace
    ) -> None:
        super().__init__(worker, calls, batch, packs, trace)
        opened = self._opened
        # Cached packs of layers ahead keep their slots as well.
        fit = self._memory.step_slots // (2 * opened.num_chunks)
        self._ahead = min(self._ahead, max(0, fit - 1))
        self._lengths = np.zeros(opened.probe_chunks, np.int32)
        self._lengths[: opened.num_chunks] = opened.chunk_lengths

    def read_ahead(self, layer: int) -> None:
        """All keys and values, as urgent as any read."""
        self._packs.demand(0, 2 * layer, self._all)
        self._packs.demand(0, 2 * layer + 1, self._all)

    def attend(self, layer: int, hidden: Array) -> Array:
        """The layer over every chunk and the suffix."""
        self._read_ahead(layer + self._ahead)
        self._record(2 * layer, self._all, None)
        self._record(2 * layer + 1, self._all, None)
        with self._span("dispatch", layer):
            keys = self._collect(2 * layer, self._all)
            values = self._collect(2 * layer + 1, self._all)
            pages = self._memory.pool.pages
            hidden = self._layers.attend_all(
                layer, hidden, self._batch.start, pages, keys, values, self._lengths
            )
        self._done(layer, hidden, self._opened.num_chunks)
        return hidden


class EverythingCalls(LayerCalls):
    """And the one of a layer over all of a prefix."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.attend_all: Callable[..., Array] = self._of_layer(
            layers.once(_attend_all_of, layers.layer_of, layers.target),
            (WHOLE, WHOLE, PAGES, WHOLE, WHOLE, WHOLE), WHOLE,
        )  # fmt: skip
        """(layer, hidden [B, S, E], start [B], pages, key slots [M], value slots [M], lengths [M])
        -> hidden: the whole layer over every chunk of the prefix and the suffix."""


def _attend_all_of(layer_of: Callable[[LayerState], Layer], target: Target) -> Callable[..., Array]:
    def attend_all(
        state: LayerState, hidden: Array, start: Array, pages: Array, key_slots: Array,
        value_slots: Array, lengths: Array,
    ) -> Array:  # fmt: skip
        batch, length, _ = hidden.shape

        def rows(table: Array) -> Array:
            return jnp.broadcast_to(table[None, :], (batch, table.shape[0]))

        def over_all(q: Array, k: Array, v: Array) -> Array:
            return attend(
                q, pages_of(pages), rows(key_slots), rows(value_slots), rows(lengths), as_rows(k),
                as_rows(v), jnp.zeros((batch,), jnp.int32), target=target,
            )[0]  # fmt: skip

        return layer_of(state)(hidden, positions(start, length), over_all)

    return attend_all
