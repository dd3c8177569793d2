"""Eviction of decode windows: which chunks stay on the device between tokens (KVDrive §5).

A window holds the chunks that recent tokens of one row selected, a row being what shares a
selection: a sequence, or one KV head of it. Everything is a pure function of device arrays, so that
the call that selects also finds hits and victims, and the host learns only what must be fetched. No
answer depends on it: whatever leaves, a selected chunk is in its slot before it is attended.

A way of keeping is a function of the form `Keep`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

FREE = -1
"""A slot that holds nothing yet."""
CLOSED = -2
"""A slot that its row may not use: rows of one window may be of different widths."""


class StepSelection(NamedTuple):
    """Chunks that one token of each row attends to."""

    ids: Int32[Array, "R N"]
    """Distinct selected chunks, -1 past a row's limit."""
    scores: Float32[Array, "R M"]
    """The score of every chunk, higher is better; no NaN."""


class Window(NamedTuple):
    """Window of each row, for the layers that share its selections."""

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


Keep = Callable[[Float32[Array, "R W"], Window, StepSelection], Float32[Array, "R W"]]
"""(this step's score of each resident, the window before the step, the selection) -> its worth.

The lowest leaves first; of equal worth the one that was selected longest ago, then the lower slot.
What stands in slots that are free, closed or selected now does not matter.
"""


def empty_window(widths: np.ndarray, slots: int) -> Window:
    """A window that holds nothing.

    Args:
      widths: int [R], slots that each row may use: one at least for each chunk of a selection.
      slots: W, the widest row's width at least. More than a row's own stay closed.
    """
    chunk = np.where(np.arange(slots) < widths[:, None], FREE, CLOSED)
    return Window(
        chunk=jnp.asarray(chunk, jnp.int32),
        last=jnp.full(chunk.shape, -1, jnp.int32),
        uses=jnp.zeros(chunk.shape, jnp.int32),
    )


@partial(jax.jit, static_argnames="keep")
def advance(
    window: Window, selection: StepSelection, step: Int32[Array, ...], keep: Keep
) -> tuple[Window, Moves]:
    """The window after a step has selected, and what the step has to fetch.

    What is selected stays or comes; it takes free slots first, then those of the lowest worth among
    what is not selected now. `step`, one number or [R, 1], counts from 0 and rises. A row must not
    select more chunks than its window has open slots (`empty_window`).
    """
    rows, width = window.chunk.shape
    count, chunks = selection.ids.shape[1], selection.scores.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    slot = jnp.arange(width, dtype=jnp.int32)[None, :]
    held = jnp.where(window.chunk < 0, chunks, window.chunk)
    spot = jnp.full((rows, chunks + 1), -1, jnp.int32).at[row, held].set(slot)
    hit = jnp.where(selection.ids < 0, -1, jnp.take_along_axis(spot, selection.ids, axis=1))
    missing = (selection.ids >= 0) & (hit < 0)
    worst = _victims(window, selection, hit, keep)[:, :count]
    turn = jnp.cumsum(missing, axis=1) - 1  # of those that are missing
    table = jnp.where(missing, jnp.take_along_axis(worst, turn, axis=1), hit)
    touched = jnp.where(table < 0, width, table)  # past the last slot: dropped
    before = jnp.take_along_axis(window.uses, table, axis=1)
    after = Window(
        chunk=window.chunk.at[row, touched].set(selection.ids, mode="drop"),
        last=window.last.at[row, touched].set(step, mode="drop"),
        uses=window.uses.at[row, touched].set(jnp.where(missing, 1, before + 1), mode="drop"),
    )
    return after, Moves(table=table, misses=jnp.where(missing, selection.ids, -1))


def _victims(
    window: Window, selection: StepSelection, hit: Array, keep: Keep
) -> Int32[Array, "R W"]:
    """Slots of each row in the order in which they are taken; never to be taken ones at the end."""
    now = jnp.take_along_axis(selection.scores, window.chunk, axis=1)
    worth = jnp.where(window.chunk == FREE, -jnp.inf, keep(now, window, selection))
    worth = jnp.where(_selected(window, hit) | (window.chunk == CLOSED), jnp.inf, worth)
    # A free slot was never selected: its -1 puts it before residents whose worth is -inf, too.
    return jnp.lexsort((window.last, worth), axis=-1).astype(jnp.int32)


def _selected(window: Window, hit: Array) -> Bool[Array, "R W"]:
    rows, width = window.chunk.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    none = jnp.zeros((rows, width), bool)
    return none.at[row, jnp.where(hit < 0, width, hit)].set(True, mode="drop")


def lookahead(now: Array, window: Window, selection: StepSelection) -> Array:
    """The current step's score, of all residents: what nearly was selected stays (KVDrive §5.1)."""
    return now
