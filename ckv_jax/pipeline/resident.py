"""Lookup of selected packs on the device, without waiting for the selection on the host.

A request whose packs were all there the last time is dispatched as a whole: what each period
selects becomes a table on the device, by a map of where every pack is. One number says whether a
pack was missing; from that period on the host takes over, as it does where it reads. On an
accelerator, where every call costs the host more than its kernels cost the device, a period is one
call. Tokens do the same in fewer calls, see `decode.token`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, Float32, Int32

from ckv_jax.pipeline.layers import Functions, LayerKv, Layers, LayerState, Scorer
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.pipeline.programs import Background
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.tiers import Tiers
from ckv_jax.selection.base import Rule, Selection, Share

_MOST_MAPS = 8  # kept: those of requests and of decode batches take turns


class PackMap(NamedTuple):
    """Map of the slots of some prefixes' packs."""

    slots: Int32[Array | np.ndarray, "Q G M"]
    """The device slot of each layer group of each chunk, -1: not on the device."""
    lengths: Int32[Array | np.ndarray, "Q M"]
    """Valid tokens of each chunk, 0 past a prefix's end."""


class StackedSelections(NamedTuple):
    """Selections of P periods for R rows, in one array of each kind, so that one read gets all."""

    record: Int32[Array, "P R X"]
    """Of a `Selection` its ids, and the bits of attention and mass."""
    scores: Float32[Array, "P R M"]
    """The attention mass of every chunk."""


class Selector(NamedTuple):
    """Arguments of one member's selections, the same in every period."""

    start: ArrayLike
    """int32 [b]: position of each row's first token that a selection is given."""
    lengths: ArrayLike
    """int32 [b]: real tokens of each row from there on."""
    skipped: ArrayLike | None
    """int32 [b]: tokens before them; None: the batch's hidden states are taken as they are."""
    rows: ArrayLike
    """int32 [b]: the member's rows of the batch."""
    none: ArrayLike
    """int32 [b]: 0 of each."""
    tokens: ArrayLike
    chunks: ArrayLike
    """int32 scalars, of the prefix."""
    limits: ArrayLike
    """int32 [b]: chunks that a row selects."""
    share: Share
    rule: Rule
    shape: tuple[object, ...]
    """Static properties, for which programs are compiled."""


class Looked(NamedTuple):
    """Results of one period in one call."""

    selection: Selection
    hidden: Float[Array, "B S E"]
    """Hidden states after its layers."""
    kv: tuple[LayerKv, ...]
    """Of each step, see `Layers.run`."""
    missing: Int32[Array, ""]
    """The first period so far that lacks a pack."""


class Resident:
    """Looks packs up on the device, for one engine. Engine thread only."""

    def __init__(self, layers: Layers, tiers: Tiers, plan: Plan) -> None:
        self._layers = layers
        self._tiers = tiers
        self._plan = plan
        self._steps = {len(step.groups): step for step in plan.steps}
        self._tables = layers.programs.jit(tables, static=("groups", "columns"))
        self.stack: Callable[[Sequence[Selection]], StackedSelections] = layers.programs.jit(stack)
        """Puts the selections of all periods together."""
        self._period = layers.programs.jit(
            layers.once(_period_of, layers.functions), static=("rule", "tokens", "columns")
        )
        self._compiled: set[tuple[object, ...]] = set()
        """See `period`."""
        self.fuses = not layers.target.in_host_memory
        """Whether a period becomes one call."""
        self._places = [
            layers.put(np.array([step.groups.start, step.period], np.int32)) for step in plan.steps
        ]
        self._places_of = [
            tuple(self._places[step.index] for step in period.steps) for period in plan.by_period
        ]
        self._maps: dict[tuple[object, ...], PackMap] = {}
        self._changes = 0
        """Those of the tiers when the maps were made."""
        self.nothing_missing: ArrayLike = layers.put(np.int32(plan.periods))
        """First `missing` argument of `tables`: no period."""

    def map(self, prefixes: Sequence[OpenPrefix], batch: int) -> PackMap:
        """Where the packs of these are now, on the device; made again once a pack has moved.

        It has room for one prefix, or for `batch`: programs depend on it.
        """
        room = 1 if len(prefixes) == 1 else batch
        shape = room, prefixes[0].groups, max(opened.probe_chunks for opened in prefixes)
        key = shape, *prefixes
        if self._changes != self._tiers.changes:
            self._maps.clear()
            self._changes = self._tiers.changes
        if key not in self._maps:
            if len(self._maps) == _MOST_MAPS:
                del self._maps[next(iter(self._maps))]  # the oldest
            slots = np.full(shape, -1, np.int32)
            lengths = np.zeros((shape[0], shape[2]), np.int32)
            for mine, valid, opened in zip(slots, lengths, prefixes, strict=False):
                group = np.arange(opened.groups)[:, None]
                pages = opened.pages(group, np.arange(opened.num_chunks))
                mine[:, : opened.num_chunks] = self._tiers.lookup(pages)[0]
                valid[: opened.num_chunks] = opened.chunk_lengths
            self._maps[key] = self._layers.put(PackMap(slots, lengths))
        return self._maps[key]

    def tables(
        self,
        step: Step,
        ids: Array,
        order: Int32[ArrayLike, " B"],
        which: Int32[ArrayLike, " B"],
        where: PackMap,
        missing: ArrayLike,
        columns: int,
    ) -> tuple[Int32[Array, "P1 B N"], Array]:
        """The table of `Layers.run` for a step, and the first period so far that lacks a pack.

        Args:
            ids: int32 [R, n or more], what rows selected: `columns` of them count; -1 is none.
            order: the one of those rows that each row of the batch is; -1: it selects nothing.
            which: the prefix of each row of the batch, by its place in `where`.
            missing: the second result of the step before.
        """
        made: tuple[Array, Array] = self._tables(
            ids, order, which, where, self._places[step.index], missing, groups=len(step.groups),
            columns=columns,
        )  # fmt: skip
        return made

    def period(
        self,
        number: int,
        scorer: Scorer,
        selector: Selector,
        hidden: Float[Array, "B S E"],
        start: Int32[ArrayLike, " B"],
        pages: Array,
        where: PackMap,
        missing: ArrayLike,
        columns: int,
        background: Background,
        *,
        runs: bool = True,
    ) -> Looked | None:
        """Selects for period `number`, looks its packs up and runs its layers, in one call.

        See `Layers.select`, `tables` and `Layers.run` for the arguments. Returns None if the call
        is not compiled, which `background` begins, or if `runs` is false.
        """
        steps = self._plan.by_period[number].steps
        args = (
            tuple(tuple(map(self._layers.state, step.layers)) for step in steps), scorer.states,
            scorer.probes, selector[: selector._fields.index("rule")], hidden, start, pages, where,
            self._places_of[number], missing,
        )  # fmt: skip
        static: Any = {"rule": selector.rule, "tokens": selector.shape[1], "columns": columns}
        # What else the call is compiled for is the same in every period of this number.
        kinds = tuple(map(type, scorer.probes))  # the keys themselves, where a digest is lost
        request = number, selector.shape, hidden.shape, columns, kinds, self._period.times_let_go
        if request not in self._compiled:
            if not background.compile(self._period, *args, **static):
                return None
            self._compiled.add(request)
        found: Looked | None = self._period(*args, **static) if runs else None
        return found

    def prepare(
        self,
        prefixes: Sequence[OpenPrefix],
        found: Selection,
        order: Int32[ArrayLike, " B"],
        which: Int32[ArrayLike, " B"],
        columns: int,
    ) -> None:
        """Compiles what such a batch takes, given what it selected for one period, so that the next
        one finds it."""
        where = self.map(prefixes, np.shape(which)[0])
        for step in self._steps.values():
            self.tables(step, found.ids, order, which, where, self.nothing_missing, columns)
        self.stack([found] * self._plan.periods)


def selections(record: np.ndarray, scores: np.ndarray) -> list[Selection]:
    """Those that a request made, from its `StackedSelections` on the host."""
    count = record.shape[2] // 2
    floats = record[:, :, count:].view(np.float32)
    by_period: Any = record[:, :, :count], floats[:, :, :-1], floats[:, :, -1], scores
    return [Selection(*part) for part in zip(*by_period, strict=True)]


def stack(found: tuple[Selection, ...]) -> StackedSelections:
    """The selections of all periods, together."""
    each = []
    for one in found:
        floats = jnp.concatenate([one.attention, one.mass[:, None]], axis=1)
        record = jnp.concatenate([one.ids, lax.bitcast_convert_type(floats, jnp.int32)], axis=1)
        each.append(StackedSelections(record, one.scores))
    return StackedSelections(*map(jnp.stack, zip(*each, strict=True)))


def tables(
    ids: Array,
    order: Array,
    which: Array,
    where: PackMap,
    place: Array,
    missing: Array,
    *,
    groups: int,
    columns: int,
) -> tuple[Array, Array]:
    """See `Resident.tables`; `place`: the step's first layer group, and its period."""
    selected = jnp.where(order[:, None] >= 0, ids[order, :columns], -1)  # one fused gather
    taken, at = selected >= 0, jnp.maximum(selected, 0)
    mine = lax.dynamic_slice_in_dim(where.slots, place[0], groups, axis=1)  # [Q, P, M]
    each = jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    slots = jnp.where(taken[None], mine[which[None, :, None], each, at[None]], -1)  # [P, B, N]
    absent = jnp.any(taken[None] & (slots < 0))
    valid = jnp.where(taken & (slots >= 0).all(axis=0), where.lengths[which[:, None], at], 0)
    found = jnp.concatenate([slots, valid[None]])
    return found, jnp.where(absent, jnp.minimum(missing, place[1]), missing)


def latest(hidden: Array, rows: Array, skipped: Array, *, tokens: int) -> Array:
    """`tokens` hidden states of each of `rows` [B, S, E] -> [b, tokens, E], the first skipped."""
    at = skipped[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    return hidden[rows[:, None], at]


def _period_of(functions: Functions) -> Callable[..., Looked]:
    """The function of `Resident.period`."""

    def period(
        layers: tuple[tuple[LayerState, ...], ...], scoring: tuple[LayerState, ...],
        probes: tuple[Any, ...], selector: tuple[Any, ...], hidden: Array, start: Array,
        pages: Array, where: PackMap, places: tuple[Array, ...], missing: Array,
        *, rule: Rule, tokens: int, columns: int,
    ) -> Looked:  # fmt: skip
        first, lengths, skipped, rows, none, in_prefix, chunks, limits, share = selector
        given = hidden if skipped is None else latest(hidden, rows, skipped, tokens=tokens)
        selection = functions.select(
            scoring, given, first, lengths, probes, in_prefix, chunks, limits, share, rule=rule
        )
        barrier: Callable[..., tuple[Array, Array]] = lax.optimization_barrier
        kv = []
        for states, place in zip(layers, places, strict=True):
            groups = _groups(states, pages)
            table, missing = tables(
                selection.ids, rows, none, where, place, missing, groups=groups, columns=columns
            )
            # The layers are compiled as in a call of their own, so that they round alike.
            hidden, table = barrier((hidden, table))
            hidden, mine = functions.run(states, hidden, start, pages, table, selections=1)
            kv.append(mine)
        return Looked(selection, hidden, tuple(kv), missing)

    return period


def _groups(states: Sequence[LayerState], pages: Array) -> int:
    """Number of layer groups of a step, whose packs have `pages.shape[1]` layers each."""
    return -(-len(states) // pages.shape[1])
