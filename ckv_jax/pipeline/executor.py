"""The executor of one re-prefill: suffixes over stored prefixes, from tokens to first token.

The paper's §4.3 on one engine thread: select at each period's first layer, submit the period's
packs in layer order, run each subperiod as soon as its packs are there, and read ahead for the next
period what this one selected. The only host syncs are the selected ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int32

from ckv_jax.buckets import chunk_bucket, suffix_bucket
from ckv_jax.config import SystemConfig
from ckv_jax.pipeline.batch import Batch, Member
from ckv_jax.pipeline.layers import LayerKv, Layers, Scorer
from ckv_jax.pipeline.pieces import Piecewise
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.programs import Background
from ckv_jax.pipeline.resident import Looked, PackMap, Resident, Selector, latest, selections
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.selection.base import Rule, Selection
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import RawSpan, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The model, the store and the caches of one engine. Engine thread only."""

    layers: Layers
    store: ChunkStore
    system: SystemConfig
    layout: Layout
    plan: Plan
    memory: Memory
    prefixes: OpenPrefixes
    resident: Resident
    background: Background
    open_packs: Callable[[Sequence[Source], Trace], Packs]
    """The packs of some prefixes, for one batch: a context manager."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The outcome of a re-prefill, rows as in the batch."""

    logits: Array
    """float32 [B, V]."""
    token_ids: np.ndarray
    """int32 [B]."""
    attention_mass: np.ndarray
    """float32 [periods, B]: share of the probe's attention that the selection covers."""
    selections: list[np.ndarray]
    """Of each selection (`Plan.selections`) the selected chunk ids, int32 [B, N], -1 where there is
    none."""
    kv: list[LayerKv]
    """Each step's suffix (K, V) [B, S, K, D] of its layers; empty where nothing is generated."""
    attention: Callable[[int], np.ndarray] | None = None
    """Of a row: the share of the probe's attention on each chunk, float32 [M], averaged over
    selections; None: the executor does not score chunks."""


Wanted = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(which prefix, layer group, chunk) int [n] each of some packs."""


@dataclass(slots=True, kw_only=True)
class _Reprefill:
    """One re-prefill on its way."""

    batch: Batch
    packs: Packs
    trace: Trace
    hold: bool
    start: ArrayLike
    """int32 [B], see `Batch.start`."""
    owners: np.ndarray
    selectors: list[Selector]
    """Of each member."""
    entered: list[Array]
    """The hidden states [B, S, E] that enter each period so far, and the next one."""
    made: list[list[Selection]] = field(default_factory=list)
    """Of each period so far, of each member."""
    selections: list[np.ndarray] = field(default_factory=list)
    """See `FirstToken`, as is the next."""
    kv: list[LayerKv] = field(default_factory=list)
    spans: list[RawSpan] = field(default_factory=list)
    resident: bool = True
    """Whether all packs selected so far were on the device."""
    booked: int = 0
    """Periods whose selections the caches know of."""


class ReprefillExecutor:
    """The interface of an executor of re-prefills: the core's `Executor`, or what
    `OwnParts.executor` makes. Engine thread only, but for `settle` and `close`."""

    def use(self, prefixes: OpenPrefixes, prefix: Prefix) -> OpenPrefix:
        """Opens what requests over `prefix` read, see `OpenPrefixes.use`. Raises a `StoreError`
        where it has to read something for that, such as an order, and cannot."""
        return prefixes.use(prefix)

    def probes(self, opened: OpenPrefix, trace: Trace, stack: ExitStack) -> Digest:
        """Returns the probes of a prefix for one batch, valid until `stack` is closed: its digest,
        or a replacement. Raises `RecoveryNeeded` where they have to be recomputed."""
        return opened.life.probes(opened, trace)

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """Computes the first tokens of `batch`. With `hold`, packs stay in their slots until
        `packs` is closed."""
        raise NotImplementedError

    def warm(self, tokens: Int32[np.ndarray, "B S"]) -> None:
        """Compiles the programs of batches with `tokens`, besides those over a single prefix."""

    def settle(self) -> None:
        """Waits for all background work."""

    def close(self) -> None:
        """Ends all background work. Idempotent."""


class Executor(ReprefillExecutor):
    """The schedule of one model and system."""

    looks_up = True
    """Whether packs on the device may be looked up there, see `resident`; False where `_scorer` or
    `_selected` reads from the store."""

    def __init__(self, runtime: Runtime) -> None:
        self._layers = layers = runtime.layers
        self._memory = runtime.memory
        self._prefixes = runtime.prefixes
        self._plan = runtime.plan
        self._system = runtime.system
        self._pieces = Piecewise(layers, runtime.memory)
        self._resident = runtime.resident
        self._background = runtime.background
        self._latest = layers.programs.jit(latest, static=("tokens",))
        self._prepared: set[tuple[object, ...]] = set()
        """`Selector.shape` and columns of what has run with all that it may need compiled, but for
        calls of periods; and these with the shape of hidden states whose calls have begun to be."""

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """See `ReprefillExecutor.run`.

        What the caches are to know of it is recorded when `packs` is left, after the answer.
        """
        members, clock = batch.members, time.perf_counter_ns
        began = clock()
        hidden = self._layers.embed(batch.tokens)
        run = _Reprefill(
            batch=batch,
            packs=packs,
            trace=trace,
            hold=hold,
            start=self._layers.put_common(batch.start),
            owners=batch.owners(),
            selectors=[self._selector(batch, member, hidden.shape[1]) for member in members],
            entered=[hidden],
        )
        packs.book = lambda: self._book(run)
        run.spans.append(("dispatch", "host", began, clock(), {}))
        first = self._run_resident(run)
        if first is None:
            first = self._run_rest(run)
        for member in members:
            member.opened.resident = run.resident
        logits, token_ids = first
        masses = jax.device_get([[selection.mass for selection in mine] for mine in run.made])
        attention_mass = batch.masses(masses)
        trace.period_attention_mass += attention_mass[:, batch.lengths > 0].mean(axis=1).tolist()
        total = sum([len(member.real) * member.opened.num_chunks for member in members])
        trace.count_chunks(
            selected=sum([int((ids >= 0).sum()) for ids in run.selections]),
            total=total * len(run.selections),
        )
        trace.extend(run.spans)
        return FirstToken(
            logits=logits,
            token_ids=token_ids,
            attention_mass=attention_mass,
            selections=run.selections,
            kv=run.kv,
            attention=partial(batch.attention, run.made),
        )

    def _run_resident(self, run: _Reprefill) -> tuple[Array, np.ndarray] | None:
        """Logits and first tokens, dispatched at once over packs that are on the device.

        None: it is not tried, or a pack was missing; `run` is left at the period that lacks it.
        """
        if (columns := self._columns(run.batch)) is None:
            return None
        [member], [selector], clock = run.batch.members, run.selectors, time.perf_counter_ns
        if not member.opened.resident or (*selector.shape, columns) not in self._prepared:
            return None
        began = clock()
        where = self._resident.map([member.opened], len(run.owners))
        hidden, missing = run.entered[0], self._resident.nothing_missing
        pages, made, looked = self._memory.pool.pages, list[Selection](), None
        for number, period in enumerate(self._plan.by_period):
            if self._resident.fuses:
                looked = self._in_one_call(run, number, hidden, where, missing, columns)
            if looked is not None:
                selection, hidden, kv, missing = looked
                run.kv += kv
            else:
                selection = self._select(member, selector, number, self._given(hidden, selector))
                for step in period.steps:
                    tables, missing = self._resident.tables(
                        step, selection.ids, selector.rows, selector.none, where, missing, columns
                    )
                    hidden, suffix = self._layers.run(step.layers, hidden, run.start, pages, tables)
                    run.kv.append(suffix)
            made.append(selection)
            run.entered.append(hidden)
        logits, token = self._layers.head(hidden, np.maximum(run.batch.lengths - 1, 0))
        stacked = self._resident.stack(made)
        called = clock()
        run.spans.append(("dispatch", "host", began, called, {}))
        token_ids, missing, *parts = jax.device_get((token, missing, *stacked))  # the only wait
        ready, there = clock(), int(missing)
        run.spans.append(("compute", "compute", called, ready, {"period": there - 1}))
        steps = sum([len(period.steps) for period in self._plan.by_period[:there]])
        del run.entered[there + 1 :], run.kv[steps:]
        run.made.extend([selection] for selection in selections(*parts)[:there])
        packs, whole = 0, there == len(self._plan.by_period)
        for period, mine in zip(self._plan.by_period, run.made, strict=False):
            selected = run.batch.by_row(self._found(run, mine))
            run.selections.extend(selected)
            if run.hold and not whole:  # what is missing must not take their slots
                for step in period.steps:
                    run.packs.demand(*self._wanted(step.groups, run.owners, selected))
            else:
                packs += period.groups.size * len(np.unique(selected[selected >= 0]))
        run.trace.count_bytes("device", packs * member.opened.prefix.layout.pack_bytes)
        run.spans.append(("select", "host", ready, clock(), {}))
        return (logits, token_ids) if whole else None

    def _prepare_calls(self, run: _Reprefill, columns: int) -> None:
        """Begins to compile the call of every period, once for requests of one shape."""
        shape = (*run.selectors[0].shape, columns, run.entered[0].shape)
        if shape in self._prepared:
            return
        self._prepared.add(shape)
        where = self._resident.map([run.batch.members[0].opened], len(run.owners))
        for number, hidden in enumerate(run.entered[: self._plan.periods]):
            missing = self._resident.nothing_missing
            if number and hidden.committed:  # as is what the period before returns
                missing = jax.device_put(missing, hidden.sharding)
            self._in_one_call(run, number, hidden, where, missing, columns, runs=False)

    def _in_one_call(
        self, run: _Reprefill, number: int, hidden: Array, where: PackMap, missing: ArrayLike,
        columns: int, *, runs: bool = True,
    ) -> Looked | None:  # fmt: skip
        """See `Resident.period`, for a batch of one member."""
        return self._resident.period(
            number, self._scorer(run.batch.members[0], number), run.selectors[0], hidden, run.start,
            self._memory.pool.pages, where, missing, columns, self._background, runs=runs,
        )  # fmt: skip

    def _columns(self, batch: Batch) -> int | None:
        """Columns of the tables of a batch whose packs may be looked up on the device: one over
        one prefix; None: they may not."""
        if not self.looks_up or self._plan.selections_per_period > 1 or len(batch.members) > 1:
            return None
        return batch.members[0].columns

    def _found(self, run: _Reprefill, mine: Sequence[Selection]) -> list[np.ndarray]:
        """The ids int32 [b, J, n] that each member selected for a period; waits for them."""
        found = []
        for member, selection in zip(run.batch.members, mine, strict=True):
            ids = np.asarray(selection.ids)[:, : member.columns]
            if member.columns is None:
                ids = member.trimmed(ids)
            found.append(ids.reshape(len(member.rows), self._plan.selections_per_period, -1))
        return found

    def _run_rest(self, run: _Reprefill) -> tuple[Array, np.ndarray]:
        """Logits and first tokens; from the first period that has not run on, what it selects is
        read where it is missing."""
        plan, members, clock = self._plan, run.batch.members, time.perf_counter_ns
        run.resident = True
        began = clock()
        for member in members:
            self._begin(member)
        run.spans.append(("submit", "host", began, clock(), {}))
        for number in range(len(run.made), len(plan.by_period)):
            self._run_period(run, number)
        began = clock()
        logits, token = self._layers.head(run.entered[-1], np.maximum(run.batch.lengths - 1, 0))
        if (columns := self._columns(run.batch)) is not None:
            [selector], [selection] = run.selectors, run.made[-1]
            if (shape := (*selector.shape, columns)) not in self._prepared:
                self._resident.prepare(
                    [members[0].opened], selection, selector.rows, selector.none, columns
                )
                self._prepared.add(shape)
            if self._resident.fuses:
                self._prepare_calls(run, columns)
        token_ids = np.asarray(token)
        run.spans.append(("compute", "compute", began, clock(), {"period": len(plan.by_period)}))
        return logits, token_ids

    def _run_period(self, run: _Reprefill, number: int) -> None:
        """Selects for a period, brings what is missing, and runs its layers."""
        plan, batch, packs, clock = self._plan, run.batch, run.packs, time.perf_counter_ns
        members, owners, hidden, spans = batch.members, run.owners, run.entered[-1], run.spans
        period = plan.by_period[number]
        began = clock()
        mine = []
        for member, selector in zip(members, run.selectors, strict=True):
            mine.append(self._select(member, selector, number, self._given(hidden, selector)))
            mine[-1].ids.copy_to_host_async()  # an accelerator sends them once they are known
        called = clock()
        hidden.block_until_ready()
        ready = clock()
        found = self._found(run, mine)
        decided = clock()
        selected = batch.by_row(found)  # [J, B, N]
        run.selections.extend(selected)
        wanted, size = [], 0
        for step in period.steps:
            wanted.append(self._wanted(step.groups, owners, selected))
            size += len(wanted[-1][0])
        fits = size <= self._memory.step_slots
        missing, there = 0, [False] * len(wanted)
        if fits and self._system.prefetch != "none":
            for which, some in enumerate(wanted):  # what a read brings is awaited together
                missing += packs.demand(*some)
                there[which] = packs.resident
        run.resident &= all(there)
        ahead = missing and self._system.prefetch == "previous" and number + 1 < len(plan.by_period)
        for member, selection in zip(members, mine, strict=True):
            self._selected(member, number, selection)
        lengths = batch.valid(selected)
        submitted = clock()
        spans.append(("dispatch", "host", began, called, {"period": number}))
        spans.append(("compute", "compute", called, ready, {"period": number - 1}))
        spans.append(("select", "host", ready, decided, {"period": number}))
        spans.append(("submit", "host", decided, submitted, {"period": number}))
        for step, some, resident in zip(period.steps, wanted, there, strict=True):
            began = clock()
            tables = None
            try:
                if not fits or self._system.prefetch == "none":
                    packs.demand(*some)
                if not resident:
                    packs.collect(*some)
                slots = packs.slots(owners, step.groups, selected)
                tables = np.concatenate([slots, lengths], dtype=np.int32)
            except PoolExhausted:
                hidden, suffix = self._pieces.run(
                    batch.start, packs, step, selected, lengths, owners, hidden
                )
            if tables is not None:
                hidden, suffix = self._layers.run(
                    step.layers, hidden, run.start, self._memory.pool.pages, tables,
                    selections=plan.selections_per_period,
                )  # fmt: skip
                for which in range(0 if run.hold else len(members)):
                    for group in step.groups:
                        packs.done(which, group, hidden)
            run.kv.append(suffix)
            called = clock()
            spans.append(("dispatch", "host", began, called, {"period": number}))
            if step.selects and ahead:
                for which, ids in enumerate(found):
                    self._read_ahead(packs, which, number + 1, ids[:, 0])
                spans.append(("submit", "host", called, clock(), {"period": number + 1}))
        run.made.append(mine)
        run.entered.append(hidden)

    def _begin(self, member: Member) -> None:
        """A member's first selection is about to be made."""

    def _selected(self, member: Member, period: int, selection: Selection) -> None:
        """A member has selected for a period, and what it demands is being read."""

    def _selector(self, batch: Batch, member: Member, suffix: int) -> Selector:
        opened, limits = member.opened, member.limits
        tokens = self._tokens(suffix)
        skipped = np.maximum(member.lengths - tokens, 0)
        cut = len(batch.members) > 1 or tokens != suffix
        placed = self._layers.put_common(
            {
                "start": batch.start[member.rows] + skipped,
                "lengths": member.lengths - skipped,
                "skipped": skipped if cut else None,
                "rows": member.rows,
                "none": np.zeros_like(member.rows),
                "tokens": np.int32(opened.prefix.num_tokens),
                "chunks": np.int32(opened.num_chunks),
                "limits": limits,
                "share": member.share,
            }
        )
        rule = self._rule(opened, limits)
        shape = (len(member.rows), tokens, opened.probe_chunks, rule)
        return Selector(**placed, rule=rule, shape=shape)

    def _select(self, member: Member, selector: Selector, period: int, hidden: Array) -> Selection:
        """Returns the selection of `period` by hidden states [b, S, E]."""
        return self._layers.select(
            self._scorer(member, period), hidden, selector.start, selector.lengths, selector.tokens,
            selector.chunks, selector.limits, selector.rule, selector.share,
        )  # fmt: skip

    def _scorer(self, member: Member, period: int) -> Scorer:
        """The layers and probes that score for a period; kept with the digest, where it is one."""
        layers, kept = self._plan.by_period[period].scoring, member.probes.scorers
        if period not in kept:
            kept[period] = self._layers.scorer(layers, member.probes.get(layers, period))
        scorer: Scorer = kept[period]
        return scorer

    def _rule(self, opened: OpenPrefix, limits: np.ndarray) -> Rule:
        select = self._system.reprefill
        coarse = select.coarse
        return Rule(
            n=min(chunk_bucket(int(limits.max()), opened.num_chunks), opened.probe_chunks),
            chunk_tokens=self._system.chunk_tokens,
            window=select.queries,
            peaks=select.peaks,
            score=select.score,
            stages=None if coarse is None else coarse.stages(limits, opened.num_chunks),
            each=self._plan.selections_per_period > 1,
            always=self._system.always,
        )

    def _tokens(self, suffix: int) -> int:
        """Of so many suffix tokens, how many a selection is given: those that may score, in one
        bucket whatever the suffix, since programs that select are many."""
        window = self._system.reprefill.queries
        return suffix if window is None else min(suffix, suffix_bucket(window))

    def _given(self, hidden: Array, selector: Selector) -> Array:
        """A member's rows from the first token on that a selection is given."""
        skipped = selector.skipped
        return hidden if skipped is None else self._cut(hidden, selector.rows, skipped)

    def _cut(self, hidden: Array, rows: ArrayLike, skipped: ArrayLike) -> Array:
        cut: Array = self._latest(hidden, rows, skipped, tokens=self._tokens(hidden.shape[1]))
        return cut

    def warm(self, tokens: Int32[np.ndarray, "B S"]) -> None:
        """Compiles what batches of so many `tokens` need beside what one over a single prefix does,
        where each prefix has a power of two of their rows."""
        hidden, rows = self._layers.embed(tokens), 1
        while rows <= len(tokens) > 1:
            some = self._layers.put(np.zeros(rows, np.int32))
            self._cut(hidden, some, some)
            rows *= 2

    def _wanted(self, groups: range, owners: np.ndarray, selected: np.ndarray) -> Wanted:
        """The packs that rows of these owners [B] selected, each once, in the order of the
        layers."""
        most = int(selected.max(initial=0)) + 1
        ids = owners[:, None] * most + selected
        mine = []
        for group in groups:
            part = group % len(selected)
            mine.append(np.unique(ids[part][selected[part] >= 0]))
        which, chunks = np.divmod(np.concatenate(mine), most)
        return which, np.repeat(groups, list(map(len, mine))), chunks

    def _read_ahead(self, packs: Packs, which: int, period: int, chunks: np.ndarray) -> None:
        """Starts reads of chunks int [...], -1: none, at low priority."""
        if chunks.size:
            wanted = np.unique(chunks[chunks >= 0])
            for group in self._plan.by_period[period].groups[0].tolist():
                packs.ahead(which, group, wanted)

    def _book(self, run: _Reprefill) -> None:
        """Records what the periods selected since the last time."""
        first, count = run.booked, self._plan.selections_per_period
        run.booked = len(run.made)
        if first == run.booked:
            return
        run.made[first:] = made = jax.device_get(run.made[first:])  # one wait for all
        groups = self._plan.group_table[first * count : run.booked * count]
        selected = []
        for member, mine in zip(run.batch.members, zip(*made, strict=True), strict=True):
            together = Selection._make(_concatenated(one, count) for one in zip(*mine, strict=True))
            selected.append((member.opened, together))
            for period, selection in enumerate(mine, start=first):
                ids = selection.ids
                member.opened.latest[period] = ids.reshape(-1, count, ids.shape[1])
        self._prefixes.record_all(groups, selected)


def _concatenated(arrays: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Arrays [b * J, ...] of some periods as one, [b * P * J, ...]: all selections of a row stand
    one after the other."""
    shape = arrays[0].shape[1:]
    found = np.stack([array.reshape(-1, count, *shape) for array in arrays], axis=1)
    return found.reshape(-1, *shape)
