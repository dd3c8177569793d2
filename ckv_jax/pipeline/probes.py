"""The probe of each period: a resident digest, or keys that come ahead of their use like packs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from jax import Array

from ckv_jax.buckets import pad_rows, probe_bucket
from ckv_jax.cache.tiers import PoolExhausted
from ckv_jax.config import SystemConfig
from ckv_jax.kernels_pallas.score.probe import Keys, Landmarks, Probe, TokenProbe
from ckv_jax.model.shardings import PROBE, Shardings
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.probe_keys import ProbeKeys
from ckv_jax.reads.digest import Digest
from ckv_jax.reads.packs import Packs
from ckv_jax.reads.probe_source import ProbeView, RecomputedKv, probe_source
from ckv_jax.reads.resident import Resident
from ckv_jax.reads.residents import Residents, device_digest
from ckv_jax.reads.source import Source
from ckv_jax.storage.digest import landmarks
from ckv_jax.storage.digest.data import DigestData, as_float32
from ckv_jax.storage.errors import CkvError
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace

OpenPacks = Callable[[Source, Trace], Packs]
"""Packs of probe keys, which lie in memory as they lie on disk."""


class Probes:
    """The probes of one prefix for one batch. What the store cannot give is recomputed.

    Pages of probe keys are entries of the caches as packs are: they take slots of the same budgets,
    under the same policy, and are read only where they are in neither tier.
    """

    def __init__(
        self,
        *,
        resident: Resident,
        residents: Residents,
        reader: PrefixReader,
        plan: Plan,
        system: SystemConfig,
        open_packs: OpenPacks,
        keys: ProbeKeys,
        pool: Callable[[], Array],
        recovered: RecomputedKv,
        trace: Trace,
        shardings: Shardings,
    ) -> None:
        """`pool`: the page pool as it is now."""
        self._resident = resident
        self._residents = residents
        self._shardings = shardings
        self._reader = reader
        self._plan = plan
        self._open_packs = open_packs
        self._keys = keys
        self._pool = pool
        self._recovered = recovered
        self._trace = trace
        self._packs: Packs | None = None
        self._held: dict[int, Array] = {}  # period -> keys in use
        self.digest = resident.digest
        """None: there are keys, to be read for each period, whose use is recorded (`used`)."""
        if system.probe == "digest" and self.digest is None:
            self.digest = self._load_digest()

    def ahead(self, period: int) -> None:
        """Starts reading the probe of `period`, unless it is resident or past the last."""
        if self.digest is None and period < self._plan.periods:
            self._opened.ahead(0, self._row(period), self._pages, sure=True)

    def get(self, layers: Sequence[int], period: int) -> list[Probe]:
        """The probes of these layers of `period`, of which keys are read for the first alone;
        waits for them."""
        if self.digest is not None:
            return [self.digest.probes[layer] for layer in layers]
        if period not in self._held:
            row = self._row(period)
            self._held[period] = self._bring(row, self._pages)
        return [Keys(self._held[period])]

    def rough(self, layers: Sequence[int]) -> list[Probe]:
        """What a coarse pass of decode scores of some layers of a digest."""
        assert self.digest is not None
        return self._residents.rough(self._resident, self.digest, layers)

    def used(self, period: int, attention: np.ndarray | None = None) -> None:
        """Says that the selection of `period` is known, and counts the use of its pages.

        `attention` [M]: what each chunk got; None: pages are worth alike.
        """
        keys = self._held.pop(period, None)
        if keys is None:
            return
        row = self._row(period)
        self._residents.record_probe(self._resident, row, attention)
        self._opened.give_up(0, row, keys)  # no wait: with the selection known they are there

    def bring(self, period: int) -> None:
        """Has the probe of `period` in memory, where it stays as after any request."""
        if self.digest is None:
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
        layers = self._resident.prefix.layout.probe_layers
        return layers.index(self._plan.first_layer(period))

    @property
    def _view(self) -> ProbeView:
        assert self._resident.probe is not None  # without a digest there are keys
        return self._resident.probe

    @property
    def _pages(self) -> np.ndarray:
        return np.arange(len(self._view.held))

    @property
    def _opened(self) -> Packs:
        if self._packs is None:
            source = probe_source(self._view, self._reader, self._recovered)
            self._packs = self._open_packs(source, self._trace)
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
        place = np.full(self._resident.probe_chunks, -1, np.int32)
        place[: len(held.place)] = held.place
        return self._keys.bring(self._pool(), slots, place, held.prefix.layout)

    def _load_digest(self) -> Digest:
        start = time.perf_counter_ns()
        try:
            data = self._reader.read_digest()
        except CkvError:
            data = None  # late, or out of reach: a miss like any other
        if data is None:
            self._trace.count("recomputed_probes", self._plan.periods)
            layout = self._resident.prefix.layout
            made = self._made_again if layout.digest == "means+cosines" else self._recomputed
            probes = made()
            rows = dict(zip(layout.digest_layers, probes, strict=True))
            return self._residents.digest_of(rows)
        self._residents.keep_digest(self._resident, data)
        size = sum(array.nbytes for array in data.arrays.values())
        self._trace.count_bytes("ssd", size, prefix=self._resident.prefix.id)
        self._trace.add("probe_io", "host", start, time.perf_counter_ns(), kind=data.kind)
        assert self._resident.digest is not None
        return self._resident.digest

    def _recomputed(self) -> list[TokenProbe | Landmarks]:
        """The keys themselves, which choose at least as well as a digest of them."""
        layout = self._resident.prefix.layout
        tokens = self._resident.probe_chunks * layout.chunk_tokens
        found: list[TokenProbe | Landmarks] = []
        for layer in layout.digest_layers:
            padded = pad_rows(np.ascontiguousarray(self._recovered.keys(layer)), tokens)
            found.append(Keys(self._shardings.put(padded, PROBE)))
        return found

    def _made_again(self) -> list[TokenProbe | Landmarks]:
        """A digest that does more than choose, made again of all keys."""
        prefix, layout = self._resident.prefix, self._resident.prefix.layout
        codes = []
        for layer in layout.digest_layers:
            kept = np.ascontiguousarray(self._recovered.keys(layer))
            exact = as_float32(kept.view(layout.disk_dtype), layout)
            codes.append(landmarks.encode(exact, layout))
        arrays = landmarks.decode(np.stack(codes), layout, prefix.num_tokens)
        chunks, size = self._resident.probe_chunks, layout.chunk_tokens
        return device_digest(DigestData(layout.digest, arrays), chunks, size, self._shardings)
