"""How wide each layer's and head's decode window is: profiled before measuring (KVDrive §5.2).

Which chunks come back differs by layer and head, so that the same device memory saves more bytes
where it is not spread evenly. Which of them each takes is a multiple-choice knapsack, solved
greedily.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ckv_jax.decode.eviction import Keep, StepSelection, advance, empty_window, lookahead
from ckv_jax.decode.eviction import Window as WindowArrays
from ckv_jax.decode.selection import (
    DecodeContext,
    DecodeSelection,
    DecodeSelections,
    RowSelector,
)
from ckv_jax.decode.window import Window
from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.prefix.digest import Digest
from ckv_jax.request import Request

T = TypeVar("T")
S = TypeVar("S", bound="ProfiledSelections")

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Widths to profile, in multiples of one selection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Widths of the windows of one sequence.

    Attributes:
      times: [G][J], for each layer group and each row (all heads, or one KV head), in multiples of
        one selection; at least 1.
    """

    times: tuple[tuple[float, ...], ...]

    @classmethod
    def even(cls, times: float, *, groups: int, rows: int) -> Widths:
        """The same width everywhere."""
        return cls(times=((times,) * rows,) * groups)

    def slots(self, limit: int, times: float, packs: np.ndarray) -> np.ndarray:
        """Slots int32 [G, J] of each row's window, where a selection has `limit` chunks.

        Together they hold no more packs than even windows of `times` selections (at least 1),
        however wide these widths are themselves: what they say is how to share that.

        Args:
          packs: int [G], packs of one chunk in each layer group.
        """
        more = np.array(self.times) - 1.0
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

    Raises:
      ValueError: shapes, costs that do not ascend, or a limit below the first options.
    """
    if benefit.shape != cost.shape or benefit.ndim != 2 or (np.diff(cost, axis=1) <= 0).any():
        raise ValueError(
            f"got benefits {benefit.shape} and costs {cost.shape}, expected [R, O], ascending costs"
        )
    least = int(cost[:, 0].sum())
    if least > limit:
        raise ValueError(
            f"got room for {limit} slots, expected at least the {least} of one selection a row"
        )
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


@partial(jax.jit, static_argnames="keep")
def replay(
    window: WindowArrays, ids: Int32[Array, "T R N"], scores: Float32[Array, "T R M"], keep: Keep
) -> Int32[Array, "T R"]:
    """Chunks that each of T steps fetches, from `window` on; arguments as in `StepSelection`."""

    def step(held: WindowArrays, inputs: tuple[Array, Array, Array]) -> tuple[WindowArrays, Array]:
        number, selected, scored = inputs
        held, moves = advance(held, StepSelection(selected, scored), number, keep)
        return held, jnp.sum(moves.misses >= 0, axis=1, dtype=jnp.int32)

    numbers = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jax.lax.scan(step, window, (numbers, ids, scores))[1]


def misses_by_width(
    ids: Int32[np.ndarray, "T S R N"],
    scores: Float32[np.ndarray, "T S R M"],
    widths: Int32[np.ndarray, " O"],
    keep: Keep,
    *,
    skip: int = 0,
) -> np.ndarray:
    """Misses int64 [R, O] of each row at each width, over S sequences of T steps.

    Every sequence begins with an empty window; its first `skip` steps fill it and are not counted.

    Raises:
      ValueError: a width that cannot hold one selection.
    """
    steps, sequences, rows, count = ids.shape
    limits = np.full(sequences * rows, count, np.int32)
    flat = jnp.asarray(ids.reshape(steps, -1, count))
    scored = jnp.asarray(scores.reshape(steps, sequences * rows, -1))
    found = []
    for width in widths:
        # Slots as many as the widest has: one program serves all widths.
        window = empty_window(np.full_like(limits, width), int(widths.max()))
        missed = np.asarray(replay(window, flat, scored, keep))[skip:]
        found.append(missed.reshape(-1, sequences, rows).sum((0, 1), dtype=np.int64))
    return np.stack(found, axis=1)


FIRST = 16
"""Tokens of a text that fill its windows, and are not counted."""

_FINE = 1000  # parts of a selection that widths cost


class Recorded:
    """One text's selections, in the order in which it made them."""

    def __init__(self) -> None:
        self._ids: dict[int, list[np.ndarray]] = defaultdict(list)
        self._scores: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(self, selection: int, ids: np.ndarray, scores: np.ndarray) -> None:
        """A token took chunks `ids` int [n] for a selection, which gave all chunks `scores` [M]."""
        self._ids[selection].append(ids)
        self._scores[selection].append(scores)

    def arrays(self, selections: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T, 1, R, N], scores float32 [T, 1, R, M]), as `misses_by_width` takes them;
        T = 0 where there is nothing. Selections of an unfinished token are left out."""
        steps = min((len(self._ids[selection]) for selection in range(selections)), default=0)
        if not steps:
            return np.zeros((0, 1, selections, 1), np.int32), np.zeros(
                (0, 1, selections, 1), np.float32
            )
        count = max(len(ids) for selection in range(selections) for ids in self._ids[selection])
        ids = np.full((steps, 1, selections, count), -1, np.int32)
        for selection in range(selections):
            for step, selected in enumerate(self._ids[selection][:steps]):
                ids[step, 0, selection, : len(selected)] = selected
        scores = [self._scores[selection][:steps] for selection in range(selections)]
        return ids, np.stack([np.stack(one) for one in scores], axis=1)[:, None].astype(np.float32)


def widths_of(
    texts: list[Recorded], packs: np.ndarray, times: float, keep: Keep, *, rows: int = 1,
    first: int = FIRST,
) -> Widths:  # fmt: skip
    """The widths that leave these texts least to fetch: windows of `times` selections on average.

    Args:
      packs: int [P], packs of one chunk in each selection of a period.
      rows: selections of each period: one, or one for each KV head.
      first: tokens of each text that fill its windows.

    Raises:
      ValueError: windows of one selection, or no text with more selections than `first`.
    """
    if times <= 1:
        raise ValueError(f"got window={times:g}, expected more than one selection to be spread")
    packs = np.repeat(packs, rows)
    missed = np.zeros((len(packs), len(TIMES)), np.int64)
    counted = 0
    for text in texts:
        ids, scores = text.arrays(len(packs))
        if len(ids) <= first:
            continue
        counted += 1
        slots = np.ceil(np.array(TIMES) * ids.shape[-1]).astype(np.int32)
        missed += misses_by_width(ids, scores, slots, keep, skip=first)
    if not counted:
        raise ValueError(
            f"got no text that selected for more than {first} tokens, expected one at least: "
            "longer texts, over longer prefixes or under a smaller budget"
        )
    cost = np.round(np.array(TIMES) * _FINE).astype(np.int64)[None, :] * packs[:, None]
    option = spread(-missed * packs[:, None], cost, int(times * _FINE) * int(packs.sum()))
    found = [TIMES[taken] for taken in option]
    return Widths(times=tuple(zip(*[iter(found)] * rows, strict=True)))


class ProfiledRow(RowSelector):
    """How much one row selects, in windows of unequal widths."""

    def __init__(
        self, widths: Widths, packs: np.ndarray, most: float, recorded: Recorded | None,
        **fields: Any,
    ) -> None:  # fmt: skip
        """`packs`: int [P], of a chunk in each period; `most`: selections of a window on average;
        `recorded`: where its selections are written down; the others as `RowSelector` has them."""
        super().__init__(**fields)
        self.recorded = recorded
        self._widths = widths
        self._packs = packs
        self._most = most

    def widths(self, times: float) -> np.ndarray:
        """See `RowSelector.widths`."""
        times = min(times, self._most)
        slots = self._widths.slots(self.limit, times, self._packs).reshape(-1)
        widths: np.ndarray = np.minimum(slots, self.window.opened.num_chunks)
        return widths


class Recording(DecodeSelection):
    """The core's selection, which writes down what profiled rows select."""

    def _book(self, ids: np.ndarray) -> None:
        super()._book(ids)
        rows = {p: r for p, row in self.rows.items() if (r := getattr(row, "recorded", None))}
        for place, given in self._scores_by_place().items() if rows else ():
            own = ids[np.searchsorted(self._places, place)]
            for selection, some in enumerate(own if place in rows else ()):
                rows[place].add(selection, some[some >= 0], given[selection])


class ProfiledSelections(DecodeSelections):
    """How the windows of one engine's generations share their room. Engine thread
    only."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context, Recording)
        plan = context.runtime.plan
        selections = range(0, plan.selections, plan.parts)
        self.packs = np.array([len(plan.groups(selection)) for selection in selections])
        self._texts: list[Recorded] | None = None
        self.times = context.runtime.system.window
        """Selections that a window holds on average, at most."""
        self.widths = Widths.even(2.0, groups=plan.periods, rows=plan.parts)
        """Of the generations that begin from now on."""

    def row(
        self, limit: int, digest: Digest, window: Window, *, apart: bool = False
    ) -> RowSelector:
        """See `DecodeSelections.row`."""
        recorded = None
        if self._texts is not None:
            recorded = Recorded()
            self._texts.append(recorded)
        return ProfiledRow(
            self.widths, self.packs, self.times, recorded, limit=limit, digest=digest,
            window=window, apart=apart,
        )  # fmt: skip

    def begin(self) -> None:
        """Writes down what generations select that begin from now on."""
        self._texts = []

    def end(self) -> list[Recorded]:
        """Nothing is written down from now on; what has been."""
        texts, self._texts = self._texts or [], None
        return texts


def selections_of(engine: Engine, kind: type[S]) -> S:
    """What selects for an engine's generations; `ValueError` where it is of another kind."""
    selections = engine.worker.decode_selections
    if not isinstance(selections, kind):
        raise ValueError(
            f"got system {engine.system.name!r}, expected one whose windows have profiled widths, "
            "such as 'kvdrive'"
        )
    return selections


def in_engine(engine: Engine, function: Callable[[], T]) -> T:
    """The result of a function that is called in the engine's thread."""

    def steps() -> Generator[None, None, T]:
        yield
        return function()

    found: T = engine.worker.add_job(steps()).result()
    return found


def profile_windows(
    engine: Engine,
    requests: Request | Sequence[Request],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
) -> Widths:
    """Generates, and shares decode windows out by what was selected: periods and heads whose
    selections come back have wider ones, within the same memory (KVDrive §5.2).

    Generations of this engine that begin from now on use the widths. No answer depends on them.
    Generations of some 200 tokens over prefixes of the kind that will be asked say most. Raises
    what is wrong with a request, `ValueError` where nothing is selected for long enough.
    """
    selections = selections_of(engine, ProfiledSelections)
    call = partial(in_engine, engine)
    call(selections.begin)
    try:
        for generation in engine.generate(requests, sampling).results():
            generation.raise_for_error()
    finally:
        recorded = call(selections.end)
    plan = selections.context.runtime.plan
    widths = widths_of(recorded, selections.packs, selections.times, lookahead, rows=plan.parts)
    call(partial(setattr, selections, "widths", widths))
    return widths
