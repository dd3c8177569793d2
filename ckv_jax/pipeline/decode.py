"""Decode: one token for every row of a batch, whatever prefix each of them stands on.

A row attends to the packs of its window, to its suffix, and to what was generated. Rows join and
leave between tokens; shapes change only when a buffer doubles or the batch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ckv_jax.buckets import batch_bucket, chunk_bucket
from ckv_jax.memory.memory import Memory
from ckv_jax.model.shardings import HEADS
from ckv_jax.pipeline.choices import Choices
from ckv_jax.pipeline.kv_rows import KvRows, rows_bucket
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.pipeline.streaming import Streaming
from ckv_jax.pipeline.window import Window


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence's part of a decode batch."""

    start: int
    """Position of the first token in the buffers: tokens before it are in packs."""
    length: int
    """Tokens in the buffers so far."""
    window: Window | None
    """None: everything is in the buffers."""


class Decoder:
    """The buffers of a batch of rows, and the calls that add to them. Engine thread only."""

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        plan: Plan,
        rows: KvRows,
        *,
        streaming: Streaming | None = None,
    ) -> None:
        """`streaming`: runs a single row whose window is not held."""
        self.rows: list[Row | None] = []
        self._layers = layers
        self._memory = memory
        self._plan = plan
        self._kv_rows = rows
        self._streaming = streaming
        self._buffers: list[LayerKv] = []
        self._tables: dict[int, tuple[ArrayLike, ArrayLike]] = {}

    @property
    def capacity(self) -> int:
        """R: tokens that the buffers hold before they grow."""
        return int(self._buffers[0][0][0].shape[1]) if self._buffers else 0

    @property
    def live(self) -> list[int]:
        """Places of rows that are in use."""
        return [place for place, row in enumerate(self.rows) if row is not None]

    def join(self, kv: Sequence[LayerKv], joining: Sequence[tuple[int, Row]]) -> list[int]:
        """Adds rows, each with its place in `kv`, a batch's (K, V) [b, S, K*D] step by step.

        Returns the place of each within this batch.
        """
        self._tables.clear()
        suffix = kv[0][0][0].shape[1]
        need = max(max(row.length + 1, suffix) for _, row in joining)
        whole = batch_bucket(len(joining))
        if not self.live and whole == kv[0][0][0].shape[0]:
            self._buffers = [self._kv_rows.resize(step, rows_bucket(need)) for step in kv]
            self.rows = [None] * whole
            for place, row in joining:
                self.rows[place] = row
            return [place for place, _ in joining]
        self.reserve(need)
        places = self._places(len(joining))
        for place, (source, row) in zip(places, joining, strict=True):
            self.rows[place] = row
            one = self._alone(kv, source, row.length)
            if not self._buffers and len(self.rows) == 1:
                self._buffers = one
                continue
            if not self._buffers:
                which = np.zeros(len(self.rows), np.int32)
                self._buffers = [self._kv_rows.take(step, which) for step in one]
            self._put(self._buffers, one, place)
        return places

    def warm_join(self, batch: int, suffix: int, most: int) -> None:
        """Compiles what it takes for rows of a batch of suffixes to join this one, and for it to
        grow to up to `most` rows."""
        config = self._layers.config
        pages = self._memory.pool.pages  # jit tells arrays bound to a device apart
        place = self._layers.shardings.place(HEADS) or (pages.sharding if pages.committed else None)
        row = config.num_kv_heads * config.head_dim

        def zeros(*shape: int, dtype: jnp.dtype) -> Array:
            made: Array = jax.device_put(np.zeros(shape, dtype), place)
            return made

        kv, buffers = (
            [
                tuple(
                    (zeros(*shape, row, dtype=dtype), zeros(*shape, row, dtype=dtype))
                    for _ in step.layers
                )
                for step in self._plan.steps
            ]
            for shape, dtype in (
                ((batch, suffix), self._layers.dtype),
                ((len(self.rows), self.capacity), self._layers.kv_dtype),
            )
        )
        size = 2 * len(self.rows)
        while size <= most:
            for step in buffers:
                self._kv_rows.take(step, _grown(len(self.rows), size))
            size *= 2
        for length in {1, suffix}:
            self._put(buffers, self._alone(kv, 0, length), 0)

    def leave(self, places: Sequence[int]) -> dict[int, int]:
        """Rows are done. Halves the batch, as often as those left fit: new places by old ones."""
        for place in places:
            self.rows[place] = None
        self._tables.clear()
        left = self.live
        if not left:
            self.rows, self._buffers = [], []
            return {}
        size = batch_bucket(len(left))
        if size == len(self.rows):
            return {place: place for place in left}
        self._shrink(left, size)
        return {old: new for new, old in enumerate(left)}

    def reserve(self, tokens: int) -> None:
        """Makes room for so many tokens per row. Doubles the buffers, as often as it takes: each
        size is grown to from one other, which is one program."""
        rows = rows_bucket(tokens)
        while self._buffers and rows > self.capacity:
            more = 2 * self.capacity
            self._buffers = [self._kv_rows.resize(kv, more) for kv in self._buffers]

    def shift(self, place: int, tokens: int) -> None:
        """The first `tokens` of a row's buffers are in packs from now on. Buffers shrink to what
        the rows need."""
        row = self.rows[place]
        assert row is not None
        row.start += tokens
        row.length -= tokens
        self._tables.clear()
        rows = rows_bucket(max(row.length for row in self.rows if row is not None) + 1)
        self._buffers = [self._kv_rows.shift(kv, place, tokens) for kv in self._buffers]
        if rows < self.capacity:
            self._buffers = [self._kv_rows.resize(kv, rows) for kv in self._buffers]

    def step(self, tokens: np.ndarray, *, choices: Choices | None = None) -> Array:
        """Logits float32 [B, V] after one more token int32 [B] a row; of no meaning for no row.

        `choices`: what the rows choose anew before each period.
        """
        with self._streaming.token() if self._streaming is not None else nullcontext():
            return self._step(tokens, choices)

    def _step(self, tokens: np.ndarray, choices: Choices | None) -> Array:
        self.reserve(max(row.length for row in self.rows if row is not None) + 1)
        start = np.array([row.start + row.length if row else 0 for row in self.rows], np.int32)
        at = np.array([row.length if row else 0 for row in self.rows], np.int32)
        hidden = self._layers.embed(tokens[:, None])
        if choices is not None:
            choices.begin()
        for step in self._plan.steps:
            if choices is not None and step.selects:
                choices.choose(step.period, hidden, start, at)
                for other in self._plan.period_steps(step.period):
                    self._tables.pop(other.index, None)
            hidden = self._run(step, hidden, start, at, chooses=choices is not None)
            if choices is not None and step.selects:
                choices.ahead(step.period)
        if choices is not None:
            choices.finish()
        for row in self.rows:
            if row is not None:
                row.length += 1
        logits, _ = self._layers.head(hidden, np.zeros(len(self.rows), np.int32))
        return logits

    def kv(self, place: int, first: int) -> np.ndarray:
        """Host copy [L, 2, n, K, D] of one row's keys and values from position `first` on."""
        row = self.rows[place]
        assert row is not None
        rows = np.concatenate(
            [self._kv_rows.read(kv, place, first - row.start, row.length) for kv in self._buffers]
        )
        return rows.reshape(*rows.shape[:3], -1, self._layers.config.head_dim)

    def _run(
        self, step: Step, hidden: Array, start: np.ndarray, at: np.ndarray, *, chooses: bool
    ) -> Array:
        if self._streaming is not None:
            row = self.rows[0]
            assert row is not None and row.window is not None
            hidden, self._buffers[step.index] = self._streaming.run(
                step, row.window, hidden, start, at, self._buffers[step.index],
                chooses=chooses,
            )  # fmt: skip
            return hidden
        if step.index not in self._tables:
            table = self._table(step)
            # Where rows choose it is soon another, and calls take it as it is in less time.
            self._tables[step.index] = table if chooses else jax.device_put(table)
        slots, lengths = self._tables[step.index]
        hidden, self._buffers[step.index] = self._layers.extend(
            step.layers, hidden, start, self._buffers[step.index], at, self._memory.pool.pages,
            slots, lengths, context=self.capacity,
        )  # fmt: skip
        return hidden

    def _table(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Slots int32 [P, B, N] and valid lengths [B, N] of a step; lengths [K, B, N] where heads
        choose for themselves."""
        windows = [row.window if row is not None else None for row in self.rows]
        widest = max((window.widest for window in windows if window is not None), default=1)
        shape = (len(windows), chunk_bucket(widest))
        slots = np.full((len(step.groups), *shape), -1, np.int32)
        lengths = np.zeros((self._plan.parts, *shape), np.int32)
        groups = np.array(step.groups)
        choices = np.array([self._plan.choice_of(step, group) for group in step.groups])
        parts = choices % self._plan.parts
        for place, window in enumerate(windows):
            if window is not None:
                device, valid = window.attended(choices, groups)
                count = min(shape[1], device.shape[1])
                slots[:, place, :count] = device[:, :count]
                lengths[parts, place, :count] = valid[:, :count]
        return slots, lengths if self._plan.parts > 1 else lengths[0]

    def _alone(self, kv: Sequence[LayerKv], source: int, length: int) -> list[LayerKv]:
        """One row of a batch's (K, V), [1, R, K*D] each, at least as long as the buffers."""
        rows = rows_bucket(max(length + 1, kv[0][0][0].shape[1]))
        one = [self._kv_rows.pick(step, source, rows) for step in kv]
        if rows < self.capacity:
            one = [self._kv_rows.resize(step, self.capacity) for step in one]
        return one

    def _put(self, buffers: list[LayerKv], one: Sequence[LayerKv], place: int) -> None:
        for index, step in enumerate(one):
            buffers[index] = self._kv_rows.put(buffers[index], step, place)

    def _places(self, n: int) -> list[int]:
        """Places for `n` more rows; the batch grows if need be."""
        free = [place for place, row in enumerate(self.rows) if row is None]
        if len(free) < n:
            size = batch_bucket(len(self.rows) - len(free) + n)
            more = size - len(self.rows)
            if self._buffers:
                which = _grown(len(self.rows), size)
                self._buffers = [self._kv_rows.take(kv, which) for kv in self._buffers]
            free += range(len(self.rows), size)
            self.rows += [None] * more
        return free[:n]

    def _shrink(self, left: list[int], size: int) -> None:
        """Goes on with these rows alone, half as many at a time: each size is left for one other,
        which is one program."""
        while size < len(self.rows):
            half = len(self.rows) // 2
            which = np.array(left + left[:1] * (half - len(left)), np.int32)
            self._buffers = [self._kv_rows.take(kv, which) for kv in self._buffers]
            self.rows = [self.rows[place] for place in left] + [None] * (half - len(left))
            left = list(range(len(left)))


def _grown(rows: int, size: int) -> np.ndarray:
    """Rows of a batch that grows: its own, and as many copies of the last as it takes."""
    return np.minimum(np.arange(size), rows - 1).astype(np.int32)
