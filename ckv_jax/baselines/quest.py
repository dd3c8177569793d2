"""Quest: pages of keys, selected by an upper bound of their attention (`quest`).

Tang et al. 2024 (arXiv 2406.10774), and the authors' evaluation code.

- Index: the least and the greatest value of each dimension of a page's keys. Pages have 8 tokens,
  by which the index is twice ShadowKV's, as KVDrive says of it (§9.3); 16 in Quest's own code.
- Selection: the sum over dimensions of the larger of q·min and q·max, at every token, in every
  layer but the first two. Each KV head selects by itself; its query heads select together.
- Layers 0 and 1 are dense in decode: every token attends to all pages of them (`DenseFirst`).
- Cache: none. In the paper all pages stay on the device. Here a selection's packs are read for
  every token (`HoldNothing`), from what the engine's tiers keep, after all sequences have selected.
  The tiers keep what was used last, so that pages of dense layers stay in memory where it has room.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ckv_jax.baselines.decoding import HoldNothing, decoding, heads_apart, in_every_layer, lru
from ckv_jax.buckets import bucket
from ckv_jax.config import OwnParts
from ckv_jax.decode.selection import Extend
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.tiers import PoolExhausted

DENSE_LAYERS = 2
"""Layers from the first one on in which nothing is selected."""


class DenseFirst(HoldNothing):
    """The first layers attend to everything, a layer's packs at a time."""

    def select(
        self, period: int, hidden: Array, starts: np.ndarray, tables: np.ndarray
    ) -> np.ndarray:
        """See `DecodeSelection.select`; nothing is selected for a dense layer."""
        if period < DENSE_LAYERS:
            return tables
        return super().select(period, hidden, starts, tables)

    def extend(self, step: Step) -> Extend | None:
        return self._attend_all if step.period < DENSE_LAYERS else None

    def finish(self) -> None:
        """See `DecodeSelection.finish`. A token's trace has what dense layers attended to."""
        windows = self._windows.kept.ids
        heads = self._plan.selections_per_period
        stale = (windows[:, : DENSE_LAYERS * heads] >= 0).sum(axis=(1, 2))
        super().finish()
        layers = min(DENSE_LAYERS, self._plan.periods) * heads
        for place, selector in self.rows.items():
            every = layers * selector.window.opened.num_chunks
            hits = selector.trace.device_hits + every - int(stale[place])
            selector.trace = replace(selector.trace, device_hits=hits)

    def _attend_all(
        self, layers: range, hidden: Array, start: ArrayLike, buffers: LayerKv, at: ArrayLike,
        pages: Array, tables: np.ndarray, **static: Any,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        """`Layers.extend` of one layer where rows that select attend to all of their prefixes."""
        heads, sources = self._plan.selections_per_period, self._by_prefix
        groups = np.arange(layers.start * heads, layers.stop * heads)
        chunks = [on.opened.num_chunks for on in sources]
        which = np.repeat(np.arange(len(sources)), chunks)
        chunk = np.concatenate([np.arange(count) for count in chunks])
        wanted = [np.tile(one, heads) for one in (which, chunk)]
        wanted.insert(1, np.repeat(groups, len(chunk)))
        if len(wanted[0]) > self._memory.step_slots:
            raise PoolExhausted(
                f"got {len(wanted[0])} packs of dense layer {layers.start}, expected room for all "
                f"of them in {self._memory.step_slots} slots: raise device_cache_bytes"
            )
        self._count_tiers(*wanted)
        packs = self._opened()
        packs.demand(*wanted)
        found = packs.collect(*wanted).reshape(heads, -1)
        size = max(tables.shape[2], bucket(max(chunks)))
        table = np.full((2 * heads, tables.shape[1], size), -1, np.int32)
        table[heads:] = 0
        table[:, :, : tables.shape[2]] = tables
        ends = np.cumsum(chunks)
        for on, end, count in zip(sources, ends.tolist(), chunks, strict=True):
            rows = on.rows[: len(on.selectors)]
            table[:heads, rows], table[heads:, rows] = -1, 0
            table[:heads, rows, :count] = found[:, None, end - count : end]
            table[heads:, rows, :count] = on.opened.chunk_lengths
        out, buffers = self._runtime.layers.extend(
            layers, hidden, start, buffers, at, self._memory.pool.pages, table, **static
        )
        for place in range(len(sources)):
            for group in groups.tolist():
                packs.give_up(place, group, out)
        return out, buffers

    def _count_tiers(self, which: np.ndarray, group: np.ndarray, chunk: np.ndarray) -> None:
        """Where packs of a dense layer are, for the traces, and that they are used."""
        for on in self._by_prefix:
            mine = which == on.which
            pages = on.opened.pages(group[mine], chunk[mine])
            device, host = self._tiers.lookup(pages)
            for place in on.rows[: len(on.selectors)].tolist():
                self._counts[0, place] += int(((device < 0) & (host >= 0)).sum())
                self._counts[1, place] += int(((device < 0) & (host < 0)).sum())
            self._tiers.record(pages, np.zeros(len(pages)))


QUEST = in_every_layer(
    "quest",
    chunk_tokens=8,
    digest="bounds",
    policy="lru",
    own=OwnParts(layout=heads_apart, decoding=decoding(DenseFirst, keep=lru)),
)
