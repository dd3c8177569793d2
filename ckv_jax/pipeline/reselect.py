"""Choosing chunks again while text is generated: recent queries score, missing packs are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.config import SystemConfig
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.buckets import chunk_bucket
from ckv_jax.pipeline.kv_rows import KvRows
from ckv_jax.pipeline.layers import Compute
from ckv_jax.pipeline.plan import Plan
from ckv_jax.reads.packs import PackSource
from ckv_jax.reads.probes import Probes
from ckv_jax.reads.residents import PrefixView

RECENT = 16
"""Generated tokens whose queries score, where the system does not say."""


class Reselect:
    """The selections of one running batch. Engine thread only; `source` must hold its packs."""

    def __init__(
        self,
        *,
        view: PrefixView,
        source: PackSource,
        probes: Probes,
        memory: Memory,
        compute: Compute,
        plan: Plan,
        system: SystemConfig,
        limits: np.ndarray,
    ) -> None:
        self._view = view
        self._source = source
        self._probes = probes
        self._memory = memory
        self._compute = compute
        self._plan = plan
        self._chunk_tokens = system.chunk_tokens
        self._limits = limits
        self._size = min(chunk_bucket(int(limits.max())), view.probe_chunks)
        self._window = min(RECENT, system.score_window or RECENT)
        self._recent: dict[int, deque[Array]] = {}

    def see(self, period: int, hidden: Array) -> None:
        """Remembers what entered a period's first layer, [B, 1, E]."""
        self._recent.setdefault(period, deque(maxlen=self._window)).append(hidden)

    def choose(
        self, period: int, newest: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Scores the prefix for the recent tokens, the last of which are at `newest` int32 [B].

        Loads what is missing, gives back what is no longer chosen, and yields (step, slots
        [P, B, N], lengths [B, N]) for every step of the period.
        """
        recent = list(self._recent[period])
        missing = self._window - len(recent)  # the call's shape stays the same
        hidden = jnp.concatenate([*recent, *[recent[-1]] * missing], axis=1)
        count = np.where(self._limits > 0, len(recent), 0).astype(np.int32)
        layers = self._plan.scoring_layers(period)
        selection = self._compute.select(
            layers, hidden, newest - np.int32(len(recent) - 1), count,
            self._probes.get(layers, period), np.int32(self._view.prefix.num_tokens),
            np.int32(self._view.num_chunks), self._limits,
            n=self._size, window=None, chunk_tokens=self._chunk_tokens,
        )  # fmt: skip
        chosen = np.asarray(selection.ids)
        union = np.unique(chosen[chosen >= 0])
        groups = self._plan.groups(period)
        self._memory.record(self._view, groups, selection)
        for group in groups:
            self._source.keep_only(group, union)
            self._source.demand(group, union)
        slot_of = np.full(self._view.num_chunks + 1, -1, np.int32)  # the last serves id -1
        lengths = np.where(chosen >= 0, self._view.chunk_lengths[chosen], 0).astype(np.int32)
        for step in self._plan.period_steps(period):
            tables = np.full((len(step.groups), *chosen.shape), -1, np.int32)
            for row, group in enumerate(step.groups):
                slot_of[union] = self._source.collect(group, union)
                tables[row] = slot_of[chosen]
            yield step.index, tables, lengths

    def keep(self, batch_rows: np.ndarray, rows: KvRows) -> None:
        """Goes on with these rows of the batch alone."""
        self._limits = self._limits[batch_rows]
        for recent in self._recent.values():
            kept = [rows.take(hidden, batch_rows) for hidden in recent]
            recent.clear()
            recent.extend(kept)
