"""Exact keys that select, read like packs: what ContiguousKV and IMPRESS share.

They are in arrays of their own, in pages of a pack's size, which the caches hold as they hold
packs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ckv_jax.buckets import probe_bucket
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import PAGES, PROBE, WHOLE
from ckv_jax.pipeline.layers import PoolPages
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.landing import landing_for
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.layout import PLAIN, Layout
from ckv_jax.storage.prefix import Prefix, ProbePages
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace


@dataclass(frozen=True, slots=True)
class KeyPages:
    """Cache pages of a prefix's keys; a chunk is a page, a group a row of `Layout.probe_layers`."""

    held: ProbePages
    first_page: np.ndarray
    """int64 [N]: page of (row 0, page)."""
    page_stride: np.ndarray
    """int64 [N]: pages from one row to the next."""

    def of(self, row: int | np.ndarray) -> np.ndarray:
        """Page numbers (int64) of one row, or of a column of rows."""
        found: np.ndarray = self.first_page + row * self.page_stride
        return found


class PagedKeys:
    """The keys of prefixes for one engine: their pages in its caches, and the jitted call that
    takes them from its pool."""

    def __init__(self, worker: Worker) -> None:
        layers = worker.layers
        self.worker = worker
        self.landing = worker.landing
        """Of pages, which no codec encodes."""
        if worker.system.coder is not None:
            plain = replace(worker.runtime.layout, codec=PLAIN, codec_bytes=0)
            self.landing = landing_for(worker.memory, plain, host_bytes=worker.host_bytes)
            worker.landings.append(self.landing)
        self._dtype = layers.dtype
        bring = layers.split(layers.once(_bring_of, layers.target), (PAGES, WHOLE, WHOLE), PROBE)
        self._bring = layers.programs.jit(bring, static=("heads", "dim", "most", "dtype"))
        self._segments: dict[str, dict[tuple[int, int] | None, tuple[int, int]]] = {}
        """Of each segment (first page, pages): None: the pages that it is cut into itself; those of
        (first chunk, chunks) that some prefix cuts otherwise."""
        self._known: WeakKeyDictionary[OpenPrefix, KeyPages] = WeakKeyDictionary()
        worker.prefixes.more_pages.append(self._all_pages)
        worker.prefixes.forgotten.append(self._forget)

    def pages(self, opened: OpenPrefix) -> KeyPages:
        """Pages of a prefix's keys; what they are worth is not persisted."""
        if opened not in self._known:
            self._known[opened] = self._register(opened.prefix)
        return self._known[opened]

    def _all_pages(self, opened: OpenPrefix) -> np.ndarray:
        rows = np.arange(len(opened.prefix.layout.probe_layers))
        return self.pages(opened).of(rows[:, None]).reshape(-1)

    def _register(self, prefix: Prefix) -> KeyPages:
        held, layout = ProbePages(prefix), prefix.layout
        first, stride = np.zeros((2, len(held)), np.int64)
        for page in range(len(held)):
            span = prefix.spans[int(held.span[page])]
            known = self._segments.setdefault(span.segment_id, {})
            whole = held.whole(page)
            key = None if whole else (int(held.first[page]), int(held.chunks[page]))
            stride[page] = -(-span.segment_chunks // layout.probe_page_chunks) if whole else 1
            if key not in known:
                count = len(layout.probe_layers) * int(stride[page])
                known[key] = self.worker.memory.tiers.register(count), count
            first[page] = known[key][0]
            if whole:
                first[page] += held.first[page] // layout.probe_page_chunks
        return KeyPages(held, first, stride)

    def _forget(self, segment_id: str) -> None:
        for first, pages in self._segments.pop(segment_id, {}).values():
            self.worker.memory.tiers.forget(first, pages)

    def of(self, opened: OpenPrefix, trace: Trace, stack: ExitStack) -> KeyProbes:
        """Those of one prefix, for one batch, until `stack` is closed."""
        found = KeyProbes(opened, trace, self)
        stack.callback(found.cancel)
        return found

    def bring(
        self,
        pages: PoolPages,
        slots: Int32[np.ndarray, " N"],
        place: Int32[np.ndarray, " M"],
        layout: Layout,
    ) -> Float[Array, "T H D"]:
        """The keys of M chunks, T = M * C: chunk m is at `place[m]` of the pages in `slots`.

        Chunks whose place is -1, or whose page has no slot (-1), are zeros.
        """
        heads = None if layout.probe == "keys" else layout.probe_heads
        out: Array = self._bring(
            pages, slots, place, heads=heads, dim=layout.head_dim, most=layout.probe_page_chunks,
            dtype=self._dtype,
        )  # fmt: skip
        return out


class KeyProbes(Digest):
    """The keys of one prefix that select, for one batch. What the store cannot give is recomputed.

    Pages of probe keys are entries of the caches as packs are: they take slots of the same budgets,
    under the same policy, and are read only where they are in neither tier.
    """

    def __init__(self, opened: OpenPrefix, trace: Trace, keys: PagedKeys) -> None:
        super().__init__({})
        self._of = opened
        self._worker = keys.worker
        self._plan = keys.worker.plan
        self._trace = trace
        self._keys = keys
        self._cached = keys.pages(opened)
        self._pages = np.arange(len(self._cached.held))
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
        """Says that the selection of `period` is known, and counts the use of its pages: I_j is the
        attention [M] of a page's chunks together, selected or not, as all of its keys took part;
        None: 1."""
        keys = self._held.pop(period, None)
        if keys is None:
            return
        row, held = self._row(period), self._cached.held
        share: np.ndarray = np.ones(len(held))
        if attention is not None:
            page = held.place // held.most
            share = np.bincount(page, weights=attention[: len(page)], minlength=len(held))
        self._worker.memory.tiers.record(self._cached.of(row), share)
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
            self._packs = Packs(
                [ProbeSource(self._of, self._cached)],
                memory=self._worker.memory,
                landing=self._keys.landing,
                prefetcher=self._worker.prefetcher,
                trace=self._trace,
                kind="probe",
            )
        return self._packs

    def _bring(self, row: int) -> Array:
        """Keys [T', K', D] of a row, of which the pool has to have room for all pages."""
        packs, held = self._opened, self._cached.held
        packs.demand(0, row, self._pages)
        slots = np.zeros(probe_bucket(len(held), step=16), np.int32)
        slots[self._pages] = packs.collect(0, row, self._pages, stage="probe_io")
        place = np.full(self._of.probe_chunks, -1, np.int32)
        place[: len(held.place)] = held.place
        return self._keys.bring(self._worker.memory.pool.pages, slots, place, held.prefix.layout)


class ProbeSource:
    """The probe keys of a prefix as packs: read, cached and computed again like any pack.

    See `KeyPages` and `open_prefix.Source`.
    """

    def __init__(
        self, opened: OpenPrefix, pages: KeyPages, store: PrefixReader | None = None
    ) -> None:
        """`store`: what `read_packs` reads by, in any thread; see `reader`."""
        self._of = opened
        self._pages = pages
        self._store = store
        self.prefix, held = opened.prefix, pages.held
        self.first_page = pages.first_page
        self.page_stride = pages.page_stride
        self.groups = len(opened.prefix.layout.probe_layers)
        self.sizes = np.broadcast_to(held.tokens * held.token_bytes, (self.groups, len(held)))

    @property
    def reader(self) -> ProbeSource:
        """The same, bound to the prefix's reader. Engine thread only."""
        return ProbeSource(self._of, self._pages, self._of.reader)

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
        assert self._store is not None
        layer = self.prefix.layout.probe_layers[int(group)]
        return self._store.read_probe_pages(layer, self._pages.held, chunks, out, rows=rows)

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        layout, held = self.prefix.layout, self._pages.held
        keys = self._of.recovered.keys(layout.probe_layers[group])[:, : layout.probe_heads]
        out = np.zeros((len(chunks), *layout.pack_shape), layout.numpy_dtype)
        flat = out.reshape(len(chunks), -1)
        for row, page in enumerate(chunks.tolist()):
            start = int(held.start[page])
            part = keys[start : start + int(held.tokens[page])]
            flat[row, : part.size] = part.reshape(-1)
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
