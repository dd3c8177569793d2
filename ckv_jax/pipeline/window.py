"""The packs that one sequence's decode attends to, kept in their device slots between tokens."""

from __future__ import annotations

import numpy as np

from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.reads.packs import Packs
from ckv_jax.reads.residents import Resident


class Window:
    """Pins of one sequence on cached packs, period by period. Engine thread only.

    A window that is not `held` only knows what was chosen: its packs come through the pool anew
    for every token (`Decoder`).
    """

    def __init__(self, resident: Resident, memory: Memory, plan: Plan, *, held: bool) -> None:
        self.resident = resident
        self.held = held
        self._memory = memory
        self._plan = plan
        self._chosen: dict[int, np.ndarray] = {}
        self._pages: dict[int, np.ndarray] = {}  # layer group -> pinned pages

    def choose(self, period: int, ids: np.ndarray) -> None:
        """Keeps these chunks (ascending) for a period, and no others; they must be cached."""
        self._chosen[period] = ids
        if not self.held:
            return
        before = [self._pages[g] for g in self._plan.groups(period) if g in self._pages]
        for group in self._plan.groups(period):
            self._pages[group] = self.resident.pages(group, ids)
            self._memory.tiers.pin(self._pages[group])
        for pages in before:  # all new ones are pinned: letting go shrinks the cache
            self._memory.let_go(pages)

    def narrow(self, period: int, ids: np.ndarray) -> None:
        """Lets go of what a period no longer chooses, before the rest of `ids` is read."""
        for group in self._plan.groups(period) if self.held else ():
            before = self._pages[group]
            kept = np.isin(before, self.resident.pages(group, ids))
            self._memory.let_go(before[~kept])
            self._pages[group] = before[kept]

    def load(self, period: int, ids: np.ndarray, packs: Packs) -> None:
        """Brings the packs of `ids` into device slots, to be chosen next."""
        for group in self._plan.groups(period):
            packs.demand(0, group, ids)
        for group in self._plan.groups(period):
            packs.collect(0, group, ids)
        packs.keep(0)
        self.choose(period, ids)

    def cached(self, period: int, ids: np.ndarray) -> bool:
        """Whether all packs of these chunks are in device slots now."""
        return all(
            bool((self._memory.tiers.lookup(self.resident.pages(group, ids))[0] >= 0).all())
            for group in self._plan.groups(period)
        )

    @property
    def widest(self) -> int:
        """Chunks of the period that has most."""
        return max((len(ids) for ids in self._chosen.values()), default=0)

    def ids(self, step: Step) -> np.ndarray:
        """Chunks int [n] of a step's period, ascending."""
        return self._chosen[step.period]

    def lengths(self, step: Step) -> np.ndarray:
        """Valid tokens int32 [n] of each of them."""
        lengths: np.ndarray = self.resident.chunk_lengths[self.ids(step)]
        return lengths

    def slots(self, step: Step) -> np.ndarray:
        """Device slots int32 [P, n] of a held window's packs."""
        tiers = self._memory.tiers
        return np.stack([tiers.lookup(self._pages[group])[0] for group in step.groups])

    def close(self) -> None:
        """Unpins everything. Idempotent."""
        for pages in self._pages.values():
            self._memory.let_go(pages)
        self._pages.clear()
