"""Decode: one token a row and call, over selected chunks, the suffix, and what was generated."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.memory.memory import PagePool
from ckv_jax.pipeline.executor import Context
from ckv_jax.pipeline.kv_rows import KvRows, LayerKv, rows_bucket
from ckv_jax.pipeline.layers import Compute
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.pipeline.reselect import Reselect


class Decoder:
    """The KV of a batch beyond its pages, and the calls that add to it. Engine thread only.

    Packs in the tables must stay in their device slots while the decoder is in use. Shapes change
    only when the buffers double and when rows are dropped.
    """

    def __init__(
        self,
        *,
        compute: Compute,
        rows: KvRows,
        pool: PagePool,
        plan: Plan,
        start: int,
        lengths: np.ndarray,
        buffers: list[LayerKv],
        tables: Sequence[tuple[np.ndarray, np.ndarray]],
        reselect: Reselect | None,
    ) -> None:
        self._compute = compute
        self._rows = rows
        self._pool = pool
        self._plan = plan
        self._start = start
        self._at = lengths.astype(np.int32)
        self._buffers = buffers
        self._tables = [(jnp.asarray(slots), jnp.asarray(valid)) for slots, valid in tables]
        self._reselect = reselect

    @classmethod
    def after(
        cls,
        contexts: Sequence[Context],
        *,
        lengths: np.ndarray,
        start: int,
        compute: Compute,
        rows: KvRows,
        pool: PagePool,
        plan: Plan,
        reselect: Reselect | None,
    ) -> Decoder:
        """Goes on from a re-prefill of suffixes of `lengths` int32 [B] at position `start`."""
        suffix = contexts[0].kv[0][0].shape[1]
        return cls(
            compute=compute,
            rows=rows,
            pool=pool,
            plan=plan,
            start=start,
            lengths=lengths,
            buffers=[rows.resize(context.kv, rows_bucket(suffix + 1)) for context in contexts],
            tables=[(context.slots, context.lengths) for context in contexts],
            reselect=reselect,
        )

    @classmethod
    def dense(
        cls, kv: np.ndarray, *, compute: Compute, rows: KvRows, pool: PagePool, plan: Plan
    ) -> Decoder:
        """Goes on from the KV [L, 2, T, K, D] of one whole sequence, with no pages at all."""
        tokens = kv.shape[2]
        full = np.zeros((*kv.shape[:2], 1, rows_bucket(tokens + 1), *kv.shape[3:]), kv.dtype)
        full[:, :, 0, :tokens] = kv
        no_pages = np.zeros((1, 1), np.int32)
        return cls(
            compute=compute,
            rows=rows,
            pool=pool,
            plan=plan,
            start=0,
            lengths=np.array([tokens], np.int32),
            buffers=[
                tuple((jnp.array(full[i, 0]), jnp.array(full[i, 1])) for i in step.layers)
                for step in plan.steps
            ],
            tables=[
                (np.full((len(step.groups), 1, 1), -1, np.int32), no_pages) for step in plan.steps
            ],
            reselect=None,
        )

    @property
    def start(self) -> int:
        """Position of the buffers' first row: tokens before it are in pages."""
        return self._start

    @property
    def batch(self) -> int:
        """B, padding included."""
        return len(self._at)

    @property
    def rows(self) -> int:
        """R: tokens that the buffers hold before they grow."""
        return int(self._buffers[0][0][0].shape[1])

    def reserve(self, tokens: int) -> None:
        """Makes room for so many tokens a row."""
        rows = rows_bucket(tokens)
        if rows > self.rows:
            self._buffers = [self._rows.resize(kv, rows) for kv in self._buffers]

    def step(self, tokens: np.ndarray, live: np.ndarray, *, reselect: bool = False) -> Array:
        """Logits float32 [B, V] after one more token a row.

        `tokens` int32 [B]; rows that are not `live` (bool [B]) leave their buffers' length as it
        is and their logits mean nothing. With `reselect`, each period chooses its chunks anew.
        """
        self.reserve(int(self._at.max()) + 1)
        hidden = self._compute.embed(tokens[:, None])
        for step in self._plan.steps:
            if step.selects and self._reselect is not None:
                self._watch(step, hidden, reselect)
            slots, lengths = self._tables[step.index]
            hidden, self._buffers[step.index] = self._compute.extend(
                step.layers, hidden, np.int32(self._start) + self._at, self._buffers[step.index],
                self._at, self._pool.pages, slots, lengths, context=self.rows,
            )  # fmt: skip
        self._at = self._at + live.astype(np.int32)
        logits, _ = self._compute.head(hidden, np.zeros(self.batch, np.int32))
        return logits

    def keep(self, batch_rows: np.ndarray) -> None:
        """Goes on with these rows (int32 [n]) of the batch alone."""
        self._buffers = self.thinned(batch_rows)
        self._at = self._at[batch_rows]
        self._tables = [
            (
                jnp.asarray(np.asarray(slots)[:, batch_rows]),
                jnp.asarray(np.asarray(valid)[batch_rows]),
            )
            for slots, valid in self._tables
        ]
        if self._reselect is not None:
            self._reselect.keep(batch_rows, self._rows)

    def thinned(self, batch_rows: np.ndarray) -> list[LayerKv]:
        """Buffers of these rows of the batch alone."""
        return [self._rows.take(kv, batch_rows) for kv in self._buffers]

    def kv(self, batch_row: int, first: int) -> np.ndarray:
        """Host copy [L, 2, n, K, D] of one row's keys and values from position `first` on."""
        stop = int(self._at[batch_row])
        return np.concatenate(
            [self._rows.read(kv, batch_row, first - self._start, stop) for kv in self._buffers]
        )

    def _watch(self, step: Step, hidden: Array, reselect: bool) -> None:
        assert self._reselect is not None
        self._reselect.see(step.period, hidden)
        if reselect:
            newest = np.int32(self._start) + self._at
            for index, slots, lengths in self._reselect.choose(step.period, newest):
                self._tables[index] = (jax.device_put(slots), jax.device_put(lengths))
