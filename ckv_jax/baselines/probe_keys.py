"""Exact keys that select, read like packs: what ContiguousKV and IMPRESS share.

They are in arrays of their own, in pages of a pack's size, which the caches hold as they hold
packs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ckv_jax.buckets import probe_bucket
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import PAGES, PROBE, WHOLE
from ckv_jax.pipeline.layers import Layers, Pages
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.landing import Landing
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, ProbePages
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace


class PagedKeys:
    """Opens the keys of prefixes for one engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._keys = ProbeKeys(worker.layers)
        self._landing = worker.plain_landing()

    def of(self, opened: OpenPrefix, trace: Trace) -> KeyProbes:
        """Those of one prefix, for one batch."""
        return KeyProbes(opened, self._worker, trace, keys=self._keys, landing=self._landing)


class KeyProbes(Digest):
    """The keys of one prefix that select, for one batch. What the store cannot give is recomputed.

    Pages of probe keys are entries of the caches as packs are: they take slots of the same budgets,
    under the same policy, and are read only where they are in neither tier.
    """

    def __init__(
        self,
        opened: OpenPrefix,
        worker: Worker,
        trace: Trace,
        *,
        keys: ProbeKeys,
        landing: Landing,
    ) -> None:
        """`landing`: of pages, which no codec encodes."""
        super().__init__({}, turns=False)
        self._of = opened
        self._worker = worker
        self._plan = worker.plan
        self._trace = trace
        self._keys = keys
        self._landing = landing
        assert opened.probe is not None
        self._view = opened.probe
        self._pages = np.arange(len(self._view.held))
        self._packs: Packs | None = None
        self._held: dict[int, Array] = {}  # period -> keys in use

    def ahead(self, period: int) -> None:
        """Starts reading the keys of `period`, unless it is past the last."""
        if period < self._plan.periods:
            self._opened.ahead(0, self._row(period), self._pages, early=True)

    def get(self, layers: Sequence[int], period: int) -> list[Probe]:
        """The keys of the first of these layers of `period`; waits for them."""
        if period not in self._held:
            self._held[period] = self._bring(self._row(period))
        return [Keys(self._held[period])]

    def used(self, period: int, attention: np.ndarray | None = None) -> None:
        """Says that the selection of `period` is known, and counts the use of its pages.

        `attention` [M]: what each chunk got; None: pages are worth alike.
        """
        keys = self._held.pop(period, None)
        if keys is None:
            return
        row = self._row(period)
        self._worker.prefixes.record_probe(self._of, row, attention)
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
        return layers.index(self._plan.by_period[period].steps[0].layers[0])

    @property
    def _opened(self) -> Packs:
        if self._packs is None:
            view, prefix = self._view, self._of.prefix
            rows = len(prefix.layout.probe_layers)
            sizes = view.held.tokens * view.held.token_bytes
            source = ProbeSource(
                of=self._of, held=view.held, prefix=prefix, groups=rows,
                first_page=view.first_page, page_stride=view.page_stride,
                sizes=np.broadcast_to(sizes, (rows, len(sizes))),
            )  # fmt: skip
            self._packs = self._worker.packs([source], self._trace, self._landing)
        return self._packs

    def _bring(self, row: int) -> Array:
        """Keys [T', K', D] of a row, of which the pool has to have room for all pages."""
        packs, held = self._opened, self._view.held
        packs.demand(0, row, self._pages)
        slots = np.zeros(probe_bucket(len(held), step=16), np.int32)
        slots[self._pages] = packs.collect(0, row, self._pages, stage="probe_io")
        place = np.full(self._of.probe_chunks, -1, np.int32)
        place[: len(held.place)] = held.place
        return self._keys.bring(self._worker.memory.pool.pages, slots, place, held.prefix.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSource:
    """The probe keys of a prefix as packs: read, cached and computed again like any pack.

    A group is a row of `Layout.probe_layers`, a chunk a page of `ProbePages`. See
    `open_prefix.Source`.
    """

    of: OpenPrefix
    held: ProbePages
    prefix: Prefix
    groups: int
    first_page: np.ndarray
    page_stride: np.ndarray
    sizes: np.ndarray
    kind: Literal["pack", "probe"] = "probe"
    store: PrefixReader | None = None
    """What `read_packs` reads by, in any thread; see `reader`."""

    @property
    def reader(self) -> ProbeSource:
        """The same, bound to the prefix's reader. Engine thread only."""
        return replace(self, store=self.of.reader)

    @property
    def recovered(self) -> ProbeSource:
        """It makes them itself."""
        return self

    def read_packs(
        self,
        group: int | np.ndarray,
        chunks: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
    ) -> np.ndarray:
        """See `PackReader`; of one row."""
        assert self.store is not None
        layer = self.prefix.layout.probe_layers[int(group)]
        return self.store.read_probe_pages(layer, self.held, chunks, out, rows=rows)

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        layout, held = self.prefix.layout, self.held
        keys = self.of.recovered.keys(layout.probe_layers[group])[:, : layout.probe_heads]
        out = np.zeros((len(chunks), *layout.pack_shape), layout.numpy_dtype)
        flat = out.reshape(len(chunks), -1)
        for row, page in enumerate(chunks.tolist()):
            start = int(held.start[page])
            part = keys[start : start + int(held.tokens[page])]
            flat[row, : part.size] = part.reshape(-1)
        return out


class ProbeKeys:
    """Jitted calls over the pool of one model."""

    def __init__(self, layers: Layers) -> None:
        self._dtype = layers.dtype
        jit, split = layers.programs.jit, layers.split
        bring = layers.once(_bring_of, layers.target)
        self._bring = jit(
            split(bring, (PAGES, WHOLE, WHOLE), PROBE), static=("heads", "dim", "most", "dtype")
        )

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
