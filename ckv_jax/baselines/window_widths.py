"""How wide each layer's and head's decode window is: profiled before measuring (KVDrive §5.2).

How many chunks come back differs by layer and head, so that the same device memory saves more bytes
where it is not spread evenly. Which width each layer and head takes is a multiple-choice knapsack,
solved greedily.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ckv_jax.decode.selection import DecodeSelection, DecodeSelections
from ckv_jax.decode.token import DecodeContext
from ckv_jax.decode.window import (
    CLOSED,
    FREE,
    RowSelector,
    StepSelection,
    Window,
    WindowArrays,
    advance,
    lookahead,
)
from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.prefix.digest import Digest
from ckv_jax.request import Request

S = TypeVar("S", bound="ProfiledSelections")

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Widths to profile, in multiples of one selection."""

FIRST = 16
"""Tokens of a text that fill its windows, and are not counted."""

_FINE = 1000  # parts of a selection that widths cost

Recorded = list[list[tuple[np.ndarray, np.ndarray]]]
"""Of one text: for each selection of the model, token by token, chunks int [n] that were taken, and
scores [M] of all."""


def slots_of(widths: np.ndarray, limit: int, times: float, packs: np.ndarray) -> np.ndarray:
    """Slots int32 [P, J] of each row's window, where a selection has `limit` chunks.

    Together they hold no more packs than even windows of `times` selections (at least 1), however
    wide these widths are themselves: what they say is how to share that.

    Args:
      widths: [P, J], for each period and row (all heads, or one KV head), in multiples of one
        selection; at least 1.
      packs: int [P], packs of one chunk in each period.
    """
    more = widths - 1.0
    mean = float((more * packs[:, None]).sum() / (more.shape[1] * packs.sum()))
    share = more / mean if mean > 0 else np.ones_like(more)
    slots: np.ndarray = np.floor(limit * (1.0 + share * (times - 1.0)) + 1e-6).astype(np.int32)
    return slots


def spread(benefit: np.ndarray, cost: np.ndarray, limit: int) -> np.ndarray:
    """The option int64 [R] that each row takes, within a cost of `limit` altogether.

    Starts from every row's first option and goes on to where the gain per cost is greatest, as
    long as something fits; among equals to the row that has spent least. What one single row could
    gain with all of the rest is tried, too: with it the gain is at least half of the best there is.

    Args:
      benefit: [R, O], such as bytes not fetched.
      cost: int [R, O], such as slots; ascending along each row.
      limit: what all rows may cost together.
    """
    least = int(cost[:, 0].sum())
    rows = np.arange(len(cost))
    option = np.zeros(len(cost), np.int64)
    while True:
        spent = cost[rows, option]
        more = cost - spent[:, None]
        gain = benefit - benefit[rows, option][:, None]
        open_ = (more > 0) & (more <= limit - spent.sum()) & (gain > 0)
        if not open_.any():
            break
        ratio = np.where(open_, gain / np.maximum(more, 1), -np.inf)
        best = np.argwhere(ratio == ratio.max())
        row, taken = best[np.argmin(spent[best[:, 0]])]
        option[row] = taken
    alone = np.where(cost - cost[:, :1] <= limit - least, benefit - benefit[:, :1], -np.inf)
    if alone.max() > (benefit[rows, option] - benefit[:, 0]).sum():
        row, taken = np.unravel_index(int(alone.argmax()), alone.shape)
        option[:] = 0
        option[row] = taken
    return option


def empty_window(widths: np.ndarray, slots: int) -> WindowArrays:
    """A window that holds nothing.

    Args:
      widths: int [R], slots that each row may use: one at least for each chunk of a selection.
      slots: W, the widest row's width at least. More than a row's own stay closed.
    """
    chunk = np.where(np.arange(slots) < widths[:, None], FREE, CLOSED)
    return WindowArrays(
        chunk=jnp.asarray(chunk, jnp.int32),
        last=jnp.full(chunk.shape, -1, jnp.int32),
        uses=jnp.zeros(chunk.shape, jnp.int32),
    )


@jax.jit
def replay(
    window: WindowArrays, ids: Int32[Array, "T R N"], scores: Float32[Array, "T R M"]
) -> Int32[Array, "T R"]:
    """Chunks that each of T steps fetches, from `window` on; arguments as in `StepSelection`."""

    def step(held: WindowArrays, inputs: tuple[Array, Array, Array]) -> tuple[WindowArrays, Array]:
        number, selected, scored = inputs
        held, moves = advance(held, StepSelection(selected, scored), number, lookahead)
        return held, jnp.sum(moves.misses >= 0, axis=1, dtype=jnp.int32)

    numbers = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jax.lax.scan(step, window, (numbers, ids, scores))[1]


def misses(text: Recorded) -> Int32[np.ndarray, "R O"]:
    """What each row of a text fetches with each width of `TIMES`, once its window is full; of a
    text of `FIRST` tokens or less nothing. A token that is unfinished does not count."""
    steps, rows = min(map(len, text)), len(text)
    if steps <= FIRST:
        return np.zeros((rows, len(TIMES)), np.int32)
    count = max(len(ids) for row in text for ids, _ in row)
    ids = np.full((steps, rows, count), -1, np.int32)
    for number, row in enumerate(text):
        for step, (selected, _) in enumerate(row[:steps]):
            ids[step, number, : len(selected)] = selected
    scores = np.stack([[scored for _, scored in row[:steps]] for row in text], axis=1)
    found = []
    for times in TIMES:
        # Slots as many as the widest has: one program serves all widths.
        width, most = (math.ceil(one * count) for one in (times, TIMES[-1]))
        window = empty_window(np.full(rows, width, np.int32), most)
        missed = replay(window, jnp.asarray(ids), jnp.asarray(scores, jnp.float32))
        found.append(np.asarray(missed)[FIRST:].sum(axis=0))
    return np.stack(found, axis=1)


def widths_of(texts: Sequence[Recorded], packs: np.ndarray, times: float, rows: int) -> np.ndarray:
    """The widths [P, J] that leave these texts least to fetch: of `times` selections on average.

    `packs` int [P]: of one chunk in each selection of a period, which has J = `rows` of them.

    Raises `ValueError` for windows of one selection, or if no text has more selections than
    `FIRST`.
    """
    if times <= 1:
        raise ValueError(f"got window={times:g}, expected more than one selection to be spread")
    if not any(min(map(len, text)) > FIRST for text in texts):
        raise ValueError(
            f"got no text that selected for more than {FIRST} tokens, expected one at least: "
            "longer texts, over longer prefixes or under a smaller budget"
        )
    packs = np.repeat(packs, rows)[:, None]
    missed = np.sum([misses(text) for text in texts], axis=0, dtype=np.int64)
    cost = np.round(np.array(TIMES) * _FINE).astype(np.int64)[None, :] * packs
    option = spread(-missed * packs, cost, int(times * _FINE) * int(packs.sum()))
    widths: np.ndarray = np.array(TIMES)[option].reshape(-1, rows)
    return widths


class ProfiledRow(RowSelector):
    """How much one row selects, in windows of unequal widths."""

    def __init__(self, drive: ProfiledSelections, **fields: Any) -> None:
        super().__init__(**fields)
        self._shared = drive.widths, drive.times, drive.packs
        self.recorded: Recorded | None = None
        """Where its selections are written down."""
        if drive.texts is not None:
            self.recorded = [[] for _ in self.window.kept.ids]
            drive.texts.append(self.recorded)

    def widths(self, times: float) -> np.ndarray:
        widths, most, packs = self._shared
        slots = slots_of(widths, self.limit, min(times, most), packs).reshape(-1)
        most_slots: np.ndarray = np.minimum(slots, self.window.opened.num_chunks)
        return most_slots


class Recording(DecodeSelection):
    """The core's selection, which writes down what profiled rows select."""

    def _book(self) -> None:
        super()._book()
        rows = {p: r for p, row in self.rows.items() if (r := getattr(row, "recorded", None))}
        for place, given in self._scores_by_place().items() if rows else ():
            own = self._windows.kept.ids[place]
            for selection, some in enumerate(own if place in rows else ()):
                rows[place][selection].append((some[some >= 0], given[selection]))


class ProfiledSelections(DecodeSelections):
    """How the windows of one engine's generations share their room. Engine thread only."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context, Recording)
        plan = context.runtime.plan
        selections = range(0, plan.selections, plan.selections_per_period)
        self.packs = np.array([len(plan.groups(selection)) for selection in selections])
        self.times = context.runtime.system.window
        """Selections that a window holds on average, at most."""
        self.widths = np.full((plan.periods, plan.selections_per_period), 2.0)
        """See `slots_of`; of the generations that begin from now on."""
        self.texts: list[Recorded] | None = None
        """Takes what generations select that begin from now on, where it is a list."""

    def row(self, limit: int, digest: Digest, window: Window) -> RowSelector:
        return ProfiledRow(self, limit=limit, digest=digest, window=window)


def selections_of(engine: Engine, kind: type[S]) -> S:
    """What selects for an engine's generations; `ValueError` where it is of another kind."""
    selections = engine.worker.decoding.selections
    if not isinstance(selections, kind):
        raise ValueError(
            f"got system {engine.system.name!r}, expected one whose windows have profiled widths, "
            "such as 'kvdrive'"
        )
    return selections


def in_engine(engine: Engine, selections: ProfiledSelections, **values: Any) -> None:
    """Sets fields of what selects, in the engine's thread."""

    def steps() -> Generator[None, None, None]:
        yield
        for name, value in values.items():
            setattr(selections, name, value)

    engine.worker.add_job(steps()).result()


def profile_windows(
    engine: Engine,
    requests: Request | Sequence[Request],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
) -> np.ndarray:
    """Generates, and shares decode windows out by what was selected: periods and heads whose
    selections come back have wider ones, within the same memory (KVDrive §5.2).

    Generations of this engine that begin from now on use the widths [P, J] that are returned. No
    answer depends on them. Generations of some 200 tokens over prefixes of the kind that will be
    asked say most. Raises what is wrong with a request, `ValueError` where nothing is selected for
    long enough.
    """
    selections = selections_of(engine, ProfiledSelections)
    texts: list[Recorded] = []
    in_engine(engine, selections, texts=texts)
    try:
        for generation in engine.generate(requests, sampling).results():
            generation.raise_for_error()
    finally:
        in_engine(engine, selections, texts=None)
    count = selections.context.runtime.plan.selections_per_period
    widths = widths_of(texts, selections.packs, selections.times, count)
    in_engine(engine, selections, widths=widths)
    return widths
