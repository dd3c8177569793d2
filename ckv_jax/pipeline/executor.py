"""One re-prefill: suffixes over stored prefixes, one or several, from tokens to first token.

The paper's §4.3 on one engine thread: select at each period's first layer, submit the period's
packs in layer order, run each subperiod as soon as its packs are there, and keep the reader busy
with what the next period will probably need. The only host syncs are the selected ids.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
from ckv_jax.pipeline.resident import Resident, Selected
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.selection.base import Selection, Share
from ckv_jax.selection.two_stages import Rule
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import RawSpan, Span, Trace


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
    """Of each choice (`Plan.choices`) the selected chunk ids, int32 [B, N], -1 where there is
    none."""
    kv: list[LayerKv]
    """Each step's suffix (K, V) [B, S, K, D] of its layers; empty where nothing is generated."""
    attention: Callable[[int], np.ndarray] | None = None
    """Of a row: the share of the probe's attention on each chunk, float32 [M], averaged over
    selections; None: the executor does not score chunks."""


class _Asker(NamedTuple):
    """What one member selects by, the same in every period."""

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
    limits: tuple[ArrayLike, ArrayLike]
    """int32 [b] each: chunks that a row selects, and that lookahead guesses for it."""
    share: Share
    rules: tuple[Rule, Rule]
    """Of a selection, and of a guess at one."""
    shape: tuple[object, ...]
    """What of it programs are compiled for."""


Wanted = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(which prefix, layer group, chunk) int [n] each of some packs."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """One re-prefill on its way."""

    batch: Batch
    packs: Packs
    trace: Trace
    hold: bool
    start: ArrayLike
    """int32 [B], see `Batch.start`."""
    owners: np.ndarray
    askers: list[_Asker]
    """Of each member."""
    entered: list[Array]
    """The hidden states [B, S, E] that enter each period so far, and the next one."""
    picks: list[list[Selection]] = field(default_factory=list)
    """Of each period so far, of each member."""
    selections: list[np.ndarray] = field(default_factory=list)
    """See `FirstToken`, as is the next."""
    kv: list[LayerKv] = field(default_factory=list)
    spans: list[RawSpan] = field(default_factory=list)
    resident: bool = True
    """Whether all packs selected so far were on the device."""


class ReprefillExecutor:
    """What answers the re-prefills of one engine: the core's `Executor`, or what
    `OwnParts.executor` makes. Engine thread only, but for `settle` and `close`."""

    def probes(self, opened: OpenPrefix, trace: Trace) -> Digest:
        """What of a prefix is scored for one batch, until `cancel`: its digest, or what stands in
        for it. Raises `RecoveryNeeded` where that has to be computed again."""
        return opened.life.probes(opened, trace)

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """First tokens of `batch`. With `hold`, packs stay in their slots until `packs` is left."""
        raise NotImplementedError

    def warm(self, tokens: Int32[np.ndarray, "B S"]) -> None:
        """Compiles what batches of so many `tokens` need beside what one over a single prefix
        does."""

    def served(self, prefix: Prefix) -> Prefix:
        """The form of `prefix` that its requests read: `prefix`, or one in another order."""
        return prefix

    def forget(self, prefix: Prefix) -> None:
        """`prefix`, in any form, is no longer in the store, or not as it was."""

    def settle(self) -> None:
        """Returns once nothing is being done in the background."""

    def close(self) -> None:
        """Ends what is being done in the background. Idempotent."""


class Executor(ReprefillExecutor):
    """The schedule of one model and system."""

    looks_up = True
    """Whether packs on the device may be looked up there, see `resident`; False where `_scorer` or
    `_selected` reads from the store."""

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        prefixes: OpenPrefixes,
        plan: Plan,
        system: SystemConfig,
    ) -> None:
        self.ahead = ReadAhead(system)
        self._layers = layers
        self._memory = memory
        self._prefixes = prefixes
        self._plan = plan
        self._system = system
        self._pieces = Piecewise(layers, memory)
        self._resident = Resident(layers, memory.tiers, plan)
        self._latest = layers.programs.jit(latest, static=("tokens",))
        self._guessed: set[tuple[int, tuple[object, ...]]] = set()
        """(period, `_Asker.shape`) of guesses that have been compiled."""
        self._prepared: set[tuple[object, ...]] = set()
        """`_Asker.shape` and columns of what has run with all that it may need compiled."""

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """See `ReprefillExecutor.run`.

        What the caches are to know of it is recorded when `packs` is left, after the answer.
        """
        members, clock = batch.members, time.perf_counter_ns
        began = clock()
        hidden = self._layers.embed(batch.tokens)
        run = _Run(
            batch=batch,
            packs=packs,
            trace=trace,
            hold=hold,
            start=self._layers.put(batch.start),
            owners=batch.owners(),
            askers=[self._asker(batch, member, hidden.shape[1]) for member in members],
            entered=[hidden],
        )
        booked: list[int] = []
        packs.book = lambda: self._book(batch, run.picks, booked)
        run.spans.append(("dispatch", "host", began, clock(), {}))
        first = self._run_resident(run)
        if first is None:
            first = self._run_rest(run)
        for member in members:
            member.opened.resident = run.resident
        logits, token_ids = first
        masses = jax.device_get([[pick.mass for pick in mine] for mine in run.picks])
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
            attention=partial(batch.attention, run.picks),
        )

    def _run_resident(self, run: _Run) -> tuple[Array, np.ndarray] | None:
        """Logits and first tokens, dispatched at once over packs that are on the device.

        None: it is not tried, or a pack was missing; `run` is left at the period that lacks it.
        """
        if (columns := self._columns(run.batch)) is None:
            return None
        [member], [asker], clock = run.batch.members, run.askers, time.perf_counter_ns
        if not member.opened.resident or (*asker.shape, columns) not in self._prepared:
            return None
        began = clock()
        where = self._resident.map([member.opened], len(run.owners))
        hidden, missing = run.entered[0], self._resident.nothing_missing
        picks: list[Selection] = []
        for number, period in enumerate(self._plan.by_period):
            pick = self._select(member, asker, number, self._given(hidden, asker))
            for step in period.steps:
                tables, missing = self._resident.tables(
                    step, pick.ids, asker.rows, asker.none, where, missing, columns
                )
                hidden, suffix = self._layers.run(
                    step.layers, hidden, run.start, self._memory.pool.pages, tables
                )
                run.kv.append(suffix)
            picks.append(pick)
            run.entered.append(hidden)
        logits, token = self._layers.head(hidden, np.maximum(run.batch.lengths - 1, 0))
        stacked = self._resident.stack(picks)
        called = clock()
        run.spans.append(("dispatch", "host", began, called, {}))
        token_ids, missing, *parts = jax.device_get((token, missing, *stacked))  # the only wait
        ready, there = clock(), int(missing)
        run.spans.append(("compute", "compute", called, ready, {"period": there - 1}))
        steps = sum([len(period.steps) for period in self._plan.by_period[:there]])
        del run.entered[there + 1 :], run.kv[steps:]
        run.picks.extend([pick] for pick in Selected(*parts).selections()[:there])
        packs, whole = 0, there == len(self._plan.by_period)
        for period, mine in zip(self._plan.by_period, run.picks, strict=False):
            chosen = run.batch.by_row(self._found(run, mine))
            run.selections.extend(chosen)
            if run.hold and not whole:  # what is missing must not take their slots
                for step in period.steps:
                    run.packs.demand(*self._wanted(step.groups, run.owners, chosen))
            else:
                packs += period.groups.size * len(np.unique(chosen[chosen >= 0]))
        run.trace.count_bytes("device", packs * member.opened.prefix.layout.pack_bytes)
        run.spans.append(("select", "host", ready, clock(), {}))
        return (logits, token_ids) if whole else None

    def _columns(self, batch: Batch) -> int | None:
        """Columns of the tables of a batch whose packs may be looked up on the device: one over
        one prefix; None: they may not."""
        if not self.looks_up or self._plan.parts > 1 or len(batch.members) > 1:
            return None
        return batch.members[0].columns

    def _found(self, run: _Run, mine: Sequence[Selection]) -> list[np.ndarray]:
        """The ids int32 [b, J, n] that each member selected for a period; waits for them."""
        found = []
        for member, pick in zip(run.batch.members, mine, strict=True):
            ids = np.asarray(pick.ids)[:, : member.columns]
            if member.columns is None:
                ids = member.trimmed(ids)
            found.append(ids.reshape(len(member.rows), self._plan.parts, -1))
        return found

    def _run_rest(self, run: _Run) -> tuple[Array, np.ndarray]:
        """Logits and first tokens; from the first period that has not run on, what it selects is
        read where it is missing."""
        plan, members, clock = self._plan, run.batch.members, time.perf_counter_ns
        first, last, spans = len(run.picks), len(plan.by_period) - 1, run.spans
        run.resident, choosing = True, 0
        began = clock()
        for which, member in enumerate(members):
            if not first:
                opening = self.ahead.opening(member.opened, int(member.limits.sum()))
                self._read_ahead(run.packs, which, 0, opening)
            self._begin(member)
        spans.append(("submit", "host", began, clock(), {}))
        for number in range(first, last + 1):
            choosing += self._run_period(run, number)
        began = clock()
        logits, token = self._layers.head(run.entered[-1], np.maximum(run.batch.lengths - 1, 0))
        self.ahead.pace.selected(choosing * 1e-9 / ((last + 1 - first) * len(members)))
        if run.trace.bytes["ssd"]:
            self.ahead.pace.read(run.trace.spans)  # while the device computes
        if (columns := self._columns(run.batch)) is not None:
            [asker], [pick] = run.askers, run.picks[-1]
            self._resident.prepare([members[0].opened], pick, asker.rows, asker.none, columns)
            self._prepared.add((*asker.shape, columns))
        token_ids = np.asarray(token)
        spans.append(("compute", "compute", began, clock(), {"period": last + 1}))
        return logits, token_ids

    def _run_period(self, run: _Run, number: int) -> int:
        """Selects for a period, brings what is missing, and runs its layers; returns nanoseconds
        from the hidden states to the selection."""
        plan, batch, packs, clock = self._plan, run.batch, run.packs, time.perf_counter_ns
        members, owners, hidden, spans = batch.members, run.owners, run.entered[-1], run.spans
        period = plan.by_period[number]
        began = clock()
        given, mine = [], []
        for member, asker in zip(members, run.askers, strict=True):
            given.append(self._given(hidden, asker))
            mine.append(self._select(member, asker, number, given[-1]))
            mine[-1].ids.copy_to_host_async()  # an accelerator sends them once they are known
        called = clock()
        hidden.block_until_ready()
        ready = clock()
        found = self._found(run, mine)
        selected = clock()
        chosen = batch.by_row(found)  # [J, B, N]
        run.selections.extend(chosen)
        wanted, size = [], 0
        for step in period.steps:
            wanted.append(self._wanted(step.groups, owners, chosen))
            size += len(wanted[-1][0])
        fits = size <= self._memory.step_slots
        missing, there = 0, [False] * len(wanted)
        if fits and self._system.prefetch != "none":
            for which, some in enumerate(wanted):  # what a read brings is awaited together
                missing += packs.demand(*some)
                there[which] = packs.resident
        run.resident &= all(there)
        guesses = self._guesses(run, number, given, found, missing) if fits else []
        for member, pick in zip(members, mine, strict=True):
            self._selected(member, number, pick)
        lengths = batch.valid(chosen)
        submitted = clock()
        spans.append(("dispatch", "host", began, called, {"period": number}))
        spans.append(("compute", "compute", called, ready, {"period": number - 1}))
        spans.append(("select", "host", ready, selected, {"period": number}))
        spans.append(("submit", "host", selected, submitted, {"period": number}))
        for step, some, resident in zip(period.steps, wanted, there, strict=True):
            began = clock()
            tables = None
            try:
                if not fits or self._system.prefetch == "none":
                    packs.demand(*some)
                if not resident:
                    packs.collect(*some)
                slots = packs.slots(owners, step.groups, chosen)
                tables = np.concatenate([slots, lengths], dtype=np.int32)
            except PoolExhausted:
                hidden, suffix = self._pieces.run(
                    batch.start, packs, step, chosen, lengths, owners, hidden
                )
            if tables is not None:
                hidden, suffix = self._layers.run(
                    step.layers, hidden, run.start, self._memory.pool.pages, tables,
                    parts=plan.parts,
                )  # fmt: skip
                for which in range(0 if run.hold else len(members)):
                    for group in step.groups:
                        packs.done(which, group, hidden)
            run.kv.append(suffix)
            called = clock()
            spans.append(("dispatch", "host", began, called, {"period": number}))
            if step.selects and guesses:
                for which, likely in guesses:
                    self._read_ahead(packs, which, number + 1, np.asarray(likely))
                spans.append(("submit", "host", called, clock(), {"period": number + 1}))
        run.picks.append(mine)
        run.entered.append(hidden)
        return selected - ready

    def _guesses(
        self,
        run: _Run,
        number: int,
        given: Sequence[Array],
        found: Sequence[np.ndarray],
        missing: int,
    ) -> list[tuple[int, Array | np.ndarray]]:
        """(member, chunks) that the period after `number` may select, of which `missing` packs were
        not cached for this one."""
        if not self.ahead.across or number == len(self._plan.by_period) - 1:
            return []
        if self._system.prefetch == "previous":
            return [(which, ids[:, 0]) for which, ids in enumerate(found)]
        members, guesses = run.batch.members, list[tuple[int, Array | np.ndarray]]()
        size = missing * members[0].opened.prefix.layout.pack_bytes // len(members)
        pays = self.ahead.pace.ahead_pays(size)
        for which, (member, asker) in enumerate(zip(members, run.askers, strict=True)):
            if pays or (number, asker.shape) not in self._guessed:
                # A shape that is new is tried whether it pays or not: what adapts to measured
                # times must not compile in the middle of later traffic.
                self._guessed.add((number, asker.shape))
                run.trace.count("guesses", 1)
                ahead = self._select(member, asker, number + 1, given[which], guess=True)
                guesses.append((which, ahead.ids))
        return guesses

    def _begin(self, member: Member) -> None:
        """A member's first selection is about to be made."""

    def _selected(self, member: Member, period: int, selection: Selection) -> None:
        """A member has selected for a period, and what it demands is being read."""

    def _asker(self, batch: Batch, member: Member, suffix: int) -> _Asker:
        opened, limits = member.opened, member.limits
        tokens = self._tokens(suffix)
        skipped = np.maximum(member.lengths - tokens, 0)
        guessed = guessed_chunks(limits, self._system.overfetch)
        room = chunk_bucket(int(limits.max()), opened.num_chunks)
        more = math.ceil(room * self._system.overfetch)
        cut = len(batch.members) > 1 or tokens != suffix
        placed = self._layers.put(
            {
                "start": batch.start[member.rows] + skipped,
                "lengths": member.lengths - skipped,
                "skipped": skipped if cut else None,
                "rows": member.rows,
                "none": np.zeros_like(member.rows),
                "tokens": np.int32(opened.prefix.num_tokens),
                "chunks": np.int32(opened.num_chunks),
                "limits": (limits, guessed),
                "share": member.share,
            }
        )
        rules = self._rule(opened, limits, room), self._rule(opened, guessed, more)
        shape = (len(member.rows), tokens, opened.probe_chunks, rules[True])
        return _Asker(**placed, rules=rules, shape=shape)

    def _select(
        self, member: Member, asker: _Asker, period: int, hidden: Array, *, guess: bool = False
    ) -> Selection:
        """What `period` selects by these hidden states [b, S, E], or a guess at that."""
        return self._layers.select(
            self._scorer(member, period, guess), hidden, asker.start, asker.lengths,
            asker.tokens, asker.chunks, asker.limits[guess], asker.rules[guess], asker.share,
        )  # fmt: skip

    def _scorer(self, member: Member, period: int, guess: bool) -> Scorer:
        """The layers and probes that score for a period; kept with the digest, where it is one."""
        of, probes = self._plan.by_period[period], member.probes
        layers = of.scoring[:1] if guess else of.scoring
        kept = probes.scorers
        if (period, guess) not in kept:
            kept[period, guess] = self._layers.scorer(layers, probes.get(layers, period))
        scorer: Scorer = kept[period, guess]
        return scorer

    def _rule(self, opened: OpenPrefix, limits: np.ndarray, room: int) -> Rule:
        choose = self._system.choose
        coarse = choose.coarse
        return Rule(
            n=min(room, opened.probe_chunks),
            chunk_tokens=self._system.chunk_tokens,
            window=choose.queries,
            peaks=choose.peaks,
            score=choose.score,
            stages=None if coarse is None else coarse.stages(limits, opened.num_chunks),
            each=self._plan.parts > 1,
            always=self._system.always,
        )

    def _tokens(self, suffix: int) -> int:
        """Of so many suffix tokens, how many a selection is given: those that may score, in one
        bucket whatever the suffix, since programs that select are many."""
        window = self._system.choose.queries
        return suffix if window is None else min(suffix, suffix_bucket(window))

    def _given(self, hidden: Array, asker: _Asker) -> Array:
        """A member's rows from the first token on that a selection is given."""
        skipped = asker.skipped
        return hidden if skipped is None else self._cut(hidden, asker.rows, skipped)

    def _cut(self, hidden: Array, rows: ArrayLike, skipped: ArrayLike) -> Array:
        tokens = self._tokens(hidden.shape[1])
        cut: Array = self._latest(
            (hidden.shape, np.shape(rows), tokens), hidden, rows, skipped, tokens=tokens
        )
        return cut

    def warm(self, tokens: Int32[np.ndarray, "B S"]) -> None:
        """Compiles what batches of so many `tokens` need beside what one over a single prefix does,
        where each prefix has a power of two of their rows."""
        hidden, rows = self._layers.embed(tokens), 1
        while rows <= len(tokens) > 1:
            some = self._layers.put(np.zeros(rows, np.int32))
            self._cut(hidden, some, some)
            rows *= 2

    def _wanted(self, groups: range, owners: np.ndarray, chosen: np.ndarray) -> Wanted:
        """The packs that rows of these owners [B] chose, each once, in the order of the layers."""
        most = int(chosen.max(initial=0)) + 1
        ids = owners[:, None] * most + chosen
        mine = []
        for group in groups:
            part = group % len(chosen)
            mine.append(np.unique(ids[part][chosen[part] >= 0]))
        which, chunks = np.divmod(np.concatenate(mine), most)
        return which, np.repeat(groups, list(map(len, mine))), chunks

    def _read_ahead(self, packs: Packs, which: int, period: int, chunks: np.ndarray) -> None:
        """Starts reads of chunks int [...], -1: none, at low priority."""
        if chunks.size:
            wanted = np.unique(chunks[chunks >= 0])
            for group in self._plan.by_period[period].groups[0].tolist():
                packs.ahead(which, group, wanted)

    def _book(self, batch: Batch, picks: list[list[Selection]], booked: list[int]) -> None:
        """Records what the periods selected since the last time; `booked` has those before."""
        periods, parts = range(len(booked), len(picks)), self._plan.parts
        booked.extend(periods)
        if not periods:
            return
        picks[periods.start :] = jax.device_get(picks[periods.start :])  # one wait for all
        groups = self._plan.group_table[periods.start * parts : periods.stop * parts]
        chosen = []
        for which, member in enumerate(batch.members):
            mine = [picks[period][which] for period in periods]
            together = Selection._make(_together(one, parts) for one in zip(*mine, strict=True))
            chosen.append((member.opened, together))
            for period, pick in zip(periods, mine, strict=True):
                ids = np.asarray(pick.ids)
                member.opened.latest[period] = ids.reshape(-1, parts, ids.shape[1])
                if period == 0:
                    self.ahead.remember(member.opened, pick)
        self._prefixes.record_all(groups, chosen)


def _together(several: Sequence[Array], parts: int) -> np.ndarray:
    """Arrays [b * J, ...] of some periods as one, [b * P * J, ...]: all choices of a row stand one
    after the other."""
    arrays = [np.asarray(array) for array in several]
    shape = arrays[0].shape[1:]
    found = np.stack([array.reshape(-1, parts, *shape) for array in arrays], axis=1)
    return found.reshape(-1, *shape)


def latest(hidden: Array, rows: Array, skipped: Array, *, tokens: int) -> Array:
    """`tokens` hidden states of each of `rows` [B, S, E] -> [b, tokens, E], the first skipped."""
    at = skipped[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    return hidden[rows[:, None], at]


RECURRENCE = 0.5
"""Reads the previous request's first selection ahead only if half of it recurred: below that, the
packs read for nothing delay the selection's own by more than is won."""

_KEPT = 15  # of the latest measurements: enough for a median that compilations do not move

READ = "pack_read"
"""The name of the spans that reads of packs leave in a trace."""


class Pace:
    """Running medians of one engine: how long choosing and reading take on this machine.

    A guess at the next period, the call that makes it and the packs it reads for nothing cost about
    as much as a selection does; at best it hides the time that the period's packs take to read. On
    two CPU cores a selection took 2.5 ms: for 2 ms of reads per period, guessing made a request 7%
    slower, for 8 ms 13% faster.
    """

    def __init__(self) -> None:
        self._select_s: deque[float] = deque(maxlen=_KEPT)
        self._byte_s: deque[float] = deque(maxlen=_KEPT)
        self._worth = -1.0  # bytes that take as long to read as a selection takes

    def selected(self, seconds: float) -> None:
        """A selection took so long once its hidden state was there."""
        self._select_s.append(seconds)
        self._compare()

    def read(self, spans: Iterable[Span]) -> None:
        """Takes the speed of a request's pack reads from its trace."""
        reads = sorted([(s.start_ns, s.end_ns, s.args["bytes"]) for s in spans if s.name == READ])
        busy = last = size = 0
        for start, end, moved in reads:
            busy += max(0, end - max(start, last))
            last = max(last, end)
            size += moved
        if busy:
            self._byte_s.append(busy * 1e-9 / max(1, size))
            self._compare()

    def ahead_pays(self, num_bytes: int) -> bool:
        """Whether to guess, where a period had to read so many bytes; yes until this is known."""
        return num_bytes > self._worth

    def _compare(self) -> None:
        if self._select_s and self._byte_s:
            self._worth = statistics.median(self._select_s) / statistics.median(self._byte_s)


class ReadAhead:
    """What one system reads ahead. Engine thread only."""

    def __init__(self, system: SystemConfig) -> None:
        self.across = system.prefetch in ("previous", "lookahead")
        """Whether packs of a period are read before it has selected."""
        self.pace = Pace()

    def opening(self, opened: OpenPrefix, limit: int) -> np.ndarray:
        """Chunks int [<= limit] to read before anything is selected, by the request before."""
        if self.across and opened.recurrence >= RECURRENCE:
            return opened.opening[:limit]
        return opened.opening[:0]

    def remember(self, opened: OpenPrefix, selection: Selection) -> None:
        """Notes a first period's selection, most attended first, for `opening`."""
        chosen, attention = np.asarray(selection.ids), np.asarray(selection.attention)
        taken = chosen >= 0
        most = np.zeros(opened.num_chunks, np.float32)
        np.maximum.at(most, chosen[taken], attention[taken])
        union = np.unique(chosen[taken])
        best = union[np.argsort(-most[union], kind="stable")]
        n = min(len(best), len(opened.opening))
        again = len(np.intersect1d(best[:n], opened.opening[:n]))
        opened.recurrence = again / n if n else 0.0
        opened.opening = best


def guessed_chunks(limits: np.ndarray, overfetch: float) -> np.ndarray:
    """How many chunks lookahead guesses for each row, int32 [B], of which it selects `limits`.

    Rows share the excess: guesses are read as one, and what one row nearly chose another chose.
    """
    share = 1 + (overfetch - 1) / len(limits)
    more: np.ndarray = np.ceil(limits * share).astype(np.int32)
    return more
