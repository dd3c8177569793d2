"""Selections of a decode batch: chunks that each row attends to, per token (KVDrive §5, §6.1).

Before each period the newest tokens' queries score every row's prefix, in one call for all that fit
into one. The call also finds what of a selection its row's window lacks and what makes room for it.
While later calls score, the packs that the earlier ones lack are read; the period's layers then run
once for the whole batch. Caches and statistics hear of a token once, when all its calls are
dispatched. Windows and the order of all this change when bytes arrive, never what is attended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int32

from ckv_jax.buckets import batch_bucket, bucket, chunk_bucket
from ckv_jax.decode.eviction import Keep, lookahead
from ckv_jax.decode.eviction import Window as WindowArrays
from ckv_jax.decode.scoring import Found, Recent, Record, Scoring, SelectCall
from ckv_jax.decode.token import Inputs, Run, States, Stepped, Token
from ckv_jax.decode.window import BatchWindows, Window, WindowPacks
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.model.sampling import SamplingArrays
from ckv_jax.pipeline.executor import Runtime
from ckv_jax.pipeline.layers import LayerKv, probe_key
from ckv_jax.pipeline.plan import Step
from ckv_jax.pipeline.resident import PackMap, Resident
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.tiers import counted
from ckv_jax.selection.base import Rule, Selection
from ckv_jax.selection.select import Stages
from ckv_jax.trace import TokenTrace, Trace

_MAX_PREFIXES_PER_CALL = 16
"""Maximum number of prefixes in one call."""
_TOKENS_BEFORE_COMPILING = 16
"""Consecutive tokens that find all packs on the device, after which compiling calls of several
periods pays off."""
_NO_PAGES = np.zeros(0, np.int64)
Extend = Callable[..., tuple[Array, LayerKv]]
"""A function of the form of `Layers.extend`."""


class RowSelector:
    """Selection of one row of a decode batch: how many chunks, and by which scores."""

    def __init__(
        self,
        *,
        limit: int,
        digest: Digest,
        window: Window,
        apart: bool = False,
    ) -> None:
        """`limit`: chunks of a selection; `digest`: what of its prefix is scored; `apart`: it has a
        call of its own, also where others stand on its prefix."""
        self.limit = limit
        self.apart = apart
        self.digest = digest
        self.window = window
        self.trace = TokenTrace()
        """Of the latest token."""
        self.recent: dict[int, np.ndarray] = {}
        """Period -> scores float32 [Q, J, M] of the latest selections, see `scoring.Recent`; a
        batch has newer ones."""
        self.age = 0
        """Tokens since the latest selection; 0: the next token selects."""

    @property
    def slots(self) -> int:
        """Device slots of a window that holds one selection."""
        return self.limit * self.window.opened.prefix.layout.groups

    def widths(self, times: float) -> np.ndarray:
        """Slots int [selections] of its windows, for `times` selections each on average."""
        slots = min(int(self.limit * times + 1e-6), self.window.opened.num_chunks)
        return np.full(len(self.window.kept.ids), slots)

    def resize(self, times: float) -> None:
        """Resizes its windows to `times` selections each on average."""
        self.window.resize(self.widths(times))


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
    near: Int32[np.ndarray, " b"]
    """Chunks of each row that are selected or near misses."""

    @property
    def opened(self) -> OpenPrefix:
        """The prefix."""
        return self.selectors[0].window.opened


def by_prefix(rows: dict[int, RowSelector], near: float) -> list[PrefixRows]:
    """The selecting rows of a batch, by their places, each with the others of its prefix. `near`:
    chunks that are selected or near misses, for each that is selected."""
    found: dict[Hashable, list[int]] = {}
    for place, selector in sorted(rows.items()):
        key = id(selector.window.opened), place if selector.apart else None
        found.setdefault(key, []).append(place)
    prefixes = []
    for which, places in enumerate(found.values()):
        limits = [rows[place].limit for place in places]
        padding = [0] * (batch_bucket(len(places)) - len(places))
        wide = [math.ceil(limit * near) for limit in limits]
        mine = (np.array([*part, *padding], np.int32) for part in (places, limits, wide))
        prefixes.append(PrefixRows(which, [rows[place] for place in places], *mine))
    return prefixes


@dataclass(slots=True)
class _Call:
    """One call that selects for a period: of one prefix, or of several with a row each."""

    period: int
    of: SelectCall
    recent: Recent
    """As before the token, until it is finished: it may have to begin again."""
    rows: np.ndarray
    """int [k]: the rows of its record that select, all J of each batch row."""
    firsts: list[tuple[int, int]]
    """The first of them of each batch row, and that row's place."""
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
    pinned: np.ndarray = field(default_factory=lambda: _NO_PAGES)
    """Pages of those that were on the device, until windows have them."""
    away: WindowPacks | None = None
    """Packs of the others."""
    wanted: tuple[np.ndarray, ...] = ()
    """(prefix, layer group, chunk) of these, each once, and where each of `away` is among them."""
    back: np.ndarray = field(default_factory=lambda: _NO_PAGES)


class DecodeContext(NamedTuple):
    """Context of one engine's decode, from which selections are created."""

    scoring: Scoring
    runtime: Runtime
    token: Token


class TokenMade(NamedTuple):
    """A token whose calls were dispatched at once."""

    hidden: Array
    """Hidden states that enter the first period that has not run, [B, 1, E]."""
    periods: int
    """Number of periods that have run."""
    logits: Array
    """float32 [B, V], as is what was sampled where all have run."""
    sampled: np.ndarray | None
    """int32 [B]; None: some have not."""


class DecodeSelections:
    """Creates the selections of one engine's generations. Engine thread only."""

    def __init__(
        self,
        context: DecodeContext,
        made: Callable[[DecodeContext], DecodeSelection] | None = None,
    ) -> None:
        """`made`: creates the selections of one batch; default: `DecodeSelection`."""
        self.context = context
        self._made = made or DecodeSelection

    def row(
        self, limit: int, digest: Digest, window: Window, *, apart: bool = False
    ) -> RowSelector:
        """Creates the selector of a generation, with `limit` chunks for each token."""
        return RowSelector(limit=limit, digest=digest, window=window, apart=apart)

    def batch(self) -> DecodeSelection:
        """Creates the selections of a batch."""
        return self._made(self.context)


class DecodeSelection:
    """Selections of the rows of one decode batch. Engine thread only."""

    looks_up = True
    """Whether packs on the device may be looked up there, see `resident`; False where `select`,
    `extend`, `dispatched` or `settled` is another one."""

    def __init__(
        self, context: DecodeContext, *, keep: Keep = lookahead, near: float = 1.0
    ) -> None:
        """`keep`: eviction policy of the windows; `near`: chunks that a token ranks for each one
        that it selects, see `Record.near`."""
        runtime = context.runtime
        plan, system, memory = runtime.plan, runtime.system, runtime.memory
        assert system.decode is not None and system.decode.queries is not None
        self._scoring = context.scoring
        self._plan = plan
        self._select = system.decode
        self._queries = system.decode.queries if system.decode.queries > 1 else 0
        self._system = system
        self._prefixes = runtime.prefixes
        self._memory = memory
        self._tiers = memory.tiers
        self._open_packs = runtime.open_packs
        self._keep = keep
        self._near = near
        self.rows: dict[int, RowSelector] = {}
        self._by_prefix: list[PrefixRows] = []
        """None of them: what the device has of the rows is to be made."""
        self._calls: list[list[_Call]] = []
        """By period."""
        self._on_device: list[WindowArrays] = []
        """Of each period, the windows of all rows [B, W], or of all heads of each [B*K, W]."""
        self._count = 0
        """Of tokens."""
        self._step: ArrayLike = 0
        """Of each row on the device, see `Scoring.select`."""
        self._due = np.zeros(0, bool)
        """Rows that select for the token."""
        self._due_calls: list[list[_Call]] = []
        """By period, calls with such a row."""
        self.selects_next = True
        """Whether some row selects for the next token."""
        self.keeps = False
        """Whether no row selects for the token: all attend to what they selected latest."""
        self._put = runtime.layers.put
        self._resident = Resident(runtime.layers, memory.tiers, plan)
        self._token = context.token
        self._nothing_missing: ArrayLike = self._put(self._token.nothing_missing)
        self._no_hidden: Array | np.ndarray = self._token.no_hidden(0)
        self._scored = -1
        """The period of the token that lacks a pack, for which `token` has selected already."""
        self._found_all = 0
        """Number of latest tokens that found all selected packs on the device."""
        self._alike = False
        """Whether each period has one call for all rows."""
        self._all_scores: list[np.ndarray] | None = None
        """Of the token, of several periods [P, R, M] each; None: they are read one by one."""
        self._packs: Packs | None = None
        self._trace = Trace()
        self._arrived: list[WindowPacks] = []
        """Packs that the token has read into windows, for the caches to own."""
        self._ns = [0, 0]
        """Times that the token waited for selections and for packs."""

    # -- rows -------------------------------------------------------------------------------------

    def selects(self, place: int) -> bool:
        """Whether the row at this place does."""
        return place in self.rows

    @property
    def widest(self) -> int:
        """Chunks of the largest selection."""
        return max([selector.limit for selector in self.rows.values()])

    def rows_are(self, rows: dict[int, RowSelector]) -> None:
        """The batch's rows by their places; their windows may have been resized since `release`."""
        self.release()
        self.rows, self.selects_next = rows, True

    def rest(self) -> None:
        """Ends all reads, so that the batch holds nothing but its windows, which pin what they
        have, also where a token has failed on its way."""
        for call in (call for calls in self._calls for call in calls):
            if call.came:
                self._tiers.unpin(*counted(call.pinned))
                call.came, call.pinned, call.away = (), _NO_PAGES, None
        self._settle()
        if self._packs is not None:
            self._packs.finish()
            self._packs = None

    def release(self) -> None:
        """Gives every row what the device has of it: rows or windows are about to change."""
        self.rest()
        if self._by_prefix and self._windows.held:
            for period, window in enumerate(self._on_device):
                selections = self._plan.selections_of(period)
                kept = self._windows.kept
                for part, known in ((kept.last, window.last), (kept.uses, window.uses)):
                    shape = part[:, selections.start : selections.stop].shape
                    part[:, selections.start : selections.stop] = np.asarray(known).reshape(shape)
        for period, calls in enumerate(self._calls if self._queries else ()):
            for call in calls:
                recent = np.asarray(call.recent.scores)
                for row, place in call.firsts:
                    self.rows[place].recent[period] = recent[:, row : row + self._plan.parts]
        self._by_prefix, self._calls = [], []

    def _begin_rows(self, batch: int) -> None:
        """Makes what the device and this object have of `batch` rows, selecting or not."""
        plan = self._plan
        self._by_prefix = by_prefix(self.rows, self._near)
        self._which = np.zeros(batch, np.int64)
        for on in self._by_prefix:
            self._which[on.rows[: len(on.selectors)]] = on.which
        self._placed_which = self._put(self._which.astype(np.int32))
        self._places = np.array(sorted(self.rows))
        chunks = max(on.opened.num_chunks for on in self._by_prefix)
        self._columns = chunk_bucket(self.widest, chunks)
        """Of tables."""
        self._n = math.ceil(self._columns * self._near)
        slots = min(math.ceil(self._columns * self._system.window), bucket(chunks))
        if (widest := max(row.window.open for row in self.rows.values())) > slots:
            slots = bucket(widest)  # widths may be uneven: what a window holds is pinned
        self._windows = BatchWindows(
            {place: selector.window for place, selector in self.rows.items()},
            self._memory, plan,
            rows=batch, count=self._n, slots=max(self._n, slots),
        )  # fmt: skip
        if any(selector.age for selector in self.rows.values()):
            self._windows.find()
        self._attention = np.zeros((batch, plan.selections, self._n), np.float32)
        self._mass = np.ones((batch, plan.selections), np.float32)
        self._on_device = []
        for period in range(plan.periods):
            state = self._windows.state(plan.selections_of(period))
            self._on_device.append(WindowArrays(*map(jax.device_put, state)))
        self._calls = [self._calls_of(period) for period in range(plan.periods)]
        self._alike = self.looks_up and plan.parts == 1 and self._windows.held
        self._alike &= all(len(c) == 1 and np.shape(c[0].of.rows) == (batch,) for c in self._calls)
        if not self._alike:
            return
        calls, order = [call for [call] in self._calls], np.full(batch, -1, np.int32)
        order[calls[0].place] = calls[0].rows
        self._order = self._put(order)
        """The row of a call that each row of the batch is."""
        self._every = replace(
            calls[0],
            place=np.concatenate([call.place for call in calls]),
            selection=np.concatenate([call.selection for call in calls]),
        )
        """The calls of all periods as one."""
        self._runs = [
            run._replace(places=self._put(run.places), ends=self._put(run.ends))
            for run in self._token.runs([call.of for call in calls], batch, self._columns)
        ]
        self._no_hidden = self._put(self._token.no_hidden(batch))

    def _calls_of(self, period: int) -> list[_Call]:
        """The calls of a period: prefixes of equal shapes with one row each are asked together, a
        prefix with several rows alone."""
        layers = self._plan.scoring_layers(period, self._select.score_layers)
        groups: dict[Hashable, list[list[_Scores]]] = {}
        for on in self._by_prefix:
            one = self._scores(on, period, layers)
            key: Hashable = on.which if len(on.rows) > 1 else one.shapes
            alike = groups.setdefault(key, [[]])
            if len(alike[-1]) == _MAX_PREFIXES_PER_CALL:
                alike.append([])
            alike[-1].append(one)
        return [self._call(some, period, layers) for alike in groups.values() for some in alike]

    def _scores(self, on: PrefixRows, period: int, layers: Sequence[int]) -> _Scores:
        """The probes that a prefix is scored by, and whether in two stages."""
        digest, coarse = on.selectors[0].digest, self._select.coarse
        stages = None if coarse is None else coarse.stages(on.limits, on.opened.num_chunks)
        rough = None
        if stages is not None:
            rough = self._prefixes.rough(on.opened, digest, layers[len(layers) // 2])
        return _Scores(on, tuple(digest.get(layers, period)), rough, stages)

    def _call(self, some: list[_Scores], period: int, layers: Sequence[int]) -> _Call:
        """A call of these prefixes, as many as a bucket has: those past them select nothing."""
        first, parts = some[0], self._plan.parts
        padding = [first] * (batch_bucket(len(some)) - len(some))
        every = [*some, *padding]
        nothing = [np.zeros_like(first.on.limits)] * len(padding)
        places = np.concatenate([one.on.rows for one in every])
        limits = np.concatenate([*(one.on.limits for one in some), *nothing])
        near = np.concatenate([*(one.on.near for one in some), *nothing])
        rule = Rule(
            n=self._n,
            chunk_tokens=first.on.opened.prefix.layout.chunk_tokens,
            peaks=self._select.peaks,
            score=self._select.score,
            stages=first.stages,
            each=parts > 1,
            always=self._system.always,
        )
        of = self._scoring.call(
            layers, places, [(one.probes, one.rough) for one in every],
            [one.on.opened.prefix.num_tokens for one in every],
            [one.on.opened.num_chunks for one in every],
            limits, near, rule, self._keep,
        )  # fmt: skip
        small = ("rows", "num_tokens", "num_chunks", "limits", "near")
        of = of._replace(**self._put({name: getattr(of, name) for name in small}))
        selects = np.flatnonzero(limits)
        each = np.arange(parts)
        chunks = first.on.opened.probe_chunks
        recent = np.zeros((self._queries, len(places) * parts, chunks), np.float32)
        for row in selects.tolist() if self._queries else ():
            known = self.rows[int(places[row])].recent.get(period)
            if known is not None:
                recent[:, row * parts : (row + 1) * parts, : known.shape[2]] = known
        rows = (selects[:, None] * parts + each).reshape(-1)
        place = np.repeat(places[selects], parts)
        selection = np.tile(period * parts + each, len(selects))
        ids = np.full((len(places) * parts, self._n), -1, np.int32)
        ids[rows] = self._windows.kept.ids[place, selection]
        return _Call(
            period,
            of,
            Recent(*jax.device_put((recent, ids))),
            rows=rows,
            firsts=[*zip((selects * parts).tolist(), places[selects].tolist(), strict=True)],
            place=place,
            selection=selection,
        )

    # -- a token ----------------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        """A token of `batch` rows begins, perhaps once more after a failure."""
        self._count += 1
        self._scored = -1
        due, step = 0, np.zeros(batch, np.int32) - 1
        for row, selector in self.rows.items():
            if not selector.age:
                step[row] = self._count
                due += 1
        self._step, self._due, self.keeps = self._put(step), step >= 0, not due
        self._trace, self._all_scores = Trace(), None
        if self._packs is not None:
            self._packs.report_to(self._trace)
        if not self._by_prefix:
            self._begin_rows(batch)
        self._due_calls = self._calls
        if due < len(self.rows):
            self._due_calls = [
                [call for call in calls if self._due[call.place].any()] for calls in self._calls
            ]
        self._counts = np.zeros((2, batch), np.int64)  # packs from host memory, from the store
        self._ns = [0, 0]
        if self.keeps and not self._windows.held:  # they are read again, see `decoder.Streaming`
            ids = self._windows.kept.ids
            place, selection, slot = np.nonzero(ids >= 0)
            chunk = ids[place, selection, slot]
            self._count_away(self._windows.packs(place, selection, slot, chunk))

    def select(
        self, period: int, hidden: Array, starts: Int32[np.ndarray, " B"],
        tables: Int32[np.ndarray, "Q B N"],
    ) -> Int32[np.ndarray, "Q B N"]:  # fmt: skip
        """Selects for a period of the token whose hidden states [B, 1, E] enter it, and brings what
        is missing.

        `starts`: positions of the tokens; `tables`: see `Layers.run`, what the period's layer
        groups attend to of rows that do not select. Returns the same of all rows.
        """
        if period != self._scored:
            self.score(period, hidden, starts)
            for call in self._due_calls[period]:
                assert call.found is not None
                call.found.record.copy_to_host_async()
        hidden.block_until_ready()
        ready = time.perf_counter_ns()
        try:
            self._demand_all(period)
            selected = time.perf_counter_ns()
            self._collect(period)
        except BaseException:
            self.release()  # what the device knows of windows is not what they hold
            raise
        self._ns[0] += selected - ready
        self._ns[1] += time.perf_counter_ns() - selected
        return self.attended(period, tables)

    def attended(
        self, period: int, tables: Int32[np.ndarray, "Q B N"]
    ) -> Int32[np.ndarray, "Q B N"]:
        """The `tables` of a period with what each row has selected latest, see `select`."""
        if not self._windows.held:
            return tables
        tables = tables.copy()
        slots, lengths = tables[: -self._plan.parts], tables[-self._plan.parts :]
        by_part = slots.reshape(-1, *lengths.shape)  # [G, J, B, N]
        count = min(slots.shape[2], self._n)
        found, valid = self._windows.attended(self._places, self._plan.selections_of(period), count)
        by_part[:, :, self._places, :count] = found[: len(by_part)]
        lengths[:, self._places, :count] = valid
        return tables

    def finds_all(self, rows: int) -> bool:
        """Whether the token's packs are looked up on the device, see `token`: all `rows` of the
        batch select by one call, and the token before found everything there."""
        found = self._found_all > 0 or self._token.warming
        return found and self._alike and len(self._places) == rows

    def token(
        self,
        tokens: ArrayLike,
        start: ArrayLike,
        at: ArrayLike,
        buffers: list[LayerKv],
        sampling: SamplingArrays,
        counts: np.ndarray,
    ) -> TokenMade | None:
        """The token's calls, dispatched at once over packs that are on the device.

        `buffers`: of each step, of which the (donated) arrays are replaced. See `Token.call`. None:
        they are not compiled, and no token waits for that outside of a warm-up.
        """
        given = Inputs(
            tokens, start, at, self._memory.pool.pages, self._step, self._order,
            self._placed_which, self._map(), sampling, counts,
        )  # fmt: skip
        states, context = [], buffers[0][0][0].shape[1]
        for run in self._runs:
            recent = tuple([call.recent for [call] in self._calls[run.of_periods]])
            states.append(States(tuple(self._on_device[run.of_periods]), recent))
        calls = list(zip(self._runs, states, strict=True))
        if not self._token.warming:
            ready = [self._token.ready(run, context, mine, given) for run, mine in calls]
            if not all(ready):
                if self._compiles:
                    self._compile(calls, buffers, given)
                return None
        hidden, missing, made = self._no_hidden, self._nothing_missing, []
        for run, mine in calls:
            kv = tuple(buffers[run.steps])
            stepped = self._token.call(run, hidden, missing, kv, mine, given)
            buffers[run.steps] = stepped.buffers
            hidden, missing = stepped.hidden, stepped.missing
            made.append(stepped)
        observed = [stepped.scores for stepped in made] if self._tiers.observes else []
        records = [stepped.record for stepped in made]
        found, self._all_scores, there, sampled = jax.device_get(
            (records, observed, missing, made[-1].sampled)
        )  # the only wait
        periods = int(there)
        self._take(periods, made, found)
        whole = periods == self._plan.periods
        return TokenMade(made[-1].hidden, periods, made[-1].logits, sampled if whole else None)

    @property
    def _compiles(self) -> bool:
        """Whether what the next tokens call is to be compiled beside them: in a batch larger than
        every warmed one, after `_TOKENS_BEFORE_COMPILING` tokens in a row that found all their
        packs."""
        larger = len(self._which) > self._token.warmed
        return larger and self._found_all >= _TOKENS_BEFORE_COMPILING

    def _compile(
        self, calls: Sequence[tuple[Run, States]], buffers: Sequence[LayerKv], given: Inputs
    ) -> None:
        """Begins to compile a token's calls on a thread."""
        for run, mine in calls:
            self._token.compile(
                run, self._no_hidden, self._nothing_missing, tuple(buffers[run.steps]), mine, given
            )

    def _take(
        self, periods: int, made: Sequence[Stepped], found: Sequence[Int32[np.ndarray, "P R X"]]
    ) -> None:
        """Windows hold what the first `periods` have selected, which is all on the device; the next
        one has selected, too."""
        records = found[0] if len(found) == 1 else np.concatenate(found)
        if periods:
            rows = records[:periods, self._every.rows]
            count = rows.shape[0] * rows.shape[1]
            every = replace(
                self._every,
                place=self._every.place[:count],
                selection=self._every.selection[:count],
                record=Record.of(rows.reshape(count, -1)),
            )
            self._make_room(every)
            self._arrive(every)
        if periods == self._plan.periods:
            for run, stepped in zip(self._runs, made, strict=True):
                windows, recent = stepped.states
                self._on_device[run.of_periods] = windows
                for [call], mine in zip(self._calls[run.of_periods], recent, strict=True):
                    call.after = mine
            return
        self._scored, self._all_scores = periods, None
        scores = np.concatenate([np.asarray(stepped.scores) for stepped in made])
        states = [state for one in made for state in zip(*one.states, strict=True)]
        for number, [call] in enumerate(self._calls[: periods + 1]):
            call.found = Found(records[number], scores[number], *states[number])
        self._advance(self._calls[:periods])

    def _map(self) -> PackMap:
        return self._resident.map([on.opened for on in self._by_prefix], len(self._which))

    def extend(self, step: Step) -> Extend | None:
        """What runs the layers of a step over the table of `select`, where a system attends in its
        own way; None: `Layers.extend`."""
        return None

    def dispatched(self, period: int) -> None:
        """A period's calls are dispatched; a system may do something while they compute."""

    def settled(self, ids: Int32[np.ndarray, "R S n"]) -> None:
        """Windows hold what the token selected; a system may read ahead for the next one."""

    def finish(self) -> None:
        """All calls of the token are dispatched: caches and statistics hear of it."""
        for calls in self._due_calls:
            for call in calls:
                call.recent, call.after = call.after or call.recent, None
        ids = self._windows.kept.ids[self._places]
        self._book(ids)
        self._settle()
        self.settled(ids)
        if not self.keeps:
            self._found_all = 0 if self._counts.any() else self._found_all + 1
        counted, unused = self._trace.counters, self._trace.bytes["unused"]
        packs = (ids >= 0).sum(axis=2) @ (self._plan.group_table >= 0).sum(axis=1)
        masses, self.selects_next = self._mass[self._places].mean(axis=1), False
        for row, place in enumerate(self._places.tolist()):
            selector = self.rows[place]
            layout = selector.window.opened.prefix.layout
            size = layout.chunk_bytes // layout.groups
            host, ssd = self._counts[:, place].tolist()
            mass = float(masses[row]) if self._due[place] else selector.trace.attention_mass
            selector.age = (selector.age + 1) % self._select.every
            self.selects_next |= not selector.age
            selector.trace = TokenTrace(
                device_hits=int(packs[row]) - host - ssd,
                host_hits=host,
                ssd_reads=ssd,
                recomputed=counted.get("recomputed_packs", 0),
                ahead=counted.get("covered", 0),
                unused=unused // size,
                pack_bytes=size,
                attention_mass=mass,
                select_ms=self._ns[0] / 1e6,
                fetch_ms=self._ns[1] / 1e6,
            )
        self._memory.trim()
        self._memory.flush()

    def score(self, period: int, hidden: Array, starts: Int32[ArrayLike, " B"]) -> None:
        """Dispatches the calls that select for a period."""
        window = self._on_device[period]
        for call in self._due_calls[period]:
            call.found = self._scoring.select(
                call.of, hidden, starts, window, self._step, call.recent
            )
            window = call.found.window

    def _demand_all(self, period: int) -> None:
        """Starts reading what windows lack, as soon as each call has selected."""
        for call in self._due_calls[period]:
            self._demand(call)

    def _demand(self, call: _Call) -> None:
        """Waits for what a call selected, and starts reading what windows lack of it."""
        assert call.found is not None
        call.record = Record.of(np.asarray(call.found.record)[call.rows])
        self._make_room(call)

    def _make_room(self, call: _Call) -> None:
        """Makes room for what the windows of a call's rows lack, and starts reading it."""
        windows, record = self._windows, call.record
        assert record is not None
        lacks = record.misses if windows.held else record.ids
        row, column = np.nonzero(lacks >= 0)
        if not len(row):
            return
        place, selection, chunk = call.place[row], call.selection[row], lacks[row, column]
        slot = record.slots[row, column]
        if windows.held:
            windows.evict(place, selection, slot)
        packs = windows.packs(place, selection, slot, chunk)
        device = self._count_away(packs)
        if not windows.held:
            return
        here = device >= 0
        call.came = place, selection, slot, chunk
        if here.any():
            windows.put(packs.where(here), device[here])
            call.pinned = packs.page[here]
            self._tiers.pin(*counted(call.pinned))
        if not here.all():
            call.away = away = packs.where(~here)
            groups, chunks = int(windows.groups.max()) + 1, windows.lengths.shape[1]
            group = self._which[away.place] * groups + away.group
            each, call.back = np.unique(group * chunks + away.chunk, return_inverse=True)
            group, chunk = np.divmod(each, chunks)
            call.wanted = *np.divmod(group, groups), chunk
            self._opened().demand(*call.wanted)

    def _count_away(self, packs: WindowPacks) -> np.ndarray:
        """Counts those that are not on the device; their device slots, -1: not there."""
        device, host = self._tiers.lookup(packs.page)
        away = device < 0
        np.add.at(self._counts, (np.where(host[away] >= 0, 0, 1), packs.place[away]), 1)
        return device

    def _collect(self, period: int) -> None:
        """Waits for what the windows of all rows lack; from then on they hold what was selected."""
        for call in self._due_calls[period]:
            if call.away is not None:
                slots = self._opened().collect(*call.wanted)
                self._windows.put(call.away, slots[call.back])
                self._arrived.append(call.away)
            self._arrive(call)
        self._advance([self._due_calls[period]])

    def _arrive(self, call: _Call) -> None:
        """Windows hold what a call selected."""
        windows, record = self._windows, call.record
        assert record is not None
        if call.came:
            windows.kept.chunk[call.came[:3]] = call.came[3]
        call.came, call.pinned, call.away = (), _NO_PAGES, None
        windows.kept.ids[call.place, call.selection] = record.ids
        windows.slots[call.place, call.selection] = record.slots
        self._attention[call.place, call.selection] = record.attention
        self._mass[call.place, call.selection] = record.mass

    def _advance(self, periods: Sequence[Sequence[_Call]]) -> None:
        """What the device knows of some periods' windows is what they hold now."""
        for calls in periods:
            for call in calls:
                assert call.found is not None
                call.after = call.found.recent
                self._on_device[call.period] = call.found.window

    def _settle(self) -> None:
        """What the token has read is cached, and pinned by its windows."""
        if not self._arrived:
            return
        parts = zip(*self._arrived, strict=True)
        arrived = WindowPacks(*(np.concatenate(part) for part in parts))
        self._arrived.clear()
        self._opened().keep()
        self._tiers.pin(*counted(arrived.page))
        self._windows.put(arrived, self._tiers.lookup(arrived.page)[0])

    def _book(self, ids: np.ndarray) -> None:
        """Records what the token selected, int32 [rows, selections, n], and what each chunk got."""
        if self.keeps:
            return
        selections, selected = self._plan.selections, []
        attention, mass = self._attention[self._places], self._mass[self._places]
        scores = self._scores_by_place() if self._tiers.observes else {}
        for on in self._by_prefix:
            mine = np.searchsorted(self._places, on.rows[: len(on.selectors)])
            own = ids[mine]
            on.opened.latest = {
                period: own[:, period * self._plan.parts : (period + 1) * self._plan.parts]
                for period in range(self._plan.periods)
            }
            mine = mine[self._due[self._places[mine]]]
            given = np.zeros((len(mine), selections, 0), np.float32)
            if not len(mine):
                continue
            if scores:
                given = np.stack([scores[place] for place in self._places[mine].tolist()])
            selected.append(
                (
                    on.opened,
                    Selection._make(
                        part.reshape(len(mine) * selections, *part.shape[2:])
                        for part in (ids[mine], attention[mine], mass[mine], given)
                    ),
                )
            )
        self._prefixes.record_all(self._plan.group_table, selected)

    def _scores_by_place(self) -> dict[int, np.ndarray]:
        """Returns the scores of every chunk, float32 [selections, M]."""
        found: dict[int, list[np.ndarray]] = {}
        calls = [call for calls in self._due_calls for call in calls]
        if self._all_scores is not None:
            given = [scores for several in self._all_scores for scores in several]
        else:
            given = jax.device_get([call.found.scores for call in calls if call.found])
        for call, scores in zip(calls, given, strict=True):  # read at once: each is a wait
            for row, place in call.firsts:
                found.setdefault(place, []).append(scores[row : row + self._plan.parts])
        return {place: np.concatenate(several) for place, several in found.items()}

    def _opened(self) -> Packs:
        if self._packs is None:
            sources = [on.opened for on in self._by_prefix]
            self._packs = self._open_packs(sources, self._trace)
        return self._packs


@dataclass(frozen=True, slots=True)
class _Scores:
    """Probes by which a prefix is scored in one period."""

    on: PrefixRows
    probes: tuple[Probe, ...]
    """One for each layer that scores, of which the scores are summed."""
    rough: Probe | None
    """See `selection.base.scored`."""
    stages: Stages | None

    @property
    def shapes(self) -> tuple[object, ...]:
        """Shapes for which a program is compiled; prefixes of equal shapes share a call."""
        return self.stages, *map(probe_key, (*self.probes, self.rough))
