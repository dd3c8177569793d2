"""One token of every row of a batch, in few jitted calls, while its packs are on the device.

A call runs several periods: each selects, looks its packs up, and runs its layers; the last one
ends with the head and samples. From the first period that lacks a pack on nothing is computed, and
the host takes over there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Float32, Int32

from ckv_jax.decode.eviction import Keep, Window
from ckv_jax.decode.scoring import Found, Scoring, SelectCall
from ckv_jax.model.sampling import SamplingArrays, sample
from ckv_jax.pipeline.layers import Functions, LayerKv, Layers, LayerState
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.resident import PackMap, tables
from ckv_jax.selection.base import Rule

T = TypeVar("T")

MOST_CALLS = 3
"""Of a token. Calls of as many periods each are one program, so that two or three compile sooner
than one of all periods."""


class Inputs(NamedTuple):
    """What all calls of a token take."""

    tokens: Int32[ArrayLike, " B"]
    start: Int32[ArrayLike, " B"]
    """Position of each; with `at`, see `Layers.extend`."""
    at: Int32[ArrayLike, " B"]
    pages: Array
    step: Int32[ArrayLike, ""]
    """Number of the token."""
    order: Int32[ArrayLike, " B"]
    """The row of a selection that each row of the batch is."""
    which: Int32[ArrayLike, " B"]
    """The prefix of each row of the batch, by its place in `where`."""
    where: PackMap
    sampling: SamplingArrays
    counts: Int32[ArrayLike, " B"]
    """Tokens that each row has generated so far."""


class States(NamedTuple):
    """What the periods of a call keep from token to token."""

    windows: tuple[Window, ...]
    recent: tuple[Float32[Array, "Q R M"], ...]
    """See `scoring.Found`."""


class Stepped(NamedTuple):
    """What one call has computed; of periods past the first that lacks a pack nothing."""

    hidden: Float[Array, "B 1 E"]
    """What enters the first period that has not run."""
    buffers: tuple[LayerKv, ...]
    """Of each step."""
    record: Int32[Array, "P R X"]
    """Of each period, see `scoring.Record`."""
    scores: Float32[Array, "P R M"]
    states: States
    """As they were of a period that did not run."""
    missing: Int32[Array, ""]
    """The first period that lacks a pack."""
    logits: Float32[Array, "B V"]
    """Of no meaning where a pack is missing, as is what was sampled, and before the last call."""
    sampled: Int32[Array, " B"]


class _Takes(NamedTuple):
    """What a period takes that stays from token to token."""

    layers: tuple[tuple[LayerState, ...], ...]
    """Of each step."""
    selects: tuple[Any, ...]
    """`SelectCall` from `rows` to `near`."""


class _Period(NamedTuple):
    """What of a period a program is made for beside shapes."""

    scores: tuple[int, ...]
    """Which of its layers do."""
    rule: Rule
    keep: Keep
    groups: tuple[int, ...]
    """How many each step has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Static:
    """What a program is made for beside shapes; equal ones are one object."""

    periods: tuple[_Period, ...]
    columns: int
    total: int
    """Periods of a token."""


class Run(NamedTuple):
    """The periods of one call, for the rows of one batch."""

    of_periods: slice
    steps: slice
    takes: tuple[_Takes, ...]
    places: Int32[ArrayLike, "steps 2"]
    """Of each step its first layer group, and the period."""
    ends: Bool[ArrayLike, " 2"]
    """Whether it has the first period, and the last."""
    static: _Static
    key: tuple[object, ...]


class Token:
    """The call over the layers of one model."""

    def __init__(self, layers: Layers, scoring: Scoring, plan: Plan) -> None:
        self._layers = layers
        self._plan = plan
        in_turn = layers.target.in_host_memory and layers.shardings.mesh is None
        made = layers.once(_token_of, layers.functions, scoring.function, in_turn)
        self._token = layers.programs.jit(made, static=("static", "context"), donate=("buffers",))
        self._calls = in_few_sizes(plan) if in_turn else [range(plan.periods)]
        self.warming = False
        """Whether a warm-up runs, in which tokens compile their calls, see `warmup.warm`."""
        self.warmed = 0
        """Rows of the largest batch that was warmed up. Tokens of batches up to it never wait for a
        compilation."""
        self.nothing_missing = np.int32(plan.periods)
        """What the first call is given of what is missing."""

    def no_hidden(self, batch: int) -> np.ndarray:
        """Hidden states [B, 1, E] for the first call."""
        return np.zeros((batch, 1, self._layers.config.hidden_size), self._layers.dtype)

    def runs(self, calls: Sequence[SelectCall], batch: int, columns: int) -> list[Run]:
        """The calls of one token of `batch` rows. `calls`: the selection of each period; `columns`:
        those of the tables of slots."""
        found, by_period = [], self._plan.by_period
        for periods in self._calls:
            takes, static, key = [], [], []
            for number in periods:
                mine, call = by_period[number].steps, calls[number]
                first = mine[0].layers.start
                takes.append(
                    _Takes(
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
                key.append((call.key, *(len(step.layers) for step in mine)))
            steps = [step for number in periods for step in by_period[number].steps]
            made = self._layers.once(_Static, tuple(static), columns, self._plan.periods)
            found.append(
                Run(
                    of_periods=slice(periods.start, periods.stop),
                    steps=slice(steps[0].index, steps[-1].index + 1),
                    takes=tuple(takes),
                    places=np.array([[step.groups.start, step.period] for step in steps], np.int32),
                    ends=np.array([not periods.start, periods.stop == self._plan.periods]),
                    static=made,
                    key=(tuple(key), made, batch),
                )
            )
        return found

    def call(
        self,
        run: Run,
        hidden: Float[Array | np.ndarray, "B 1 E"],
        missing: Int32[ArrayLike, ""],
        buffers: tuple[LayerKv, ...],
        states: States,
        given: Inputs,
    ) -> Stepped:
        """Runs the periods of a call; `buffers` are donated.

        `hidden` and `missing` are of the call before; those of the first are `no_hidden` and
        `nothing_missing`.
        """
        context = buffers[0][0][0].shape[1]
        made: Stepped = self._token(
            self._key(run, context, states, given), self._layers.weights[1], run.takes, buffers,
            states, hidden, missing, run.places, run.ends, given, static=run.static,
            context=context,
        )  # fmt: skip
        return made

    def ready(self, run: Run, context: int, states: States, given: Inputs) -> bool:
        """Whether the call over buffers of `context` rows is compiled."""
        return self._token.compiled(self._key(run, context, states, given))

    def _key(self, run: Run, context: int, states: States, given: Inputs) -> tuple[object, ...]:
        shapes = np.shape(given.where.slots), states.windows[0].chunk.shape
        return run.key, context, given.pages.shape, states.recent[0].shape, *shapes


def in_few_sizes(plan: Plan) -> list[range]:
    """The periods of each call, in that of at most three splits which compiles soonest: the one of
    the fewest periods in calls of different sizes."""

    def split(calls: int) -> list[range]:
        bounds = [plan.periods * call // calls for call in range(calls + 1)]
        return [range(first, stop) for first, stop in pairwise(bounds)]

    def compiled(periods: Sequence[range]) -> int:
        return sum({len(some) for some in periods})

    return min(map(split, range(1, min(MOST_CALLS, plan.periods) + 1)), key=compiled)


def _token_of(
    functions: Functions, select: Callable[..., Found], in_turn: bool
) -> Callable[..., Stepped]:
    seam = _in_turn if in_turn else _at_once

    def token(
        rest: LayerState, periods: tuple[_Takes, ...], buffers: tuple[LayerKv, ...],
        states: States, hidden: Array, missing: Array, places: Array, ends: Array, given: Inputs,
        *, static: _Static, context: int,
    ) -> Stepped:  # fmt: skip
        arrays: tuple[Any, ...] = given
        tokens, start, at, pages, step, order, which, where, sampling, counts = arrays
        score = jax.jit(partial(select), static_argnames=("rule", "keep"))  # traced once
        extend = jax.jit(partial(functions.extend), static_argnames=("context", "parts"))
        hidden = jnp.where(ends[0], functions.embed(rest, tokens), hidden)
        kv, place, after, founds = iter(buffers), iter(places), [], []
        for takes, one, window, recent in zip(periods, static.periods, *states, strict=True):
            found = seam(
                missing >= static.total,
                _score(score, takes, one, hidden, start, step),
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
            for weights, table in zip(takes.layers, of_steps, strict=True):

                def layers(
                    carry: tuple[Array, LayerKv],
                    weights: tuple[LayerState, ...] = weights,
                    table: Array = table,
                ) -> tuple[Array, LayerKv]:
                    hidden, kv = carry
                    out: tuple[Array, LayerKv] = extend(
                        weights, hidden, start, kv, at, pages, table, context=context, parts=1
                    )
                    return out

                ran, mine = seam(there, layers, (hidden, next(kv)))
                hidden = jnp.where(there, ran, hidden)
                after.append(mine)

        def end() -> tuple[Array, Array]:
            logits, _ = functions.head(rest, hidden, jnp.zeros(start.shape, jnp.int32))
            return logits, sample(logits, sampling, counts)

        def none() -> tuple[Array, Array]:
            logits, sampled = jax.eval_shape(end)
            return jnp.zeros(logits.shape, logits.dtype), jnp.zeros(sampled.shape, sampled.dtype)

        if in_turn:
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
    select: Callable[..., Found], takes: _Takes, one: _Period, hidden: Array, start: Array,
    step: Array,
) -> Callable[[Found], Found]:  # fmt: skip
    of_period = [state for states in takes.layers for state in states]
    states = tuple(of_period[layer] for layer in one.scores)
    rows, *others = takes.selects

    def score(before: Found) -> Found:
        return select(
            states, hidden, rows, start, *others, before.window, step, before.recent,
            rule=one.rule, keep=one.keep,
        )  # fmt: skip

    return score


def _in_turn(runs: Array, function: Callable[[T], T], before: T) -> T:
    """`function(before)`, or `before` where it does not run. A loop of one turn: XLA fuses nothing
    across its ends, so that the bits are those of a call of its own, and updates it in place."""
    like = jax.eval_shape(function, before)
    before = jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), before, like)
    _, after = lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.zeros((), bool), function(carry[1])),
        (runs, before),
    )  # fmt: skip
    found: T = after
    return found


def _at_once(runs: Array, function: Callable[[T], T], before: T) -> T:
    """`function(before)`, whether that is of use or not: an accelerator would ask the host."""
    barrier: Callable[[T], T] = lax.optimization_barrier
    after: T = barrier(function(barrier(before)))
    return after
