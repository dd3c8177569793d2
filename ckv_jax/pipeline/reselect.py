"""Choosing chunks again while text is generated: the queries of recent tokens score the prefix."""

from __future__ import annotations

import numpy as np

from ckv_jax.buckets import choice_bucket
from ckv_jax.config import SystemConfig
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.plan import Plan
from ckv_jax.reads.probes import Probes
from ckv_jax.reads.residents import Resident, Residents
from ckv_jax.selection.chunks import attention_mass

RECENT = 16
"""Generated tokens whose queries score, where the system does not say."""


class Reselect:
    """When and what one sequence chooses anew. Engine thread only."""

    def __init__(
        self, every: int, limit: int, *, layers: Layers, plan: Plan, system: SystemConfig
    ) -> None:
        """`every`: tokens between two choices; `limit`: chunks of each."""
        self._every = every
        self._limit = limit
        self._layers = layers
        self._plan = plan
        self._system = system
        self._window = min(RECENT, system.score_window or RECENT)
        self._recent: dict[int, dict[int, np.ndarray]] = {}

    def due(self, step: int) -> bool:
        """Whether step `step` of the decode, counted from 1, begins with a new choice."""
        return step % self._every == 0

    def see(self, step: int, period: int, hidden: np.ndarray) -> None:
        """Remembers what entered a period's first layer in a step, [E]."""
        recent = self._recent.setdefault(period, {})
        recent[step] = hidden  # a step that is tried again replaces itself
        recent.pop(step - self._window, None)

    def choose(
        self, period: int, newest: int, probes: Probes, resident: Resident, residents: Residents
    ) -> np.ndarray:
        """Chunk ids int [n], ascending; the latest token seen is at position `newest`."""
        recent = [hidden for _, hidden in sorted(self._recent[period].items())]
        padded = recent + [recent[-1]] * (self._window - len(recent))  # one shape
        layers = self._plan.scoring_layers(period)
        limits = np.array([self._limit], np.int32)
        selection = self._layers.select(
            layers, np.stack(padded)[None], np.array([newest - len(recent) + 1], np.int32),
            np.array([len(recent)], np.int32), probes.get(layers, period),
            np.int32(resident.prefix.num_tokens), np.int32(resident.num_chunks), limits,
            score=self._system.score or attention_mass,
            n=min(choice_bucket(self._limit), resident.probe_chunks),
            window=None, chunk_tokens=self._system.chunk_tokens,
        )  # fmt: skip
        ids = np.asarray(selection.ids)[0]
        probes.used(period)
        residents.record(resident, self._plan.groups(period), selection)
        resident.last_selection[period] = ids[ids >= 0]
        kept: np.ndarray = ids[ids >= 0]
        return kept
