"""One re-prefill of the rivals: layer by layer, keys and values apart (ContiguousKV Figure 8a).

AttentionStore loads everything a layer ahead of the computation. H2O on top of it loads all keys
ahead, scores tokens with them, and then only those chunks of values that hold important tokens.
IMPRESS scores with the keys of three query heads and loads keys and values of the chunks that
matter; in a layer where the probe heads of a question disagree it falls back to all keys, with
which every head chooses for itself. Everything runs on the reader, the threads, the tiers and the
pool that our own systems use.
"""

from __future__ import annotations

import time

import jax
import numpy as np

from ckv_jax.config import SystemConfig
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import FirstToken
from ckv_jax.pipeline.layers import Layers
from ckv_jax.reads.packs import Packs
from ckv_jax.rivals.layers import RivalLayers
from ckv_jax.rivals.reorder import Reorderer
from ckv_jax.rivals.schedule import LayerSchedule
from ckv_jax.trace import Trace


class LayerwiseExecutor:
    """The schedule of one model and rival system. Engine thread only."""

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        system: SystemConfig,
        reorderer: Reorderer | None = None,
    ) -> None:
        self._layers = layers
        self._single = RivalLayers(layers)
        self._memory = memory
        self._system = system
        self._reorderer = reorderer
        self._prepared: set[tuple[int, ...]] = set()  # shapes whose fallback is compiled

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """First tokens of `batch`, whose `limits` count tokens; selections are stored positions.

        Its rows ask about one prefix. These systems serve first tokens only: nothing is held.
        """
        with trace.span("dispatch", lane="host"):
            schedule = LayerSchedule(self._single, self._memory, self._system, batch, packs, trace)
            hidden = self._layers.embed(batch.tokens)
        schedule.begin()
        if self._system.selector == "impress" and schedule.shape not in self._prepared:
            with trace.span("dispatch", lane="host"):
                schedule.prepare_fallback(hidden)
            self._prepared.add(schedule.shape)
        for layer in range(self._layers.num_layers):
            if self._system.selector == "all":
                hidden = schedule.attend_all(layer, hidden)
            else:
                hidden = schedule.attend_chosen(layer, hidden)
        start = time.perf_counter_ns()
        logits, token = self._layers.head(hidden, np.maximum(batch.lengths - 1, 0))
        token_ids = np.asarray(token)
        trace.add("compute", "compute", start, time.perf_counter_ns())
        choices = schedule.choices
        with trace.span("book", lane="host"):
            masses = np.ones((self._layers.num_layers, len(batch.lengths)), np.float32)
            if choices:
                masses = np.stack(jax.device_get([choice.mass for choice in choices]))
            trace.period_attention_mass.extend(masses[:, batch.lengths > 0].mean(axis=1).tolist())
            if self._reorderer is not None:
                prefix = batch.members[0].resident.prefix
                self._reorderer.note(prefix, [choice.importance for choice in choices])
            selections = jax.device_get([choice.ids for choice in choices])
        return FirstToken(
            logits=logits,
            token_ids=token_ids,
            attention_mass=masses,
            selections=selections,
            kv=[],
        )
