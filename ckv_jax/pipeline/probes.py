"""Keys that select, of which each period's come ahead of their use like packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax import Array

from ckv_jax.buckets import probe_bucket
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.probe_keys import ProbeKeys
from ckv_jax.prefix.open_prefix import OpenPrefix, ProbeSource, Source
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.trace import Trace


class KeyProbes:
    """The keys of one prefix that select, for one batch. What the store cannot give is recomputed.

    Pages of probe keys are entries of the caches as packs are: they take slots of the same budgets,
    under the same policy, and are read only where they are in neither tier.
    """

    def __init__(
        self,
        opened: OpenPrefix,
        plan: Plan,
        trace: Trace,
        *,
        open_packs: Callable[[Source, Trace], Packs],
        keys: ProbeKeys,
        pool: Callable[[], Array],
        record: Callable[[OpenPrefix, int, np.ndarray | None], None],
    ) -> None:
        """`open_packs`: packs of probe keys, which lie in memory as they lie on disk; `pool`: the
        page pool as it is now; `record`: see `OpenPrefixes.record_probe`."""
        self._of = opened
        self._plan = plan
        self._trace = trace
        self._open_packs = open_packs
        self._keys = keys
        self._pool = pool
        self._record = record
        assert opened.probe is not None
        self._view = opened.probe
        self._pages = np.arange(len(self._view.held))
        self._packs: Packs | None = None
        self._held: dict[int, Array] = {}  # period -> keys in use

    def ahead(self, period: int) -> None:
        """Starts reading the keys of `period`, unless it is past the last."""
        if period < self._plan.periods:
            self._opened.ahead(0, self._row(period), self._pages, sure=True)

    def get(self, layers: Sequence[int], period: int) -> list[Probe]:
        """The keys of the first of these layers of `period`; waits for them."""
        if period not in self._held:
            self._held[period] = self._bring(self._row(period), self._pages)
        return [Keys(self._held[period])]

    def used(self, period: int, attention: np.ndarray | None = None) -> None:
        """Says that the selection of `period` is known, and counts the use of its pages.

        `attention` [M]: what each chunk got; None: pages are worth alike.
        """
        keys = self._held.pop(period, None)
        if keys is None:
            return
        row = self._row(period)
        self._record(self._of, row, attention)
        self._opened.give_up(0, row, keys)  # no wait: with the selection known they are there

    def bring(self, period: int) -> None:
        """Has the keys of `period` in memory, where they stay as after any request."""
        row = self._row(period)
        self._opened.demand(0, row, self._pages)
        self._opened.collect(0, row, self._pages, stage="probe_io")
        self._opened.start_over(0, row)

    def cancel(self) -> None:
        """Drops reads that have not begun, waits for the others, gives all pages back."""
        if self._packs is not None:
            for keys in self._held.values():
                keys.block_until_ready()
            self._held.clear()
            self._packs.finish()
            self._packs = None

    def _row(self, period: int) -> int:
        layers = self._of.prefix.layout.probe_layers
        return layers.index(self._plan.first_layer(period))

    @property
    def _opened(self) -> Packs:
        if self._packs is None:
            self._packs = self._open_packs(ProbeSource(self._of, self._view), self._trace)
        return self._packs

    def _bring(self, row: int, pages: np.ndarray) -> Array:
        """Keys [T', K', D] of some pages that follow each other, of no meaning for the others: at
        once, or where the pool has no room for so many, half after half."""
        packs, held = self._opened, self._view.held
        packs.demand(0, row, pages)
        try:
            found = packs.collect(0, row, pages, stage="probe_io")
        except PoolExhausted:
            packs.start_over(0, row)
            if len(pages) == 1:
                raise
            parts = []
            for half in np.array_split(pages, 2):
                parts.append(self._bring(row, half))
                packs.give_up(0, row, parts[-1])
            return self._keys.merge(parts[0], parts[1], int(held.start[half[0]]))
        slots = np.zeros(probe_bucket(len(held), step=16), np.int32)
        slots[pages] = found
        place = np.full(self._of.probe_chunks, -1, np.int32)
        place[: len(held.place)] = held.place
        return self._keys.bring(self._pool(), slots, place, held.prefix.layout)
