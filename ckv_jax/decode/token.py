"""The jitted calls of decode: one that selects for a period, and few that compute a whole token.

The first scores a prefix's chunks, selects, and looks up the window, for rows of one prefix, or of
several prefixes of equal shapes with a row each. The host reads one small array of what it found.

The others serve tokens whose packs are all on the device. A call runs several periods. Each period
selects, looks its packs up and runs its layers; the last one computes the head and samples. From
the first period that lacks a pack on, the call computes nothing, and the host continues there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Float32, Int32

from ckv_jax.decode.window import Keep, StepSelection, WindowArrays, WindowPacks, advance
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Layer
from ckv_jax.model.sampling import SamplingArrays, sample
from ckv_jax.model.shardings import BY_NAME, WHOLE, Shardings
from ckv_jax.pipeline.executor import Runtime
from ckv_jax.pipeline.layers import Functions, LayerKv, Layers, LayerState
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.programs import Background, Program
from ckv_jax.pipeline.resident import PackMap, tables
from ckv_jax.selection.base import Rule, rows_of, scored, select_units

T = TypeVar("T")

NO_PAGES = np.zeros(0, np.int64)
MOST_CALLS = 3
"""Maximum calls of one token. Calls of equally many periods share one program, so two or three
calls compile faster than one call of all periods."""


# -- a selection -----------------------------------------------------------------------------------


class Recent(NamedTuple):
    """Latest selections of a call's R rows, which pass from token to token on the device."""

    scores: Float32[Array, "Q R M"]
    """Scores of the latest Q selections, oldest first."""
    ids: Int32[Array, "R n"]
    """Chunks of the latest one, ascending, -1 past a row's end."""


class Found(NamedTuple):
    """What the R rows of one call selected, on the device; each KV head of a row is a row where
    heads select apart."""

    record: Int32[Array, "R X"]
    """See `Record`."""
    scores: Float32[Array, "R M"]
    """The attention mass of every chunk."""
    window: WindowArrays
    """The windows [B, W] of the batch's rows, [B*K, W] of their heads, after this selection."""
    recent: Recent
    """After this selection."""


class Record(NamedTuple):
    """The part of one call's results that the host reads: views of one array [R, 4n + 1]."""

    ids: Int32[np.ndarray, "R n"]
    """Selected chunks, ascending, -1 past a row's end."""
    slots: Int32[np.ndarray, "R n"]
    """The window slot of each, see `window.Moves`."""
    misses: Int32[np.ndarray, "R n"]
    """The chunk where the window lacked it, else -1."""
    attention: Float32[np.ndarray, "R n"]
    """The attention mass of each selected chunk."""
    mass: Float32[np.ndarray, " R"]
    """The share of the row's attention mass that they hold."""

    @classmethod
    def of(cls, record: Int32[np.ndarray, "R X"]) -> Record:
        """The parts of an array; those of some of its rows where it has only those."""
        n = record.shape[1] // 4
        ids, slots, misses, attention = (record[:, i * n : (i + 1) * n] for i in range(4))
        floats: Any = np.float32
        return cls(ids, slots, misses, attention.view(floats), record[:, -1].view(floats))


Probes = tuple[Probe, ...]
"""What rows score of one prefix, a probe a layer."""


class SelectCall(NamedTuple):
    """Arguments of one period's call that stay the same from token to token."""

    layers: tuple[int, ...]
    """Those that score."""
    states: tuple[LayerState, ...]
    """Of these."""
    rows: Int32[ArrayLike, " R"]
    """Places in the batch, as many of each prefix, one prefix's after the other's."""
    probes: tuple[Probes, ...]
    """Of each prefix."""
    num_tokens: Int32[ArrayLike, " prefixes"]
    num_chunks: Int32[ArrayLike, " prefixes"]
    limits: Int32[ArrayLike, " R"]
    """Chunks that each row selects; a row whose limit is 0 selects nothing, its window stays."""
    rule: Rule
    keep: Keep


@dataclass(slots=True)
class Call:
    """One call that selects for a period: of one prefix, or of several with a row each."""

    period: int
    of: SelectCall
    recent: Recent
    """As before the token, until it is finished: it may have to begin again."""
    rows: np.ndarray
    """int [k]: the rows of its record that select, all J of each batch row."""
    place: np.ndarray
    """int [k]: the batch row of each, and its selection (`Plan.selections`)."""
    selection: np.ndarray
    found: Found | None = None
    after: Recent | None = None
    """What `recent` becomes."""
    record: Record | None = None
    """Of `rows` alone."""
    came: tuple[np.ndarray, ...] = ()
    """(row, selection, window slot, chunk) int [m] each of what windows lacked; none: of
    nothing."""
    pinned: np.ndarray = field(default_factory=lambda: NO_PAGES)
    """Pages of those that were on the device, until windows have them."""
    away: WindowPacks | None = None
    """Packs of the others."""
    wanted: tuple[np.ndarray, ...] = ()
    """(prefix, layer group, chunk) of these, each once, and where each of `away` is among them."""
    back: np.ndarray = field(default_factory=lambda: NO_PAGES)


class Scoring:
    """The call that selects, over the layers of one model."""

    def __init__(self, layers: Layers) -> None:
        made = layers.once(_select_of, layers.layer_of, layers.target, layers.shardings)
        takes = (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME)
        self.function: Callable[..., Found] = layers.split(made, takes, WHOLE)
        """The function that `select` compiles, which other jitted calls trace."""
        self._select = layers.programs.jit(self.function, static=("rule", "keep"))

    def select(
        self,
        call: SelectCall,
        hidden: Array,
        starts: Int32[ArrayLike, " B"],
        window: WindowArrays,
        step: Int32[ArrayLike, " B"],
        recent: Recent,
    ) -> Found:
        """The best chunks for the rows of a call, given hidden states [B, 1, E] of a batch.

        `starts`: positions of the batch's tokens. `window`: [B, W], W >= `rule.n`, or [B*K, W]
        where heads select apart, a row's heads one after the other, as in `recent`, whose scores
        count as well. `step`: the number of the token for each row that selects now, below 0 for a
        row that keeps its latest selection.
        """
        found: Found = self._select(
            call.states, hidden, call.rows, starts, call.probes, call.num_tokens, call.num_chunks,
            call.limits, window, step, recent, rule=call.rule, keep=call.keep,
        )  # fmt: skip
        return found


def _select_of(
    layer_of: Callable[[LayerState], Layer], target: Target, shardings: Shardings
) -> Callable[..., Found]:
    def select_chunks(
        states: tuple[LayerState, ...], hidden: Array, rows: Array, start: Array,
        probes: tuple[Probes, ...], num_tokens: Array, num_chunks: Array,
        limits: Array, window: WindowArrays, step: Array, recent: Recent, *,
        rule: Rule, keep: Keep,
    ) -> Found:  # fmt: skip
        start, step = start[rows], step[rows]
        now = (step >= 0) & (limits > 0)
        queries = [layer_of(state).query(hidden[rows], start[:, None]) for state in states]
        before = jnp.zeros_like(recent.scores, shape=recent.scores.shape[1:])
        before = sum(recent.scores[1:], before)  # XLA's reduce takes a CPU ten times as long
        own, left, mass = scored(
            queries, probes, rule, num_tokens=num_tokens, num_chunks=num_chunks,
            q_lengths=jnp.ones(rows.shape, jnp.int32), limits=limits, target=target,
            whole=shardings.sum, now=now.reshape(len(probes), -1).any(axis=1), before=before,
        )  # fmt: skip
        scores = own + before
        heads = len(scores) // len(rows)
        batch = hidden.shape[0] * heads
        rows = (rows[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, :]).reshape(-1)
        limits, step, now = (rows_of(each, scores) for each in (limits, step, now))
        found = select_units(
            scores, rule.n, limits, count=rows_of(num_chunks, scores), among=left,
            always=rule.always_kept(scores, probes, num_tokens, num_chunks, limits), mass=mass,
            target=target,
        )  # fmt: skip
        ids = jnp.where(now[:, None], found.ids, recent.ids)
        mine = WindowArrays(*(part[rows] for part in window))
        after, moves = advance(mine, StepSelection(ids, scores), step[:, None], keep, target)
        selects = jnp.where(now, rows, batch)  # the others' stay
        window = WindowArrays(
            *(
                part.at[selects].set(new, mode="drop")
                for part, new in zip(window, after, strict=True)
            )
        )
        floats = jnp.concatenate([found.attention, found.mass[:, None]], axis=1)
        parts = (ids, moves.table, moves.misses)
        latest = jnp.concatenate([recent.scores[1:], own[None]])[: len(recent.scores)]
        return Found(
            record=jnp.concatenate([*parts, lax.bitcast_convert_type(floats, jnp.int32)], axis=1),
            scores=scores if mass is None else mass,
            window=window,
            recent=Recent(jnp.where(now[None, :, None], latest, recent.scores), ids),
        )

    return select_chunks


# -- a whole token ---------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Arguments common to all calls of one token."""

    tokens: Int32[ArrayLike, " B"]
    start: Int32[ArrayLike, " B"]
    """Position of each; with `at`, see `Layers.extend`."""
    at: Int32[ArrayLike, " B"]
    pages: Array
    step: Int32[ArrayLike, " B"]
    """Number of the token, below 0 for rows that keep their latest selections."""
    order: Int32[ArrayLike, " B"]
    """The row of a selection that each row of the batch is."""
    which: Int32[ArrayLike, " B"]
    """The prefix of each row of the batch, by its place in `where`."""
    where: PackMap
    sampling: SamplingArrays
    counts: Int32[ArrayLike, " B"]
    """Tokens that each row has generated so far."""


class States(NamedTuple):
    """State of a call's periods, which passes from token to token."""

    windows: tuple[WindowArrays, ...]
    recent: tuple[Recent, ...]


class Stepped(NamedTuple):
    """Results of one call, valid up to the first period that lacks a pack."""

    hidden: Float[Array, "B 1 E"]
    """Hidden states that enter the first period that has not run."""
    buffers: tuple[LayerKv, ...]
    """Of each step."""
    record: Int32[Array, "P R X"]
    """Of each period, see `Record`."""
    scores: Float32[Array, "P R M"]
    states: States
    """As they were of a period that did not run."""
    missing: Int32[Array, ""]
    """The first period that lacks a pack."""
    logits: Float32[Array, "B V"]
    """Of no meaning where a pack is missing, as is what was sampled, and before the last call."""
    sampled: Int32[Array, " B"]


class _PeriodArrays(NamedTuple):
    """Arrays of one period that stay the same from token to token."""

    layers: tuple[tuple[LayerState, ...], ...]
    """Of each step."""
    selects: tuple[Any, ...]
    """`SelectCall` from `rows` to `limits`."""


class _Period(NamedTuple):
    """Static arguments of one period, for which a program is compiled."""

    scores: tuple[int, ...]
    """Indices of the layers that score."""
    rule: Rule
    keep: Keep
    groups: tuple[int, ...]
    """Number of layer groups of each step."""


@dataclass(frozen=True, slots=True, eq=False)
class _CallStatics:
    """Static arguments of one call, for which a program is compiled; equal ones are one object."""

    periods: tuple[_Period, ...]
    columns: int
    total: int
    """Number of periods of a token."""


class Run(NamedTuple):
    """One call of a token: its periods and their arguments, for the rows of one batch."""

    of_periods: slice
    steps: slice
    fixed: tuple[_PeriodArrays, ...]
    places: Int32[ArrayLike, "steps 2"]
    """First layer group and period of each step."""
    ends: Bool[ArrayLike, " 2"]
    """Whether the call has the first period, and the last."""
    static: _CallStatics
    compiled: set[tuple[int, int]]
    """Contexts for which all calls of the token are compiled, see `Token.step`."""


class Token:
    """The jitted calls of one token, over the layers of one model."""

    def __init__(
        self, layers: Layers, scoring: Scoring, plan: Plan, background: Background
    ) -> None:
        self._layers = layers
        self._plan = plan
        self._background = background
        conditional = layers.target.in_host_memory and layers.shardings.mesh is None
        made = layers.once(_token_of, layers.functions, scoring.function, conditional)
        self._token = layers.programs.jit(made, static=("static", "context"), donate=("buffers",))
        self._calls = in_few_sizes(plan) if conditional else [range(plan.periods)]
        self.warming = False
        """Whether a warm-up is running, in which tokens compile their calls, see `warmup.warm`."""

    def no_hidden(self, batch: int) -> np.ndarray:
        """Returns placeholder hidden states [B, 1, E] for the first call."""
        return np.zeros((batch, 1, self._layers.config.hidden_size), self._layers.dtype)

    def runs(self, calls: Sequence[SelectCall], columns: int) -> list[Run]:
        """Builds the calls of one token.

        `calls` has the selection of each period, `columns` the width of the tables of slots.
        """
        found, by_period = [], self._plan.by_period
        for periods in self._calls:
            fixed, static = [], []
            for number in periods:
                mine, call = by_period[number].steps, calls[number]
                first = mine[0].layers.start
                fixed.append(
                    _PeriodArrays(
                        tuple(tuple(map(self._layers.state, step.layers)) for step in mine),
                        call[call._fields.index("rows") : call._fields.index("rule")],
                    )
                )
                static.append(
                    _Period(
                        tuple(layer - first for layer in call.layers), call.rule, call.keep,
                        tuple(len(step.groups) for step in mine),
                    )
                )  # fmt: skip
            steps = [step for number in periods for step in by_period[number].steps]
            made = self._layers.once(_CallStatics, tuple(static), columns, self._plan.periods)
            found.append(
                Run(
                    of_periods=slice(periods.start, periods.stop),
                    steps=slice(steps[0].index, steps[-1].index + 1),
                    fixed=tuple(fixed),
                    places=np.array([[step.groups.start, step.period] for step in steps], np.int32),
                    ends=np.array([not periods.start, periods.stop == self._plan.periods]),
                    static=made,
                    compiled=set(),
                )
            )
        return found

    def step(
        self,
        calls: Sequence[tuple[Run, States]],
        hidden: Float[Array | np.ndarray, "B 1 E"],
        missing: Int32[ArrayLike, ""],
        buffers: list[LayerKv],
        given: Inputs,
        *,
        compiles: bool = False,
    ) -> list[Stepped] | None:
        """Dispatches the calls of a token, each after the one before.

        `hidden`: from `no_hidden`; `missing`: the number of periods. `buffers`: of each step, of
        which the (donated) arrays are replaced. None: some call is not compiled, and no token waits
        for that outside of a warm-up. With `compiles` a thread begins to compile it then.
        """
        context = buffers[0][0][0].shape[1]

        def args(run: Run, states: States) -> tuple[Any, ...]:
            kv = tuple(buffers[run.steps])
            return (
                self._layers.weights[1], run.fixed, kv, states, hidden, missing, run.places,
                run.ends, given,
            )  # fmt: skip

        # What else a call is compiled for is the same in every token of one batch.
        compiled, which = calls[0][0].compiled, (context, self._token.times_let_go)
        if which not in compiled or self.warming:
            ask = self._background.compile if compiles else Program.compiled
            ask = Program.compile if self.warming else ask
            if not all([
                ask(self._token, *args(run, states), static=run.static, context=context)
                for run, states in calls
            ]):  # fmt: skip
                return None
            compiled.add(which)
        made = []
        for run, states in calls:
            stepped: Stepped = self._token(*args(run, states), static=run.static, context=context)
            buffers[run.steps] = stepped.buffers
            hidden, missing = stepped.hidden, stepped.missing
            made.append(stepped)
        return made


class DecodeContext(NamedTuple):
    """Context of one engine's decode, from which selections are created."""

    scoring: Scoring
    runtime: Runtime
    token: Token


def in_few_sizes(plan: Plan) -> list[range]:
    """Splits the periods of a token into at most `MOST_CALLS` calls, so that they compile fastest:
    with the fewest periods in calls of different sizes."""

    def split(calls: int) -> list[range]:
        bounds = [plan.periods * call // calls for call in range(calls + 1)]
        return [range(first, stop) for first, stop in pairwise(bounds)]

    def compiled(periods: Sequence[range]) -> int:
        return sum({len(some) for some in periods})

    return min(map(split, range(1, min(MOST_CALLS, plan.periods) + 1)), key=compiled)


def _token_of(
    functions: Functions, select: Callable[..., Found], conditional: bool
) -> Callable[..., Stepped]:
    run_if = _run_if if conditional else _run_always

    def token(
        rest: LayerState, periods: tuple[_PeriodArrays, ...], buffers: tuple[LayerKv, ...],
        states: States, hidden: Array, missing: Array, places: Array, ends: Array, given: Inputs,
        *, static: _CallStatics, context: int,
    ) -> Stepped:  # fmt: skip
        arrays: tuple[Any, ...] = given
        tokens, start, at, pages, step, order, which, where, sampling, counts = arrays
        score = jax.jit(partial(select), static_argnames=("rule", "keep"))  # traced once
        extend = jax.jit(partial(functions.extend), static_argnames=("context", "selections"))
        hidden = jnp.where(ends[0], functions.embed(rest, tokens), hidden)
        kv, place, after, founds = iter(buffers), iter(places), [], []
        for fixed, one, window, recent in zip(periods, static.periods, *states, strict=True):
            found = run_if(
                missing >= static.total,
                _score(score, fixed, one, (hidden, start, step)),
                Found(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), window, recent),
            )
            founds.append(found)
            of_steps = []
            for groups in one.groups:
                table, missing = tables(
                    found.record, order, which, where, next(place), missing, groups=groups,
                    columns=static.columns,
                )  # fmt: skip
                of_steps.append(table)
            there = missing >= static.total  # for all steps: the host begins with the first
            for weights, table in zip(fixed.layers, of_steps, strict=True):

                def layers(
                    carry: tuple[Array, LayerKv],
                    weights: tuple[LayerState, ...] = weights,
                    table: Array = table,
                ) -> tuple[Array, LayerKv]:
                    hidden, kv = carry
                    out: tuple[Array, LayerKv] = extend(
                        weights, hidden, start, kv, at, pages, table, context=context, selections=1
                    )
                    return out

                ran, mine = run_if(there, layers, (hidden, next(kv)))
                hidden = jnp.where(there, ran, hidden)
                after.append(mine)

        def end() -> tuple[Array, Array]:
            logits, _ = functions.head(rest, hidden, jnp.zeros(start.shape, jnp.int32))
            return logits, sample(logits, sampling, counts)

        def none() -> tuple[Array, Array]:
            logits, sampled = jax.eval_shape(end)
            return jnp.zeros(logits.shape, logits.dtype), jnp.zeros(sampled.shape, sampled.dtype)

        if conditional:
            logits, sampled = lax.cond(ends[1] & (missing >= static.total), end, none)
        else:
            logits, sampled = end()
        return Stepped(
            hidden=hidden,
            buffers=tuple(after),
            record=jnp.stack([found.record for found in founds]),
            scores=jnp.stack([found.scores for found in founds]),
            states=States(
                tuple(found.window for found in founds), tuple(found.recent for found in founds)
            ),
            missing=missing,
            logits=logits,
            sampled=sampled,
        )

    return token


def _score(
    select: Callable[..., Found], fixed: _PeriodArrays, one: _Period, token: tuple[Array, ...]
) -> Callable[[Found], Found]:
    hidden, start, step = token
    of_period = [state for states in fixed.layers for state in states]
    states = tuple(of_period[layer] for layer in one.scores)
    rows, *others = fixed.selects

    def score(before: Found) -> Found:
        return select(
            states, hidden, rows, start, *others, before.window, step, before.recent,
            rule=one.rule, keep=one.keep,
        )  # fmt: skip

    return score


def _run_if(runs: Array, function: Callable[[T], T], before: T) -> T:
    """Returns `function(before)` if `runs`, else `before`.

    A loop of one iteration: XLA fuses nothing across its ends, so the bits equal those of a
    separate call, and it updates `before` in place.
    """
    like = jax.eval_shape(function, before)
    before = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), before, like)
    _, after = lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.zeros((), bool), function(carry[1])),
        (runs, before),
    )  # fmt: skip
    found: T = after
    return found


def _run_always(runs: Array, function: Callable[[T], T], before: T) -> T:
    """Returns `function(before)` in any case, because an accelerator would need the host for a
    condition."""
    barrier: Callable[[T], T] = lax.optimization_barrier
    after: T = barrier(function(barrier(before)))
    return after
