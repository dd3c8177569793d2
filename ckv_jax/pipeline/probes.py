"""Keys that select, of which each period's come ahead of their use like packs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ckv_jax.buckets import probe_bucket
from ckv_jax.kernels_pallas.gather.api import gather
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import PAGES, PROBE, WHOLE
from ckv_jax.pipeline.layers import Layers, Pages
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.open_prefix import OpenPrefix, ProbeSource, Source
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.storage.layout import Layout
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


class ProbeKeys:
    """Jitted calls over the pool of one model."""

    def __init__(self, layers: Layers) -> None:
        self._dtype = layers.dtype
        jit, split = layers.programs.jit, layers.split
        bring = layers.once(_bring_of, layers.target)
        self._bring = jit(
            split(bring, (PAGES, WHOLE, WHOLE), PROBE), static=("heads", "dim", "most", "dtype")
        )
        self._merge = jit(split(_merged, (PROBE, PROBE, WHOLE), PROBE))

    def bring(
        self,
        pages: Pages,
        slots: Int32[np.ndarray, " N"],
        place: Int32[np.ndarray, " M"],
        layout: Layout,
    ) -> Float[Array, "T H D"]:
        """The keys of M chunks, T = M * C: chunk m is at `place[m]` of the pages in `slots`.

        Chunks whose place is -1, or whose page has no slot, are zeros.
        """
        heads = None if layout.probe == "keys" else layout.probe_heads
        key = (pages.shape, slots.shape, place.shape, heads)
        out: Array = self._bring(
            key, pages, slots, place, heads=heads, dim=layout.head_dim,
            most=layout.probe_page_chunks, dtype=self._dtype,
        )  # fmt: skip
        return out

    def merge(
        self, first: Float[Array, "T H D"], second: Float[Array, "T H D"], cut: int
    ) -> Float[Array, "T H D"]:
        """The tokens of `first` before `cut`, those of `second` from there on."""
        out: Array = self._merge(first.shape, first, second, np.int32(cut))
        return out


def _bring_of(target: Target) -> Callable[..., Array]:
    def bring(
        pages: Array, slots: Array, place: Array, *, heads: int | None, dim: int, most: int,
        dtype: jnp.dtype,
    ) -> Array:  # fmt: skip
        chunk, row = pages.shape[-2:]
        held = row // dim if heads is None else heads  # of this device
        size, one = math.prod(pages.shape[1:]), chunk * held * dim  # of a page; of a chunk in it
        page, within = place // most, place % most
        slot = jnp.where(place >= 0, slots[page], -1)
        if target.platform == "tpu":  # tiles: seen as other rows, the whole pool would be copied
            whole = gather(pages, slots[None], target=target)[0].reshape(len(slots), size)
            rows = whole[:, : most * one].reshape(-1, one)
            table = jnp.where(slot >= 0, place, -1)[:, None]
        else:
            unit = math.gcd(size, one)
            rows = pages.reshape(-1, unit)
            first = slot * (size // unit) + within * (one // unit)
            step = jnp.arange(one // unit, dtype=jnp.int32)
            table = jnp.where(slot[:, None] >= 0, first[:, None] + step[None], -1)
        keys = gather(rows, table, target=target)  # [M, one // unit, unit]
        return as_bits(keys.reshape(-1, held, dim), dtype)

    return bring


def _merged(first: Array, second: Array, cut: Array) -> Array:
    before = jnp.arange(first.shape[0]) < cut
    return jnp.where(before[:, None, None], first, second)
