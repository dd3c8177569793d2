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
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int32

from ckv_jax.buckets import batch_bucket, bucket, chunk_bucket
from ckv_jax.decode.token import (
    NO_PAGES,
    Call,
    DecodeContext,
    Found,
    Inputs,
    Probes,
    Recent,
    Record,
    SelectCall,
    States,
    Stepped,
)
from ckv_jax.decode.window import (
    BatchWindows,
    Keep,
    Kept,
    PrefixRows,
    RowSelector,
    Tables,
    Window,
    WindowArrays,
    WindowPacks,
    by_prefix,
    lookahead,
)
from ckv_jax.model.sampling import SamplingArrays
from ckv_jax.pipeline.layers import LayerKv, probe_key
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.tiers import counted
from ckv_jax.selection.base import Rule, Selection
from ckv_jax.trace import TokenTrace, Trace

_TOKENS_BEFORE_COMPILING = 16
"""Consecutive tokens that find all packs on the device, after which compiling calls of several
periods pays off."""
_MAX_PREFIXES_PER_CALL = 16
Extend = Callable[..., tuple[Array, LayerKv]]
"""A function of the form of `Layers.extend`."""


class DecodeSelections:
    """Creates the selections of one engine's generations. Engine thread only."""

    def __init__(
        self, context: DecodeContext, made: Callable[[DecodeContext], DecodeSelection] | None = None
    ) -> None:
        """`made`: creates the selections of one batch; default: `DecodeSelection`."""
        self.context = context
        self._made = made or DecodeSelection

    def row(self, limit: int, digest: Digest, window: Window) -> RowSelector:
        """Creates the selector of a generation, with `limit` chunks for each token."""
        return RowSelector(limit=limit, digest=digest, window=window)

    def batch(self) -> DecodeSelection:
        """Creates the selections of a batch."""
        return self._made(self.context)


class DecodeSelection:
    """Selections of the rows of one decode batch. Engine thread only."""

    looks_up = True
    """Whether packs on the device may be looked up there, see `resident`; False where `select`,
    `extend`, `dispatched` or `settled` is another one."""

    def __init__(self, context: DecodeContext, *, keep: Keep = lookahead) -> None:
        """`keep`: eviction policy of the windows."""
        self._runtime = runtime = context.runtime
        plan, system, memory = runtime.plan, runtime.system, runtime.memory
        assert system.decode is not None
        self._scoring = context.scoring
        self._token = context.token
        self._plan = plan
        self._system = system
        self._decode = system.decode
        self._memory = memory
        self._tiers = memory.tiers
        self._put = runtime.layers.put
        self._keep = keep
        self.rows: dict[int, RowSelector] = {}
        self._by_prefix: list[PrefixRows] = []
        """None of them: what the device has of the rows is to be made."""
        self._calls: list[list[Call]] = []
        """By period."""
        self._alike = False
        """Whether each period has one call for all rows."""
        self._on_device: list[WindowArrays] = []
        """Of each period, the windows of all rows [B, W], or of all heads of each [B*K, W]."""
        self._count = 0
        """Of tokens."""
        self._step: ArrayLike = 0
        """Of each row on the device, see `Scoring.select`."""
        self._due = np.zeros(0, bool)
        """Rows that select for the token."""
        self._due_calls: list[list[Call]] = []
        """By period, calls with such a row."""
        self.selects_next = True
        """Whether some row selects for the next token."""
        self.keeps = False
        """Whether no row selects for the token: all attend to what they selected latest."""
        self._scored = -1
        """The period of the token that lacks a pack, for which `token` has selected already."""
        self._found_all = 0
        """Number of latest tokens that found all selected packs on the device."""
        self._all_scores: list[np.ndarray] | None = None
        """Of the token, of several periods [P, R, M] each; None: they are read one by one."""
        self._packs: Packs | None = None
        self._trace = Trace()
        self._arrived: list[WindowPacks] = []
        """Packs that the token has read into windows, for the caches to own."""
        self._ns = [0, 0]
        """Times that the token waited for selections and for packs."""

    # -- rows -------------------------------------------------------------------------------------

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
                call.came, call.pinned, call.away = (), NO_PAGES, None
        self._settle()
        if self._packs is not None:
            self._packs.finish()
            self._packs = None

    def release(self) -> None:
        """Gives every row what the device has of it: rows or windows are about to change."""
        self.rest()
        if self._by_prefix and self._windows.held:
            for period, window in enumerate(self._on_device):
                self._windows.from_device(self._plan.selections_of(period), window)
        count = self._plan.selections_per_period
        for call in (call for calls in self._calls for call in calls):
            if not len(call.recent.scores):
                continue  # the system selects by the newest query alone
            recent = np.asarray(call.recent.scores)
            for row, place in zip(call.rows[::count], call.place[::count], strict=True):
                self.rows[place].recent[call.period] = recent[:, row : row + count]
        self._by_prefix, self._calls = [], []

    def _begin_rows(self, batch: int) -> None:
        """Makes what the device and this object have of `batch` rows, selecting or not."""
        plan, decode = self._plan, self._decode
        self._by_prefix = by_prefix(self.rows)
        self._which = np.zeros(batch, np.int64)
        for on in self._by_prefix:
            self._which[on.rows[: len(on.selectors)]] = on.which
        self._placed_which = self._put(self._which.astype(np.int32))
        self._places = np.array(sorted(self.rows))
        chunks = max(on.opened.num_chunks for on in self._by_prefix)
        self._columns = columns = chunk_bucket(self.widest, chunks)
        """Of tables."""
        self._rule = Rule(
            n=columns,
            chunk_tokens=self._runtime.layout.chunk_tokens,
            peaks=decode.peaks,
            score=decode.score,
            each=plan.selections_per_period > 1,
            always=self._system.always,
        )
        slots = math.ceil(min(columns * self._system.window, bucket(chunks)))
        if (widest := max(row.window.open for row in self.rows.values())) > slots:
            slots = bucket(widest)  # widths may be uneven: what a window holds is pinned
        windows = {place: selector.window for place, selector in self.rows.items()}
        kept = Kept.nothing(batch, plan.selections, count=columns, slots=max(columns, slots))
        self._windows = BatchWindows(windows, kept, self._memory, plan)
        if any(selector.age for selector in self.rows.values()):
            self._windows.find()
        self._attention = np.zeros((batch, plan.selections, columns), np.float32)
        self._mass = np.ones((batch, plan.selections), np.float32)
        periods = range(plan.periods)
        self._on_device = [self._windows.to_device(plan.selections_of(one)) for one in periods]
        self._calls = [self._calls_of(period) for period in periods]
        self._alike = self.looks_up and plan.selections_per_period == 1 and self._windows.held
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
            for run in self._token.runs([call.of for call in calls], columns)
        ]
        self._no_hidden = self._put(self._token.no_hidden(batch))

    def _calls_of(self, period: int) -> list[Call]:
        """The calls that select for a period. Prefixes with one row each and probes of equal shapes
        share a call, a prefix with several rows has one of its own."""
        layers = self._plan.scoring_layers(period, self._decode.score_layers)
        coarse = self._decode.coarse
        groups: dict[tuple[Rule, Hashable], list[tuple[PrefixRows, Probes]]] = {}
        for on in self._by_prefix:
            stages = None if coarse is None else coarse.stages(on.limits, on.opened.num_chunks)
            probes = tuple(on.selectors[0].digest.get(layers, period))
            key = on.which if len(on.rows) > 1 else tuple(map(probe_key, probes))
            groups.setdefault((self._rule._replace(stages=stages), key), []).append((on, probes))
        return [
            self._call(period, alike[first : first + _MAX_PREFIXES_PER_CALL], rule)
            for (rule, _), alike in groups.items()
            for first in range(0, len(alike), _MAX_PREFIXES_PER_CALL)
        ]

    def _call(self, period: int, some: Sequence[tuple[PrefixRows, Probes]], rule: Rule) -> Call:
        """A call of these prefixes, as many as a bucket has: those past them select nothing."""
        layers = self._plan.scoring_layers(period, self._decode.score_layers)
        every = [*some, *[some[0]] * (batch_bucket(len(some)) - len(some))]
        tokens = np.array([on.opened.prefix.num_tokens for on, _ in every], np.int32)
        chunks = np.array([on.opened.num_chunks for on, _ in every], np.int32)
        places = np.concatenate([on.rows for on, _ in every])
        limits = np.concatenate([on.limits for on, _ in some])
        limits = np.pad(limits, (0, len(places) - len(limits)))
        states = tuple(map(self._runtime.layers.state, layers))
        probes = tuple([probes for _, probes in every])
        rows, tokens, chunks, most = self._put((places, tokens, chunks, limits))
        of = SelectCall(tuple(layers), states, rows, probes, tokens, chunks, most, rule, self._keep)
        selects, count = np.flatnonzero(limits), self._plan.selections_per_period
        each = np.arange(count)
        rows = (selects[:, None] * count + each).reshape(-1)
        place = np.repeat(places[selects], count)
        selection = np.tile(period * count + each, len(selects))
        ids = np.full((len(places) * count, rule.n), -1, np.int32)
        ids[rows] = self._windows.kept.ids[place, selection]
        queries = self._decode.queries or 1
        shape = queries * (queries > 1), len(ids), some[0][0].opened.probe_chunks
        scores = np.zeros(shape, np.float32)
        selectors = [selector for on, _ in some for selector in on.selectors if selector.limit]
        for row, selector in zip(rows[::count].tolist(), selectors, strict=True):
            known = selector.recent.get(period)
            if known is not None:
                scores[:, row : row + count, : known.shape[2]] = known
        recent = Recent(*jax.device_put((scores, ids)))
        return Call(period, of, recent, rows=rows, place=place, selection=selection)

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
        self, period: int, hidden: Array, starts: Int32[np.ndarray, " B"], tables: Tables
    ) -> Tables:
        """Selects for a period of the token whose hidden states [B, 1, E] enter it, and brings what
        is missing.

        `starts`: positions of the tokens; `tables`: see `Layers.run`, what the period's layer
        groups attend to of rows that do not select. Returns the same of all rows.
        """
        if period != self._scored:
            self.score(period, hidden, starts)
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

    def attended(self, period: int, tables: Tables) -> Tables:
        """The `tables` of a period with what each row has selected latest, see `select`."""
        if not self._windows.held:
            return tables
        return self._windows.attended(self._places, self._plan.selections_of(period), tables)

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
    ) -> tuple[int, Stepped] | None:
        """The token's calls, dispatched at once over packs that are on the device.

        `buffers`: of each step, see `Token.step`. Returns how many periods have run, and the last
        call's results; its logits and what was sampled, on the host, count if all have. None: the
        calls are not compiled.
        """
        resident = self._runtime.resident
        where = resident.map([on.opened for on in self._by_prefix], len(self._which))
        given = Inputs(
            tokens, start, at, self._memory.pool.pages, self._step, self._order,
            self._placed_which, where, sampling, counts,
        )  # fmt: skip
        calls = []
        for run in self._runs:
            recent = tuple([call.recent for [call] in self._calls[run.of_periods]])
            calls.append((run, States(tuple(self._on_device[run.of_periods]), recent)))
        # In a batch that was warmed up all calls are compiled; in others that pays off late.
        made = self._token.step(
            calls, self._no_hidden, resident.nothing_missing, buffers, given,
            compiles=self._found_all >= _TOKENS_BEFORE_COMPILING,
        )  # fmt: skip
        if made is None:
            return None
        observed = [stepped.scores for stepped in made] if self._tiers.observes else []
        records = [stepped.record for stepped in made]
        found, self._all_scores, there, sampled = jax.device_get(
            (records, observed, made[-1].missing, made[-1].sampled)
        )  # the only wait
        self._take(int(there), made, found)
        return int(there), made[-1]._replace(sampled=sampled)

    def _take(
        self, periods: int, made: Sequence[Stepped], found: Sequence[Int32[np.ndarray, "P R X"]]
    ) -> None:
        """Windows hold what the first `periods` have selected, which is all on the device; the next
        one has selected, too."""
        records = found[0] if len(found) == 1 else np.concatenate(found)
        if periods:
            rows = records[:periods, self._every.rows]
            every = replace(self._every, record=Record.of(rows.reshape(-1, rows.shape[2])))
            count = rows.shape[0] * rows.shape[1]
            every.place, every.selection = every.place[:count], every.selection[:count]
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
        self._advance([call for [call] in self._calls[:periods]])

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
        self._book()
        self._settle()
        self.settled(ids)
        if not self.keeps:
            self._found_all = 0 if self._counts.any() else self._found_all + 1
        layout, counters = self._runtime.layout, self._trace.counters
        size = layout.chunk_bytes // layout.groups
        packs = (ids >= 0).sum(axis=2) @ (self._plan.group_table >= 0).sum(axis=1)
        masses, self.selects_next = self._mass[self._places].mean(axis=1), False
        for row, place in enumerate(self._places.tolist()):
            selector = self.rows[place]
            host, ssd = self._counts[:, place].tolist()
            mass = float(masses[row]) if self._due[place] else selector.trace.attention_mass
            selector.age = (selector.age + 1) % self._decode.every
            self.selects_next |= not selector.age
            selector.trace = TokenTrace(
                device_hits=int(packs[row]) - host - ssd,
                host_hits=host,
                ssd_reads=ssd,
                recomputed=counters.get("recomputed_packs", 0),
                ahead=counters.get("covered", 0),
                unused=self._trace.bytes["unused"] // size,
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
            call.found.record.copy_to_host_async()
            window = call.found.window

    def _demand_all(self, period: int) -> None:
        """Starts reading what windows lack, as soon as each call has selected."""
        for call in self._due_calls[period]:
            self._demand(call)

    def _demand(self, call: Call) -> None:
        """Waits for what a call selected, and starts reading what windows lack of it."""
        assert call.found is not None
        call.record = Record.of(np.asarray(call.found.record)[call.rows])
        self._make_room(call)

    def _make_room(self, call: Call) -> None:
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
        self._advance(self._due_calls[period])

    def _arrive(self, call: Call) -> None:
        """Windows hold what a call selected."""
        windows, record = self._windows, call.record
        assert record is not None
        if call.came:
            windows.kept.chunk[call.came[:3]] = call.came[3]
        call.came, call.pinned, call.away = (), NO_PAGES, None
        windows.kept.ids[call.place, call.selection] = record.ids
        windows.slots[call.place, call.selection] = record.slots
        self._attention[call.place, call.selection] = record.attention
        self._mass[call.place, call.selection] = record.mass

    def _advance(self, calls: Iterable[Call]) -> None:
        """What the device knows of the windows of some calls is what they hold now."""
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

    def _book(self) -> None:
        """Records what the token selected, and what each chunk got."""
        if self.keeps:
            return
        plan, ids, selected = self._plan, self._windows.kept.ids, []
        scores = self._scores_by_place() if self._tiers.observes else {}
        for on in self._by_prefix:
            rows = on.rows[: len(on.selectors)]
            by_period = ids[rows].reshape(len(rows), plan.periods, plan.selections_per_period, -1)
            on.opened.latest = dict(enumerate(by_period.swapaxes(0, 1)))
            due = rows[self._due[rows] & (on.limits[: len(rows)] > 0)]
            if not len(due):
                continue
            given = np.zeros((len(due), ids.shape[1], 0), np.float32)
            if scores:
                given = np.stack([scores[place] for place in due.tolist()])
            each = ids[due], self._attention[due], self._mass[due], given
            flat = (part.reshape(len(due) * ids.shape[1], *part.shape[2:]) for part in each)
            selected.append((on.opened, Selection._make(flat)))
        self._runtime.prefixes.record_all(plan.group_table, selected)

    def _scores_by_place(self) -> dict[int, np.ndarray]:
        """Returns the scores of every chunk, float32 [selections, M]."""
        found: dict[int, list[np.ndarray]] = {}
        count = self._plan.selections_per_period
        calls = [call for calls in self._due_calls for call in calls]
        if self._all_scores is not None:
            given = [scores for several in self._all_scores for scores in several]
        else:
            given = jax.device_get([call.found.scores for call in calls if call.found])
        for call, scores in zip(calls, given, strict=True):  # read at once: each is a wait
            for row, place in zip(call.rows[::count], call.place[::count], strict=True):
                found.setdefault(int(place), []).append(scores[row : row + count])
        return {place: np.concatenate(several) for place, several in found.items()}

    def _opened(self) -> Packs:
        if self._packs is None:
            sources = [on.opened for on in self._by_prefix]
            self._packs = self._runtime.open_packs(sources, self._trace)
        return self._packs
