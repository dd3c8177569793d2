"""What one row of a decode batch chooses by, and what it remembers of earlier choices."""

from __future__ import annotations

import numpy as np

from ckv_jax.cache.profile import Recorded
from ckv_jax.cache.widths import Widths
from ckv_jax.pipeline.probes import Probes
from ckv_jax.pipeline.window import Window
from ckv_jax.reads.source import Source
from ckv_jax.selection.select import Select
from ckv_jax.token_trace import TokenTrace


class Chooser:
    """One row's part: how much it chooses, and by what."""

    def __init__(
        self,
        *,
        select: Select,
        limit: int,
        probes: Probes,
        window: Window,
        source: Source,
        widths: Widths,
        packs: np.ndarray,
        recorded: Recorded | None = None,
        apart: bool = False,
    ) -> None:
        """`limit`: chunks of a choice; `source`: where the packs of its prefix come from; `widths`:
        how choices share the room for its windows, by the `packs` int [P] of a chunk in each
        period's; `recorded`: where its choices are written down; `apart`: it is asked by itself,
        also where others stand on its prefix."""
        self.limit = limit
        self.apart = apart
        self.probes = probes
        self.window = window
        self.source = source
        self.recorded = recorded
        self.told = TokenTrace()
        """Of the token under way."""
        self.masses: dict[int, np.ndarray] = {}
        """Of the latest choices of each period, float32 [J]."""
        assert select.queries is not None
        self._queries = select.queries
        self._recent: dict[int, dict[int, np.ndarray]] = {}
        self._widths = widths
        self._packs = packs

    @property
    def slots(self) -> int:
        """Device slots of a window that holds one choice."""
        return self.limit * self.window.resident.prefix.layout.groups

    def widths(self, times: float) -> np.ndarray:
        """Slots int [choices] of its windows where they may hold so many choices on average."""
        slots = self._widths.slots(self.limit, times, self._packs).reshape(-1)
        widths: np.ndarray = np.minimum(slots, self.window.resident.num_chunks)
        return widths

    def resize(self, times: float) -> None:
        """Gives its windows room for so many choices on average."""
        self.window.resize(self.widths(times))

    def moved(self, tokens: int, probes: Probes, source: Source) -> None:
        """The first `tokens` of the row's buffers are chunks of its prefix now."""
        self.probes = probes
        self.source = source
        chunks = self.window.resident.probe_chunks
        self._recent = {
            period: {
                at - tokens: np.pad(scores, ((0, 0), (0, chunks - scores.shape[1])))
                for at, scores in recent.items()
            }
            for period, recent in self._recent.items()
        }

    @property
    def remembers(self) -> bool:
        """Whether earlier tokens have a say in what is chosen."""
        return self._queries > 1

    def before(self, period: int, length: int) -> np.ndarray:
        """Scores float32 [J, M] of the tokens before row `length` that choose with it, for the J
        choices of a period; [1, 1]: none."""
        recent = self._recent.get(period, {})
        latest = [at for at in sorted(recent) if at < length][1 - self._queries :]
        if not latest:
            return np.zeros((1, 1), np.float32)
        scores: np.ndarray = np.stack([recent[at] for at in latest]).sum(axis=0)
        return scores

    def remember(self, period: int, length: int, scores: np.ndarray) -> None:
        """What the token at row `length` gives every chunk, float32 [J, M], for each choice of a
        period."""
        recent = self._recent.setdefault(period, {})
        recent[length] = scores  # a token that is tried again replaces itself
        for old in sorted(recent)[: -self._queries]:
            del recent[old]
