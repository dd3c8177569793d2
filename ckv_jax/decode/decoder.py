"""The decoder: computes one token for every row of a batch, over any prefixes.

A row attends to the packs of its window, to its suffix, and to what was generated. Rows join and
leave between tokens; shapes change only when a buffer doubles or the batch does. A single row whose
packs the device has no room for reads them for every token (`Streaming`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ckv_jax.buckets import batch_bucket, chunk_bucket
from ckv_jax.decode.selection import DecodeSelection, Extend
from ckv_jax.decode.window import Window
from ckv_jax.model.sampling import SamplingArrays
from ckv_jax.model.shardings import HEADS
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.pieces import Piecewise
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits
from ckv_jax.prefix.tiers import PoolExhausted

LEAST_ROWS = 64
_NO_TABLE = np.zeros((2, 0, 0), np.int32)


def rows_bucket(tokens: int) -> int:
    """Rows of a buffer that holds `tokens`: powers of two from 64."""
    return max(LEAST_ROWS, 1 << (tokens - 1).bit_length())


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
        self._tables: dict[int, np.ndarray] = {}
        """Period -> what rows attend to that do not select, see `_table`."""
        self._placed: dict[int, ArrayLike] = {}
        """Step -> the same on the device, where no row selects."""

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
        self._forget_tables()
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
            one = self._alone(kv, source, row.length)
            if not self._buffers and len(self.rows) == 1:
                self._buffers = one
                continue
            if not self._buffers:
                which = np.zeros(len(self.rows), np.int32)
                self._buffers = [self._kv_rows.take(step, which) for step in one]
            self._put(self._buffers, one, place)
        for place, (_, row) in zip(places, joining, strict=True):  # a raise leaves the rows alone
            self.rows[place] = row
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
        for length in {1, min(suffix, self.capacity - 1)}:
            self._put(buffers, self._alone(kv, 0, length), 0)

    def leave(self, places: Sequence[int]) -> dict[int, int]:
        """Rows are done. Halves the batch, as often as those left fit: new places by old ones."""
        for place in places:
            self.rows[place] = None
        self._forget_tables()
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
        self._forget_tables()
        rows = rows_bucket(max(row.length for row in self.rows if row is not None) + 1)
        self._buffers = [self._kv_rows.shift(kv, place, tokens) for kv in self._buffers]
        if rows < self.capacity:
            self._buffers = [self._kv_rows.resize(kv, rows) for kv in self._buffers]

    def step(
        self,
        tokens: np.ndarray | Array,
        *,
        selection: DecodeSelection | None = None,
        sampling: tuple[SamplingArrays, np.ndarray] | None = None,
    ) -> tuple[Array, np.ndarray | Array | None]:
        """Logits float32 [B, V] after one more token int32 [B] a row; of no meaning for no row.

        `selection`: what selects for rows before each period. `sampling`: how each row samples, and
        how many tokens int32 [B] it has generated. Also returns what it sampled, int32 [B], where
        that was computed with the rest.
        """
        with self._streaming.token() if self._streaming is not None else nullcontext():
            self.reserve(max([row.length for row in self.rows if row is not None]) + 1)
            start = np.array([row.start + row.length if row else 0 for row in self.rows], np.int32)
            at = np.array([row.length if row else 0 for row in self.rows], np.int32)
            start, at = self._layers.put((start, at))
            pool, capacity = self._memory.pool, self.capacity
            count = self._plan.selections_per_period
            first, made, selects = 0, None, False
            if selection is not None:
                selection.begin(len(self.rows))
                selects = not selection.keeps
                if selects:
                    self._placed.clear()
                looks_up = (
                    selects and self._streaming is None and selection.finds_all(len(self.live))
                )
                if looks_up and sampling:
                    made = selection.token(tokens, start, at, self._buffers, *sampling)
            if made is None:
                hidden = self._layers.embed(tokens)
            else:
                first, hidden = made[0], made[1].hidden
            for number, period in enumerate(self._plan.by_period[first:], first):
                if self._streaming is None and number not in self._tables:
                    self._tables[number] = self._table(number, selection)
                tables = self._tables.get(number, _NO_TABLE)
                if selection is not None and selects:
                    tables = selection.select(number, hidden, start, tables)
                elif selection is not None and period.steps[0].index not in self._placed:
                    tables = selection.attended(number, tables)
                for step in period.steps:
                    buffers = self._buffers[step.index]
                    extend = None if selection is None else selection.extend(step)
                    if self._streaming is not None:
                        row = self.rows[0]
                        assert row is not None and row.window is not None
                        hidden, self._buffers[step.index] = self._streaming.run(
                            step, row.window, hidden, start, at, buffers,
                            selects=selects, extend=extend,
                        )  # fmt: skip
                        continue
                    table = self._placed.get(step.index)
                    if table is None:
                        mine = step.groups.start - period.steps[0].groups.start
                        table = tables
                        if len(period.steps) > 1:
                            own = tables[mine : mine + len(step.groups)]
                            table = np.concatenate([own, tables[-count:]])
                        if not selects:  # it stays, and calls take it from there
                            table = self._placed[step.index] = jax.device_put(table)
                    hidden, self._buffers[step.index] = (extend or self._layers.extend)(
                        step.layers, hidden, start, buffers, at, pool.pages, table,
                        context=capacity, selections=count,
                    )  # fmt: skip
                if selection is not None:
                    selection.dispatched(number)
            if made is not None and first == self._plan.periods:
                logits, sampled = made[1].logits, made[1].sampled
            else:
                logits, _ = self._layers.head(hidden, np.zeros(len(self.rows), np.int32))
                sampled = None
            if selection is not None:  # while the device computes
                selection.finish()
            for row in self.rows:
                if row is not None:
                    row.length += 1
            return logits, sampled

    def kv(self, place: int, first: int) -> np.ndarray:
        """Host copy [L, 2, n, K, D] of one row's keys and values from position `first` on."""
        row = self.rows[place]
        assert row is not None
        rows = np.concatenate(
            [self._kv_rows.read(kv, place, first - row.start, row.length) for kv in self._buffers]
        )
        return rows.reshape(*rows.shape[:3], -1, self._layers.config.head_dim)

    def _table(self, period: int, selection: DecodeSelection | None) -> np.ndarray:
        """The table int32 [P + J, B, N] of a period's layer groups, see `Layers.run`; where rows
        select, only room for them."""
        windows = [row.window for row in self.rows if row is not None and row.window]
        widest = max([window.widest for window in windows], default=0)
        if selection is not None:
            widest = max(widest, selection.widest)
        chunks = max([window.opened.num_chunks for window in windows], default=0)
        shape = (len(self.rows), chunk_bucket(widest, chunks))
        groups = self._plan.by_period[period].groups.T.reshape(-1)
        selections = self._plan.selections_per_period
        tables = np.full((len(groups) + selections, *shape), -1, np.int32)
        slots, lengths = tables[: len(groups)], tables[len(groups) :]
        lengths[:] = 0
        which = np.arange(len(groups)) % selections
        for place, row in enumerate(self.rows):
            if row is None or row.window is None:
                continue
            if selection is not None and place in selection.rows:
                continue
            device, valid = row.window.attended(period * selections + which, groups)
            count = min(shape[1], device.shape[1])
            slots[:, place, :count] = device[:, :count]
            lengths[which, place, :count] = valid[:, :count]
        return tables

    def _forget_tables(self) -> None:
        self._tables.clear()
        self._placed.clear()

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


class Streaming:
    """Runs the steps of a single row whose window is not held. Engine thread only.

    While a step computes, the packs of the next one are read, where the pool has room for four
    such steps (FlexGen's schedule of one batch).
    """

    def __init__(
        self, layers: Layers, memory: Memory, plan: Plan, packs: Callable[[], Packs]
    ) -> None:
        """`packs`: opens the packs of the row's prefix, for one token."""
        self._layers = layers
        self._memory = memory
        self._plan = plan
        self._open = packs
        self._pieces = Piecewise(layers, memory)
        self._packs: Packs | None = None

    @contextmanager
    def token(self) -> Iterator[None]:
        """All steps of one token run within this."""
        with self._open() as packs:
            self._packs = packs
            try:
                yield
            finally:
                self._packs = None

    def run(
        self, step: Step, window: Window, hidden: Array, start: np.ndarray, at: np.ndarray,
        buffers: LayerKv, *, selects: bool, extend: Extend | None = None,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        """`Layers.extend` of a step over the packs of row 0, or what a system has in its place.

        `selects`: each period has its own selection, which is not known before that period. Raises
        `PoolExhausted` where the pool has no room for the packs that a system's own attends to.
        """
        packs, plan = self._packs, self._plan
        assert packs is not None
        selections = plan.selections_of(step.period)
        widest = max(len(window.ids(selection)) for selection in selections)
        size = chunk_bucket(widest, window.opened.num_chunks)
        selected = np.full((plan.selections_per_period, len(at), size), -1, np.int32)
        lengths = np.zeros(selected.shape, np.int32)
        for which, selection in enumerate(selections):
            ids = window.ids(selection)
            selected[which, 0, : len(ids)] = ids
            lengths[which, 0, : len(ids)] = window.lengths(selection)
        if not self._fits(step, window):
            if extend is not None:
                raise PoolExhausted(
                    f"got a step of {window.widest} chunks for each of {len(step.groups)} layer "
                    "groups, expected room for all of them: raise device_cache_bytes"
                )
            owners = np.where(np.arange(len(at)) == 0, 0, -1)
            return self._pieces.run(
                start, packs, step, selected, lengths, owners, hidden, buffers=buffers, at=at
            )
        following = [  # before the demands, which take from the room that is left
            then
            for then in plan.steps[step.index + 1 : step.index + 2]
            if (then.period == step.period or not selects) and self._fits(then, window)
        ]
        slots = np.full((len(step.groups), len(at), size), -1, np.int32)
        for group in step.groups:
            packs.demand(0, group, window.ids(plan.selection_of(step, group)))
        for place, group in enumerate(step.groups):
            ids = window.ids(plan.selection_of(step, group))
            slots[place, 0, : len(ids)] = packs.collect(0, group, ids)
        for then in following:
            for group in then.groups:
                packs.ahead(0, group, window.ids(plan.selection_of(then, group)), early=True)
        hidden, buffers = (extend or self._layers.extend)(
            step.layers, hidden, start, buffers, at, self._memory.pool.pages,
            np.concatenate([slots, lengths]), context=buffers[0][0].shape[1],
            selections=plan.selections_per_period,
        )  # fmt: skip
        for group in step.groups:
            packs.give_up(0, group, hidden)
        return hidden, buffers

    def _fits(self, step: Step, window: Window) -> bool:
        """Whether the pool has room for all packs of a step."""
        ids = (window.ids(self._plan.selection_of(step, group)) for group in step.groups)
        return sum(map(len, ids)) <= self._memory.step_slots


class KvRows:
    """Makes, grows, joins, thins out and reads the decode buffers of one model."""

    def __init__(self, layers: Layers) -> None:
        self._dtype = layers.kv_dtype
        jit = layers.programs.jit
        self._resize: Callable[..., LayerKv] = jit(_resize, static=("rows", "dtype"))
        self._pick: Callable[..., LayerKv] = jit(_pick, static=("rows", "dtype"))
        self._put: Callable[..., LayerKv] = jit(_put, donate=("buffers",))
        self._take: Callable[..., LayerKv] = jit(_take)
        self._shift: Callable[..., LayerKv] = jit(_shift, donate=("buffers",))
        self._read = jit(_read)

    def resize(self, kv: LayerKv, rows: int) -> LayerKv:
        """A copy with `rows` rows in the pool's element type; rows past the old end are zero."""
        return self._resize(kv, rows=rows, dtype=self._dtype)

    def pick(self, kv: LayerKv, batch_row: int, rows: int) -> LayerKv:
        """One row of the batch, [1, rows, K*D] each, in the pool's element type."""
        return self._pick(kv, np.int32(batch_row), rows=rows, dtype=self._dtype)

    def put(self, buffers: LayerKv, one: LayerKv, batch_row: int) -> LayerKv:
        """(Donated) `buffers` with a row from `pick` in place of row `batch_row`."""
        return self._put(buffers, one, np.int32(batch_row))

    def take(self, kv: LayerKv, batch_rows: np.ndarray) -> LayerKv:
        """Only these rows of the batch (they may repeat)."""
        return self._take(kv, batch_rows)

    def shift(self, buffers: LayerKv, batch_row: int, tokens: int) -> LayerKv:
        """(Donated) `buffers` in which one row of the batch begins `tokens` tokens later."""
        return self._shift(buffers, np.int32(batch_row), np.int32(tokens))

    def read(self, kv: LayerKv, batch_row: int, first: int, stop: int) -> np.ndarray:
        """Host copy [layers, 2, stop - first, K*D] of one row of the batch."""
        out = np.asarray(self._read(kv, np.int32(batch_row)))
        return out[:, :, first:stop].copy()


def _grown(rows: int, size: int) -> np.ndarray:
    """Rows of a batch that grows: its own, and as many copies of the last as it takes."""
    return np.minimum(np.arange(size), rows - 1).astype(np.int32)


def _fitted(x: Array, rows: int, dtype: jnp.dtype) -> Array:
    x = as_bits(x, dtype)
    return jnp.pad(x[:, :rows], ((0, 0), (0, max(0, rows - x.shape[1])), (0, 0)))


def _each(function: Callable[..., Array], *kv: LayerKv) -> LayerKv:
    """`function` of every array of some buffers."""
    made: LayerKv = jax.tree.map(function, *kv)
    return made


def _resize(kv: LayerKv, *, rows: int, dtype: jnp.dtype) -> LayerKv:
    return _each(lambda x: _fitted(x, rows, dtype), kv)


def _pick(kv: LayerKv, batch_row: Array, *, rows: int, dtype: jnp.dtype) -> LayerKv:
    return _each(lambda x: _fitted(_row(x, batch_row), rows, dtype), kv)


def _put(buffers: LayerKv, one: LayerKv, batch_row: Array) -> LayerKv:
    return _each(lambda buffer, row: _set_row(buffer, row, batch_row), buffers, one)


def _shift(buffers: LayerKv, batch_row: Array, tokens: Array) -> LayerKv:
    def shift(buffer: Array) -> Array:
        later = jnp.roll(_row(buffer, batch_row), -tokens, axis=1)
        return _set_row(buffer, later, batch_row)  # what comes round is past the row's end

    return _each(shift, buffers)


def _take(kv: LayerKv, batch_rows: Array) -> LayerKv:
    return _each(lambda x: jnp.take(x, batch_rows, axis=0), kv)


def _read(kv: LayerKv, batch_row: Array) -> Array:
    rows = _each(lambda x: _row(x, batch_row)[0], kv)
    return jnp.stack([jnp.stack(layer) for layer in rows])


def _row(x: Array, batch_row: Array) -> Array:
    row: Array = jax.lax.dynamic_slice_in_dim(x, batch_row, 1, axis=0)
    return row


def _set_row(x: Array, row: Array, batch_row: Array) -> Array:
    kept: Array = jax.lax.dynamic_update_slice_in_dim(x, row, batch_row, axis=0)
    return kept
