"""One re-prefill: suffixes over stored prefixes, one or several, from tokens to first token.

The paper's §4.3 on one engine thread: select at each period's first layer, submit the period's
packs in layer order, run each subperiod as soon as its packs are there, and keep the reader busy
with what the next period will probably need. The only host syncs are the selected ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from ckv_jax.buckets import choice_bucket, suffix_bucket
from ckv_jax.cache.tiers import PoolExhausted
from ckv_jax.config import SystemConfig
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.batch import Batch, Member
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.outcome import chunks_of
from ckv_jax.pipeline.piecewise import Piecewise
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.pipeline.read_ahead import ReadAhead, guessed_chunks
from ckv_jax.reads.packs import Packs
from ckv_jax.reads.resident import Resident
from ckv_jax.reads.residents import Residents
from ckv_jax.selection.base import Selection
from ckv_jax.selection.two_stages import Rule
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace


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
    """Each step's suffix (K, V) [B, S, K, D] of its layers; empty where nobody decodes."""


class _Queries(NamedTuple):
    """What a member chooses by in one period, and guesses the next one by."""

    hidden: Array
    """Hidden states [b, S, E] that enter the period."""
    start: np.ndarray
    """int32 [b]: position of each row's first token in `hidden`."""
    lengths: np.ndarray
    """int32 [b]: real tokens of each row."""


class ReprefillExecutor:
    """What answers the re-prefills of one engine: the core's `Executor`, or what
    `SystemConfig.executor` makes. Engine thread only, but for `settle` and `close`."""

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

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        residents: Residents,
        plan: Plan,
        system: SystemConfig,
    ) -> None:
        self.ahead = ReadAhead(system)
        self._layers = layers
        self._memory = memory
        self._residents = residents
        self._plan = plan
        self._system = system
        self._pieces = Piecewise(layers, memory)
        self._latest = layers.programs.jit(latest, static=("tokens",))

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        """See `ReprefillExecutor.run`."""
        with trace.span("submit", lane="host"):
            for which, member in enumerate(batch.members):
                opening = self.ahead.opening(member.resident, int(member.limits.sum()))
                self._read_ahead(packs, which, 0, opening)
                member.probes.ahead(0)
        with trace.span("dispatch", lane="host"):
            hidden = self._layers.embed(batch.tokens)
        room = self._memory.step_slots
        masses, kv = [], []
        selections: list[np.ndarray] = []
        for period in range(self._plan.periods):
            with trace.span("dispatch", lane="host"):
                queries = [self._queries(batch, member, hidden) for member in batch.members]
            picks, found = self._select(batch, queries, hidden, period, trace)
            unions = [[chunks_of([ids]) for ids in rows.swapaxes(0, 1)] for rows in found]
            chosen = batch.by_row(found)
            packs_each = len(self._plan.groups(self._plan.choices_of(period)[0]))  # of a chunk
            fits = sum(len(ids) for mine in unions for ids in mine) * packs_each <= room
            with trace.span("submit", lane="host", period=period):
                guesses = self._ask(batch, packs, queries, period, picks, unions, fits, trace)
            for step in self._plan.period_steps(period):
                with trace.span("dispatch", lane="host"):
                    hidden, suffix = self._step(
                        batch, packs, step, chosen, unions, hidden, hold, asked=fits
                    )
                kv.append(suffix)
                if not step.selects:
                    continue
                with trace.span("submit", lane="host", period=period + 1):
                    for which, guess in enumerate(guesses):
                        self._read_ahead(packs, which, period + 1, guess())
                with trace.span("book", lane="host"):  # while the device computes
                    self._book(batch, period, picks, trace)
            masses.append(picks)
            selections.extend(chosen)
        began = time.perf_counter_ns()
        logits, token = self._layers.head(hidden, np.maximum(batch.lengths - 1, 0))
        self.ahead.pace.read(trace.spans)  # while the device computes
        token_ids = np.asarray(token)
        trace.add("compute", "compute", began, time.perf_counter_ns(), period=self._plan.periods)
        attention_mass = np.stack([batch.masses(picks) for picks in masses])
        held = attention_mass[:, batch.lengths > 0]
        trace.period_attention_mass.extend(held.mean(axis=1).tolist())
        return FirstToken(
            logits=logits,
            token_ids=token_ids,
            attention_mass=attention_mass,
            selections=selections,
            kv=kv,
        )

    def _select(
        self, batch: Batch, queries: list[_Queries], hidden: Array, period: int, trace: Trace
    ) -> tuple[list[Selection], list[np.ndarray]]:
        """Each member's selection of a period, and its ids on the host, [b, J, n] of J choices."""
        with trace.span("dispatch", lane="host"):
            picks = [
                self._choose(member, asking, period)
                for member, asking in zip(batch.members, queries, strict=True)
            ]
        began = time.perf_counter_ns()
        hidden.block_until_ready()
        ready = time.perf_counter_ns()
        trace.add("compute", "compute", began, ready, period=period - 1)
        found = [
            member.trimmed(np.asarray(pick.ids)).reshape(len(member.rows), self._plan.parts, -1)
            for member, pick in zip(batch.members, picks, strict=True)
        ]
        selected = time.perf_counter_ns()
        trace.add("select", "host", ready, selected, period=period)
        self.ahead.pace.selected((selected - ready) * 1e-9 / len(picks))
        return picks, found

    def _ask(
        self, batch: Batch, packs: Packs, queries: list[_Queries], period: int,
        picks: list[Selection], unions: list[list[np.ndarray]], fits: bool, trace: Trace,
    ) -> list[Callable[[], np.ndarray]]:  # fmt: skip
        """Starts the reads of a period, and each member's guess at the next one."""
        guesses = []
        for which, (member, union) in enumerate(zip(batch.members, unions, strict=True)):
            missing = self._submit(packs, which, period, union) if fits else 0
            if fits and self._inter(period):
                guess = self._guess(member, queries[which], period, union[0], missing, trace)
                guesses.append(guess)
            if member.probes.has_keys:
                scores = np.asarray(picks[which].scores)[member.lengths > 0].sum(axis=0)
                member.probes.used(period, scores)
            member.probes.ahead(period + 1)  # behind the packs, which are needed sooner
        return guesses

    def _inter(self, period: int) -> bool:
        return self._system.prefetch == "inter" and period + 1 < self._plan.periods

    def _choose(
        self, member: Member, queries: _Queries, period: int, *, guess: bool = False
    ) -> Selection:
        """What `period` selects by these queries, or a guess at that by its first layer alone."""
        resident, limits = member.resident, member.limits
        layers = self._plan.scoring_layers(period)
        if guess:
            layers = [self._plan.first_layer(period)]
            limits = guessed_chunks(limits, self._system.overfetch)
        return self._layers.select(
            layers, *queries, member.probes.get(layers, period),
            np.int32(resident.prefix.num_tokens), np.int32(resident.num_chunks), limits,
            self._rule(resident, limits), member.share,
        )  # fmt: skip

    def _rule(self, resident: Resident, limits: np.ndarray) -> Rule:
        choose = self._system.choose
        coarse = choose.coarse
        return Rule(
            n=min(choice_bucket(int(limits.max())), resident.probe_chunks),
            chunk_tokens=self._system.chunk_tokens,
            window=choose.queries,
            peaks=choose.peaks,
            score=choose.score,
            stages=None if coarse is None else coarse.stages(limits, resident.num_chunks),
            each=self._system.heads_apart,
            zones=self._system.zones,
        )

    def _tokens(self, suffix: int) -> int:
        """Of so many suffix tokens, how many a selection is given: those that may score, in one
        bucket whatever the suffix, since programs that select are many."""
        window = self._system.choose.queries
        return suffix if window is None else min(suffix, suffix_bucket(window))

    def _queries(self, batch: Batch, member: Member, hidden: Array) -> _Queries:
        """A member's rows from the first token on that a selection is given."""
        suffix = hidden.shape[1]
        tokens = self._tokens(suffix)
        skipped = np.maximum(member.lengths - tokens, 0)
        if len(batch.members) > 1 or tokens != suffix:
            hidden = self._cut(hidden, member.rows, skipped)
        return _Queries(hidden, batch.start[member.rows] + skipped, member.lengths - skipped)

    def _cut(self, hidden: Array, rows: np.ndarray, skipped: np.ndarray) -> Array:
        tokens = self._tokens(hidden.shape[1])
        cut: Array = self._latest(
            (hidden.shape, len(rows), tokens), hidden, rows, skipped, tokens=tokens
        )
        return cut

    def warm(self, tokens: Int32[np.ndarray, "B S"]) -> None:
        """Compiles what batches of so many `tokens` need beside what one over a single prefix does,
        where each prefix has a power of two of their rows."""
        hidden, rows = self._layers.embed(tokens), 1
        while rows <= len(tokens) > 1:
            some = np.zeros(rows, np.int32)
            self._cut(hidden, some, some)
            rows *= 2

    def _guess(
        self, member: Member, queries: _Queries, period: int, union: np.ndarray, missing: int,
        trace: Trace,
    ) -> Callable[[], np.ndarray]:  # fmt: skip
        """What the next period will probably need of a member's prefix."""

        def lookahead(pays: bool) -> Array | None:
            # A shape that is new is tried whether it pays or not: what adapts to measured times
            # must not compile in the middle of later traffic.
            layers = [self._plan.first_layer(period + 1)]
            limits = guessed_chunks(member.limits, self._system.overfetch)
            known = self._layers.selects_without_compiling(
                layers, queries.hidden.shape, member.probes.get(layers, period + 1),
                self._rule(member.resident, limits),
            )  # fmt: skip
            if not pays and known:
                return None
            trace.count("guesses", 1)
            return self._choose(member, queries, period + 1, guess=True).ids

        num_bytes = missing * member.resident.prefix.layout.pack_bytes
        return self.ahead.next_period(union, num_bytes, lookahead)

    def _submit(self, packs: Packs, which: int, period: int, unions: list[np.ndarray]) -> int:
        """Starts the reads of a period's choices; how many of their packs are not cached."""
        if self._system.prefetch == "none":
            return 0
        return sum(
            packs.demand(which, group, union)
            for choice, union in zip(self._plan.choices_of(period), unions, strict=True)
            for group in self._plan.groups(choice)
        )

    def _read_ahead(self, packs: Packs, which: int, period: int, chunks: np.ndarray) -> None:
        if len(chunks):
            for group in self._plan.groups(period):
                packs.ahead(which, group, np.unique(chunks))

    def _step(
        self, batch: Batch, packs: Packs, step: Step, chosen: np.ndarray,
        unions: list[list[np.ndarray]], hidden: Array, hold: bool, *, asked: bool,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        lengths = batch.valid(chosen)
        tables = self._tables(packs, step, chosen, batch, unions, asked=asked)
        if tables is None:
            return self._pieces.run(
                batch.start, packs, step, chosen, lengths, batch.owners(), hidden
            )
        hidden, kv = self._layers.run(
            step.layers, hidden, batch.start, self._memory.pool.pages, tables,
            lengths if self._plan.parts > 1 else lengths[0],
        )  # fmt: skip
        if not hold:
            for which in range(len(unions)):
                for group in step.groups:
                    packs.done(which, group, hidden)
        return hidden, kv

    def _tables(
        self, packs: Packs, step: Step, chosen: np.ndarray, batch: Batch,
        unions: list[list[np.ndarray]], *, asked: bool,
    ) -> np.ndarray | None:  # fmt: skip
        """Slots int32 [P, B, N] of a step's packs, once they are there; None: they do not fit."""
        try:
            if not asked or self._system.prefetch == "none":
                for which, mine in enumerate(unions):
                    for group in step.groups:
                        packs.demand(which, group, mine[group % self._plan.parts])
            tables = np.full((len(step.groups), *chosen.shape[1:]), -1, np.int32)
            for place, group in enumerate(step.groups):
                part = group % self._plan.parts
                for which, (member, mine) in enumerate(zip(batch.members, unions, strict=True)):
                    slot_of = np.full(member.resident.num_chunks + 1, -1, np.int32)
                    slot_of[mine[part]] = packs.collect(which, group, mine[part])
                    ids = chosen[part, member.real]  # the last of `slot_of` serves id -1
                    tables[place, member.real] = slot_of[ids]
        except PoolExhausted:
            return None
        return tables

    def _book(self, batch: Batch, period: int, picks: list[Selection], trace: Trace) -> None:
        parts, groups = self._plan.parts, self._plan.group_rows(period)
        for member, pick in zip(batch.members, picks, strict=True):
            resident, ids = member.resident, np.asarray(pick.ids)
            self._residents.record_all(groups, [(resident, pick)])
            resident.latest[period] = ids.reshape(-1, parts, ids.shape[1])
            if period == 0:
                self.ahead.remember(resident, pick)
            taken = int((ids >= 0).sum())
            total = len(member.real) * parts * resident.num_chunks
            trace.count_chunks(selected=taken, total=total)


def latest(hidden: Array, rows: Array, skipped: Array, *, tokens: int) -> Array:
    """`tokens` hidden states of each of `rows` [B, S, E] -> [b, tokens, E], the first skipped."""
    at = skipped[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    return hidden[rows[:, None], at]
