"""What one row of a decode batch chooses by, and what it remembers of earlier choices."""

from __future__ import annotations

import numpy as np

from ckv_jax.pipeline.window import Window
from ckv_jax.reads.probes import Probes
from ckv_jax.reads.source import Source
from ckv_jax.selection.select import Select
from ckv_jax.trace import TokenTrace


class Chooser:
    """One row's part: how much it chooses, and by what."""

    def __init__(
        self,
        *,
        select: Select,
        limit: int,
        first: int,
        probes: Probes,
        window: Window,
        source: Source,
    ) -> None:
        """`limit`: chunks of a choice; `first`: tokens in the row's buffers before the first that
        was generated; `source`: where the packs of its prefix come from."""
        self.limit = limit
        self.probes = probes
        self.window = window
        self.source = source
        self.told = TokenTrace()
        """Of the token under way."""
        self.masses: dict[int, float] = {}
        """Of the latest choice of each period."""
        self._every = select.every
        self._queries = select.queries
        self._recent: dict[int, dict[int, np.ndarray]] = {}
        self._first = first

    @property
    def slots(self) -> int:
        """Device slots of a window that holds one choice."""
        return self.limit * self.window.resident.prefix.layout.groups

    def resize(self, times: float) -> None:
        """Makes its window so many times as wide as one choice."""
        self.window.resize(min(self.window.resident.num_chunks, int(self.limit * times)))

    def due(self, length: int) -> bool:
        """Whether the token that comes at row `length` of the buffers chooses anew."""
        return (length - self._first + 1) % self._every == 0

    def before(self, period: int, length: int) -> np.ndarray:
        """Scores float32 [M] of the tokens before row `length` that choose with it; [1]: none."""
        recent = self._recent.get(period, {})
        latest = [at for at in sorted(recent) if at < length][1 - self._queries :]
        if not latest:
            return np.zeros(1, np.float32)
        scores: np.ndarray = np.stack([recent[at] for at in latest]).sum(axis=0)
        return scores

    def remember(self, period: int, length: int, scores: np.ndarray) -> None:
        """What the token at row `length` gives every chunk, float32 [M]."""
        if self._queries > 1:
            recent = self._recent.setdefault(period, {})
            recent[length] = scores  # a token that is tried again replaces itself
            for old in sorted(recent)[: -self._queries]:
                del recent[old]
