"""Decode windows: the packs that stay in device slots between tokens, per sequence and batch.

A window holds the chunks that recent tokens of one row selected, a row being what shares a
selection: a sequence, or one KV head of it. What leaves it (KVDrive §5) is a pure function of
device arrays, so that the call that selects also finds hits and victims, and the host learns only
what must be fetched. No answer depends on it: whatever leaves, a selected chunk is in its slot
before it is attended. `RowSelector` and `PrefixRows` are the rows of a batch that select.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ckv_jax.buckets import batch_bucket
from ckv_jax.kernels_pallas.score import best
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.tiers import counted
from ckv_jax.trace import TokenTrace

FREE = -1
"""A slot that holds nothing yet."""
CLOSED = -2
"""A slot that its row may not use: rows of one window may be of different widths."""
Tables = Int32[np.ndarray, "Q B N"]
"""What a period's layer groups attend to, see `Layers.run`."""


class Kept(NamedTuple):
    """The latest chunks of selections, and what their windows hold: slot by slot, as the device has
    it. All int32, with axes before these where there are many selections."""

    ids: np.ndarray
    """[N]: chunks of the latest selection, ascending, -1 past its end."""
    chunk: np.ndarray
    """[W]: see `WindowArrays`, as are the others."""
    last: np.ndarray
    uses: np.ndarray

    @classmethod
    def nothing(cls, *shape: int, count: int = 0, slots: int = 0) -> Kept:
        """Empty selections of at most `count` chunks, in windows of `slots` closed slots."""
        sizes = (count, -1), (slots, CLOSED), (slots, -1), (slots, 0)
        return cls(*(np.full((*shape, size), fill, np.int32) for size, fill in sizes))

    def put(self, kept: Kept) -> None:
        """Takes over others, of as many selections; what has no room here is empty there."""
        for mine, theirs in zip(self, kept, strict=True):
            size = min(mine.shape[-1], theirs.shape[-1])
            mine[..., :size] = theirs[..., :size]

    @property
    def open(self) -> np.ndarray:
        """Number of slots of each window."""
        widths: np.ndarray = (self.chunk != CLOSED).sum(axis=-1)
        return widths


class Window:
    """Pins of one sequence on cached packs, selection by selection (`Plan.selections`: one of each
    period, or of each of its KV heads). Engine thread only.

    Every chunk of a selection that is in the window is pinned in all its layer groups, so
    sequences over one prefix share packs, and what leaves goes back to the caches. A window that
    is not `held` only knows what was selected: its packs come through the pool again for every
    token (`Streaming`).
    """

    def __init__(self, opened: OpenPrefix, memory: Memory, plan: Plan, *, held: bool) -> None:
        self.opened = opened
        self.held = held
        self.kept = Kept.nothing(plan.selections)
        """[selections, ...]; in a batch a view of its row in `BatchWindows`."""
        self._memory = memory
        self._groups = plan.group_table
        self._packs = (self._groups >= 0).sum(axis=1)  # of one chunk

    def select(self, selection: int, ids: np.ndarray) -> None:
        """Begins a selection with these chunks (ascending), which must be cached."""
        assert not self.held or (self.kept.chunk[selection] == CLOSED).all()
        self._begin(selection, ids)
        self._pin(np.full(len(ids), selection), ids)

    def cached(self, selection: int, ids: np.ndarray) -> bool:
        """Whether all packs of these chunks are in device slots now."""
        device, _ = self._memory.tiers.lookup(self._pages(np.full(len(ids), selection), ids))
        return bool((device >= 0).all())

    @property
    def widest(self) -> int:
        """Chunks of the selection that has most."""
        return int((self.kept.ids >= 0).any(axis=0).sum())

    @property
    def excess(self) -> int:
        """Device slots of what is kept beside the latest selections."""
        latest = (self.kept.ids >= 0).sum(axis=1) @ self._packs
        return self.slots_held - int(latest) if self.held else 0

    @property
    def slots_held(self) -> int:
        """Device slots of all that is kept."""
        return int((self.kept.chunk >= 0).sum(axis=1) @ self._packs)

    @property
    def open(self) -> int:
        """Slots of the widest window."""
        return int(self.kept.open.max())

    def ids(self, selection: int) -> np.ndarray:
        """Chunks int [n] of a selection, ascending."""
        ids = self.kept.ids[selection]
        selected: np.ndarray = ids[ids >= 0]
        return selected

    def lengths(self, selection: int) -> np.ndarray:
        """Valid tokens int32 [n] of each of them."""
        lengths: np.ndarray = self.opened.chunk_lengths[self.ids(selection)]
        return lengths

    def attended(self, selections: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Device slots int32 [P, N] of the latest chunks of P selections, in a layer group each,
        and valid tokens; -1 and 0 past their ends."""
        ids = self.kept.ids[selections]
        device, _ = self._memory.tiers.lookup(self.opened.pages(groups[:, None], ids))
        return np.where(ids >= 0, device, -1), np.where(ids >= 0, self.opened.chunk_lengths[ids], 0)

    def resize(self, widths: np.ndarray) -> None:
        """Resizes the window of each selection to `widths` int [selections] slots, at least to its
        latest selection; what was selected longest ago leaves first."""
        if not self.held:
            return
        old = self.kept
        sizes = np.maximum(widths, (old.ids >= 0).sum(axis=1))
        if (sizes == old.open).all():
            return
        age = np.where(_membership(old.chunk, old.ids), np.iinfo(np.int32).max, old.last)
        age = np.where(old.chunk < 0, old.chunk, age)  # what is closed comes last of all
        order = np.argsort(age, axis=1, kind="stable")[:, ::-1]
        order[sizes == old.open] = np.arange(order.shape[1])
        chunk, last, uses = (np.take_along_axis(part, order, axis=1) for part in old[1:])
        selection, slot = np.nonzero((np.arange(order.shape[1]) >= sizes[:, None]) & (chunk >= 0))
        self._unpin(selection, chunk[selection, slot])
        self.kept = Kept.nothing(
            len(sizes), count=old.ids.shape[1], slots=int(sizes.max(initial=0))
        )
        self.kept.put(Kept(old.ids, chunk, last, uses))
        kept, slots = self.kept, np.arange(self.kept.chunk.shape[1])
        opens = (kept.chunk == CLOSED) & (slots < sizes[:, None])
        kept.chunk[opens], kept.last[opens], kept.uses[opens] = FREE, -1, 0
        kept.chunk[slots >= sizes[:, None]] = CLOSED

    def absent(self, opened: OpenPrefix) -> np.ndarray:
        """Chunks int [n] of a longer prefix that a window which holds all of its own lacks: new
        ones, and the last of its own where that is elsewhere now."""
        new = np.arange(self.opened.num_chunks, opened.num_chunks)
        return np.append(self._moved(opened), new)

    def onto(self, opened: OpenPrefix) -> None:
        """Its prefix continues: chunks are those of `opened` from now on, under the same numbers.
        What was partial is elsewhere now, and is let go."""
        moved = self._moved(opened)
        gone = np.isin(self.kept.chunk, moved)
        self._unpin(np.nonzero(gone)[0], self.kept.chunk[gone])
        self.kept.chunk[gone] = FREE
        ids = self.kept.ids
        last = np.iinfo(np.int32).max
        left = np.sort(np.where((ids < 0) | np.isin(ids, moved), last, ids), axis=1)
        ids[:] = np.where(left == last, -1, left)
        self.opened = opened

    def _moved(self, opened: OpenPrefix) -> np.ndarray:
        """Chunks int [n] of its prefix that lie elsewhere in this one, which continues it."""
        first = self.opened.first_page
        return np.flatnonzero(first != opened.first_page[: len(first)])

    def add(self, selection: int, chunks: np.ndarray) -> None:
        """All of these are attended to as well; they must be cached, and no selection follows."""
        self._pin(np.full(len(chunks), selection), chunks)
        self._begin(selection, np.union1d(self.ids(selection), chunks))

    def forget(self) -> None:
        """Lets go of all that is kept; no call may be reading it."""
        selection, slot = np.nonzero(self.kept.chunk >= 0)
        self._unpin(selection, self.kept.chunk[selection, slot])
        self.kept.chunk[selection, slot] = FREE
        self._memory.trim()

    def close(self) -> None:
        """Unpins everything. Idempotent."""
        self.forget()
        self.kept = Kept.nothing(len(self._groups))

    def _begin(self, selection: int, ids: np.ndarray) -> None:
        """A selection is these, and its window has no other slots."""
        room = max(len(ids), *(part.shape[1] for part in self.kept))
        if room > min(part.shape[1] for part in self.kept):
            wider = Kept.nothing(len(self._groups), count=room, slots=room)
            wider.put(self.kept)
            self.kept = wider
        size = len(ids)
        for part, mine, rest in zip(self.kept, (ids, ids, 0, 1), (-1, CLOSED, -1, 0), strict=True):
            part[selection, :size], part[selection, size:] = mine, rest

    def _pages(self, selection: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Page numbers of all packs of chunks [n] of selections [n]."""
        groups = self._groups[selection]
        chunk = np.broadcast_to(chunk[:, None], groups.shape)[groups >= 0]
        return self.opened.pages(groups[groups >= 0], chunk)

    def _pin(self, selection: np.ndarray, chunk: np.ndarray) -> None:
        if self.held:
            self._memory.tiers.pin(self._pages(selection, chunk))

    def _unpin(self, selection: np.ndarray, chunk: np.ndarray) -> None:
        if self.held:
            self._memory.tiers.unpin(self._pages(selection, chunk))


@dataclass(eq=False)
class RowSelector:
    """Selection of one row of a decode batch: how many chunks, and by which scores."""

    limit: int
    """Chunks of a selection."""
    digest: Digest
    """What of its prefix is scored."""
    window: Window
    apart: bool = False
    """Whether it has a call of its own, also where others stand on its prefix."""
    trace: TokenTrace = field(default_factory=TokenTrace)
    """Of the latest token."""
    recent: dict[int, np.ndarray] = field(default_factory=dict)
    """Period -> scores float32 [Q, J, M] of the latest selections, see `token.Recent`; a batch
    has newer ones."""
    age: int = 0
    """Tokens since the latest selection; 0: the next token selects."""

    @property
    def slots(self) -> int:
        """Device slots of a window that holds one selection."""
        return self.limit * self.window.opened.groups

    def widths(self, times: float) -> np.ndarray:
        """Slots int [selections] of its windows, for `times` selections each on average."""
        slots = min(int(self.limit * times + 1e-6), self.window.opened.num_chunks)
        return np.full(len(self.window.kept.ids), slots)


@dataclass(slots=True)
class PrefixRows:
    """Rows of a decode batch that select among the chunks of one prefix."""

    which: int
    """Its place among the batch's prefixes."""
    selectors: list[RowSelector]
    rows: Int32[np.ndarray, " b"]
    """A bucket of places in the batch; those past the selectors' are padding."""
    limits: Int32[np.ndarray, " b"]
    """Chunks that each row selects, 0 of padding."""

    @property
    def opened(self) -> OpenPrefix:
        """The prefix."""
        return self.selectors[0].window.opened


def by_prefix(rows: dict[int, RowSelector]) -> list[PrefixRows]:
    """The selecting rows of a batch, by their places, each with the others of its prefix."""
    found: dict[Hashable, list[int]] = {}
    for place, selector in sorted(rows.items()):
        key = id(selector.window.opened), place if selector.apart else None
        found.setdefault(key, []).append(place)
    prefixes = []
    for which, places in enumerate(found.values()):
        selectors = [rows[place] for place in places]
        padding = [0] * (batch_bucket(len(places)) - len(places))
        limits = [*(selector.limit for selector in selectors), *padding]
        mine = np.array([[*places, *padding], limits], np.int32)
        prefixes.append(PrefixRows(which, selectors, *mine))
    return prefixes


class WindowPacks(NamedTuple):
    """Packs of chunks in windows, one a layer group; parallel arrays int [n]."""

    place: np.ndarray
    """The row, by its place in the batch."""
    selection: np.ndarray
    slot: np.ndarray
    """The window slot."""
    chunk: np.ndarray
    column: np.ndarray
    """The layer group, by its place among those of the selection."""
    group: np.ndarray
    page: np.ndarray

    def where(self, some: np.ndarray) -> WindowPacks:
        """Those of a mask."""
        return WindowPacks(*(part[some] for part in self))


class BatchWindows:
    """The windows of all rows of a decode batch: one array operation serves all rows of a period.

    What a sequence's `Window` keeps is a view of these arrays, until it is resized or joins another
    batch. Engine thread only.
    """

    def __init__(
        self, windows: Mapping[int, Window], kept: Kept, memory: Memory, plan: Plan
    ) -> None:
        """`windows`: by their places among the batch's rows; `kept`: nothing yet, with room for
        what each row's window holds."""
        self.kept = kept
        """[rows, selections, ...]"""
        self.held = all(window.held for window in windows.values())
        self.groups = plan.group_table
        self.device = np.full((*kept.chunk.shape, self.groups.shape[1]), -1, np.int32)
        """Device slots [rows, selections, W, G] of what each window slot holds."""
        self._tiers = memory.tiers
        chunks = max(window.opened.num_chunks for window in windows.values())
        self._first, self._stride = np.zeros((2, len(kept.ids), chunks), np.int64)
        self.lengths = np.zeros((len(kept.ids), chunks), np.int32)
        """Valid tokens of each chunk of each row's prefix."""
        for place, window in windows.items():
            mine = Kept(*(part[place] for part in self.kept))
            mine.put(window.kept)
            window.kept, opened = mine, window.opened
            self._first[place, : opened.num_chunks] = opened.first_page
            self._stride[place, : opened.num_chunks] = opened.page_stride
            self.lengths[place, : opened.num_chunks] = opened.chunk_lengths
        self.slots = np.full(self.kept.ids.shape, -1, np.int32)
        """The window slot of each of `kept.ids`, once a token has selected, or after `find`."""
        if self.held:
            held, selection, slot = np.nonzero(self.kept.chunk >= 0)
            packs = self.packs(held, selection, slot, self.kept.chunk[held, selection, slot])
            self.put(packs, self._tiers.lookup(packs.page)[0])

    def to_device(self, selections: range) -> WindowArrays:
        """What the device knows of these selections' windows, of `rows * selections` rows."""
        mine = slice(selections.start, selections.stop)
        parts = [part[:, mine].reshape(-1, part.shape[2]) for part in self.kept[1:]]
        state = np.stack(parts) if self.held else np.full_like(parts, CLOSED)
        return WindowArrays(*map(jax.device_put, state))

    def from_device(self, selections: range, window: WindowArrays) -> None:
        """Takes over when and how often the chunks in these selections' windows were selected."""
        mine = slice(selections.start, selections.stop)
        for part, known in ((self.kept.last, window.last), (self.kept.uses, window.uses)):
            part[:, mine] = np.asarray(known).reshape(part[:, mine].shape)

    def packs(
        self, place: np.ndarray, selection: np.ndarray, slot: np.ndarray, chunk: np.ndarray
    ) -> WindowPacks:
        """All packs of chunks int [n] in window slots, or on their way to them."""
        groups = self.groups[selection]
        at, column = np.nonzero(groups >= 0)
        place, chunk, group = place[at], chunk[at], groups[at, column]
        page = self._first[place, chunk] + group * self._stride[place, chunk]
        return WindowPacks(place, selection[at], slot[at], chunk, column, group, page)

    def find(self) -> None:
        """Finds the window slots of the latest selections."""
        place, selection, slot = np.nonzero(self.kept.chunk >= 0)
        slots = np.full((*self.slots.shape[:2], self.lengths.shape[1] + 1), -1, np.int32)
        slots[place, selection, self.kept.chunk[place, selection, slot]] = slot
        self.slots[:] = np.take_along_axis(slots, self.kept.ids, axis=2)

    def attended(self, places: np.ndarray, selections: range, tables: Tables) -> Tables:
        """The `tables` of a period, with what the rows in `places` selected latest for each of its
        `selections`: device slots and valid tokens, -1 and 0 past the ends."""
        tables, per_period = tables.copy(), len(selections)
        count = min(tables.shape[2], self.kept.ids.shape[2])
        mine = places[:, None], np.arange(selections.start, selections.stop)
        ids, slots = self.kept.ids[mine][:, :, :count], self.slots[mine][:, :, :count]
        found = self.device[(*(part[:, :, None] for part in np.broadcast_arrays(*mine)), slots)]
        found = np.where(slots[..., None] >= 0, found, -1).transpose(3, 1, 0, 2)  # [G, J, b, n]
        valid = np.where(ids >= 0, self.lengths[places[:, None, None], ids], 0)
        slots_of = tables[:-per_period].reshape(-1, per_period, *tables.shape[1:])  # [G, J, B, N]
        slots_of[:, :, places, :count] = found[: len(slots_of)]
        tables[-per_period:, places, :count] = valid.transpose(1, 0, 2)
        return tables

    def evict(self, place: np.ndarray, selection: np.ndarray, slot: np.ndarray) -> None:
        """Lets go of what is in window slots int [n], some of which may be free."""
        chunk = self.kept.chunk
        gone = chunk[place, selection, slot]
        full = gone >= 0
        if full.any():
            place, selection, slot = place[full], selection[full], slot[full]
            self._tiers.unpin(*counted(self.packs(place, selection, slot, gone[full]).page))
            chunk[place, selection, slot] = FREE

    def put(self, packs: WindowPacks, slots: np.ndarray) -> None:
        """Packs are in these device slots int [n]."""
        self.device[packs.place, packs.selection, packs.slot, packs.column] = slots


def _membership(chunk: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool [R, W]: which of `chunk` [R, W] are among the `ids` [R, N] of their row."""
    rows, most = np.arange(len(chunk))[:, None], int(max(chunk.max(initial=0), ids.max(initial=0)))
    selected = np.zeros((len(chunk), most + 2), bool)  # the last one is that of what is below 0
    selected[rows, np.where(ids < 0, most + 1, ids)] = True
    selected[:, -1] = False
    among: np.ndarray = selected[rows, np.where(chunk < 0, most + 1, chunk)]
    return among


# -- what leaves, on the device --------------------------------------------------------------------


class StepSelection(NamedTuple):
    """Chunks that one token of each row attends to."""

    ids: Int32[Array, "R N"]
    """Distinct selected chunks, -1 past a row's limit."""
    scores: Float32[Array, "R M"]
    """The score of every chunk, higher is better; no NaN."""


class WindowArrays(NamedTuple):
    """Windows of each row, for the layers that share its selections."""

    chunk: Int32[Array, "R W"]
    """The chunk in each slot; FREE; CLOSED."""
    last: Int32[Array, "R W"]
    """The step that last selected it, below 0 for none."""
    uses: Int32[Array, "R W"]
    """Number of selections since the chunk entered the window."""


class Moves(NamedTuple):
    """What one step asks for. Chunk `misses[r, i]` has to be fetched into slot `table[r, i]`."""

    table: Int32[Array, "R N"]
    """The slot of each selected chunk, -1 past a row's limit."""
    misses: Int32[Array, "R N"]
    """The selected chunk where it was not in the window, else -1."""


Keep = Callable[[Float32[Array, "R W"], WindowArrays, StepSelection], Float32[Array, "R W"]]
"""(this step's score of each resident, the window before the step, the selection) -> its worth.

The lowest leaves first; of equal worth the one that was selected longest ago, then the lower slot.
What stands in slots that are free, closed or selected now does not matter. A way of keeping is a
function of this form.
"""


@partial(jax.jit, static_argnames=("keep", "target"))
def advance(
    window: WindowArrays,
    selection: StepSelection,
    step: Int32[Array, ...],
    keep: Keep,
    target: Target | None = None,
) -> tuple[WindowArrays, Moves]:
    """The window after a step has selected, and what the step has to fetch.

    What is selected stays or comes; it takes free slots first, then those of the lowest worth among
    what is not selected now. `step`, one number or [R, 1], counts from 0 and rises. A row must not
    select more chunks than its window has open slots. `target`: what the call is compiled for;
    None: any device.
    """
    rows, width = window.chunk.shape
    chunks = selection.scores.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    slot = jnp.arange(width, dtype=jnp.int32)[None, :]
    held = jnp.where(window.chunk < 0, chunks, window.chunk)
    spot = jnp.full((rows, chunks + 1), -1, jnp.int32).at[row, held].set(slot)
    hit = jnp.where(selection.ids < 0, -1, jnp.take_along_axis(spot, selection.ids, axis=1))
    missing = (selection.ids >= 0) & (hit < 0)
    worst = _victims(window, selection, hit, keep, target)
    turn = jnp.cumsum(missing, axis=1) - 1  # of those that are missing
    table = jnp.where(missing, jnp.take_along_axis(worst, turn, axis=1), hit)
    touched = jnp.where(table < 0, width, table)  # past the last slot: dropped
    before = jnp.take_along_axis(window.uses, table, axis=1)
    after = WindowArrays(
        chunk=window.chunk.at[row, touched].set(selection.ids, mode="drop"),
        last=window.last.at[row, touched].set(step, mode="drop"),
        uses=window.uses.at[row, touched].set(jnp.where(missing, 1, before + 1), mode="drop"),
    )
    return after, Moves(table=table, misses=jnp.where(missing, selection.ids, -1))


def _victims(
    window: WindowArrays, selection: StepSelection, hit: Array, keep: Keep, target: Target | None
) -> Int32[Array, "R n"]:
    """Slots of each row in the order in which they are taken; never to be taken ones at the end."""
    rows, width = window.chunk.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    selected = jnp.zeros((rows, width), bool)
    selected = selected.at[row, jnp.where(hit < 0, width, hit)].set(True, mode="drop")
    now = jnp.take_along_axis(selection.scores, window.chunk, axis=1)
    worth = jnp.where(window.chunk == FREE, -jnp.inf, keep(now, window, selection))
    worth = jnp.where(selected | (window.chunk == CLOSED), jnp.inf, worth)
    # A free slot was never selected: its -1 puts it before residents whose worth is -inf, too.
    most = min(selection.ids.shape[1], width)
    return best(-worth, most, window.last, target=target)[1]


def lookahead(now: Array, window: WindowArrays, selection: StepSelection) -> Array:
    """The current step's score, of all residents: what nearly was selected stays (KVDrive §5.1)."""
    return now
