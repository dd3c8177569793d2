"""One re-prefill: a batch of suffixes over one stored prefix, from tokens to first token.

The paper's §4.3 on one engine thread: select at each period's first layer, submit the period's
packs in layer order, run each subperiod as soon as its packs are there, and keep the reader busy
with what the next period will probably need. The only host syncs are the selected ids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array

from ckv_jax.config import SystemConfig
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.buckets import batch_bucket, chunk_bucket, suffix_bucket
from ckv_jax.pipeline.layers import Compute, Selection
from ckv_jax.pipeline.pace import Pace
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.reads.packs import PackSource
from ckv_jax.reads.probes import Probes
from ckv_jax.reads.residents import PrefixView
from ckv_jax.trace import Trace

RECURRENCE = 0.5
"""Share of the last request's first selection that must have come again for it to be read ahead:
below it, what is read in vain delays the selection's own packs by more than is won."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Suffixes over one prefix, padded to buckets."""

    tokens: np.ndarray
    """int32 [B, S]."""
    lengths: np.ndarray
    """int32 [B]: tokens of each suffix; 0 for rows that are padding."""
    limits: np.ndarray
    """int32 [B]: chunks each row may select."""

    @classmethod
    def of(cls, suffixes: list[np.ndarray], budgets: list[float], num_chunks: int) -> Batch:
        """Pads `suffixes` (int32 [s] each, s >= 1) to a batch and length bucket."""
        rows = batch_bucket(len(suffixes))
        tokens = np.zeros((rows, suffix_bucket(max(map(len, suffixes)))), np.int32)
        lengths, limits = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, (suffix, budget) in enumerate(zip(suffixes, budgets, strict=True)):
            tokens[row, : len(suffix)] = suffix
            lengths[row] = len(suffix)
            limits[row] = selected_chunks(budget, num_chunks)
        return cls(tokens=tokens, lengths=lengths, limits=limits)


def selected_chunks(budget: float, num_chunks: int) -> int:
    """How many chunks a budget buys: the smallest integer not below budget x M, at least one."""
    return max(1, math.ceil(round(budget * num_chunks, 9)))


def guessed_chunks(limits: np.ndarray, overfetch: float) -> np.ndarray:
    """How many chunks lookahead speculates for each row, int32 [B], of which it selects `limits`.

    Rows share the excess: guesses are read as one, and what one row nearly chose another chose.
    """
    share = 1 + (overfetch - 1) / len(limits)
    more: np.ndarray = np.ceil(limits * share).astype(np.int32)
    return more


@dataclass(frozen=True, slots=True)
class Context:
    """What a step attended to: enough for decode to go on from there."""

    slots: np.ndarray
    """int32 [P, B, N]: device slots of the step's layer groups."""
    lengths: np.ndarray
    """int32 [B, N]: valid tokens of each chunk."""
    kv: tuple[tuple[Array, Array], ...]
    """Each layer's suffix (K, V) [B, S, K, D]."""


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
    """Per period the selected chunk ids, int32 [B, N], -1 where there is none."""
    contexts: list[Context]
    """One a step."""


class Executor:
    """The schedule of one model and system. Engine thread only."""

    def __init__(
        self, compute: Compute, memory: Memory, plan: Plan, system: SystemConfig, pace: Pace
    ) -> None:
        self._compute = compute
        self._memory = memory
        self._plan = plan
        self._system = system
        self._pace = pace

    def run(
        self, view: PrefixView, batch: Batch, source: PackSource, probes: Probes, trace: Trace
    ) -> FirstToken:
        """First tokens of `batch`. Packs stay in their slots until `source` is finished."""
        start = np.int32(view.prefix.num_tokens)
        self._speculate_first(view, batch, source)
        probes.ahead(0)
        hidden = self._compute.embed(batch.tokens)
        masses, selections, contexts = [], [], []
        for period in range(self._plan.periods):
            layers = self._plan.scoring_layers(period)
            selection = self._choose(
                view, batch, hidden, start, period, layers, probes, batch.limits
            )
            began = time.perf_counter_ns()
            hidden.block_until_ready()
            ready = time.perf_counter_ns()
            trace.add("compute", "compute", began, ready, period=period - 1)
            chosen = np.asarray(selection.ids)
            selected = time.perf_counter_ns()
            trace.add("select", "host", ready, selected, period=period)
            self._pace.selected((selected - ready) * 1e-9)
            union = np.unique(chosen[chosen >= 0])
            missing = self._submit(source, period, union)
            guess = None
            if self._inter(period) and self._ahead_pays(view, missing):
                if self._system.speculate == "previous":
                    self._speculate(source, period + 1, union)
                else:
                    guess = self._guess(view, batch, hidden, start, period + 1, probes)
                    trace.count("guesses", 1)
            probes.used(period)
            probes.ahead(period + 1)  # behind the packs, which are needed sooner
            for step in self._plan.period_steps(period):
                hidden, context = self._step(view, source, step, chosen, union, hidden, start)
                contexts.append(context)
                if not step.selects:
                    continue
                if guess is not None:
                    self._speculate(source, period + 1, np.asarray(guess))
                # Bookkeeping, while the device computes.
                groups = self._plan.groups(period)
                self._memory.record(view, groups, selection)
                self._remember(view, period, selection)
                real = int((batch.lengths > 0).sum())
                trace.count_chunks(selected=int((chosen >= 0).sum()), total=real * view.num_chunks)
            masses.append(selection.mass)
            selections.append(chosen)
        began = time.perf_counter_ns()
        logits, token = self._compute.head(hidden, np.maximum(batch.lengths - 1, 0))
        self._pace.read(trace.spans)  # while the device computes
        token_ids = np.asarray(token)
        trace.add("compute", "compute", began, time.perf_counter_ns(), period=period)
        attention_mass = np.stack([np.asarray(mass) for mass in masses])
        held = attention_mass[:, batch.lengths > 0]
        trace.period_attention_mass.extend(held.mean(axis=1).tolist())
        return FirstToken(
            logits=logits,
            token_ids=token_ids,
            attention_mass=attention_mass,
            selections=selections,
            contexts=contexts,
        )

    def executables(self) -> int:
        """Programs of its own: none, all calls are `Compute`'s."""
        return 0

    def _inter(self, period: int) -> bool:
        return self._system.prefetch == "inter" and period + 1 < self._plan.periods

    def _choose(
        self, view: PrefixView, batch: Batch, hidden: Array, start: np.int32, period: int,
        layers: Sequence[int], probes: Probes, limits: np.ndarray,
    ) -> Selection:  # fmt: skip
        n = min(chunk_bucket(int(limits.max())), view.probe_chunks)
        return self._compute.select(
            layers, hidden, start, batch.lengths, probes.get(layers, period),
            np.int32(view.prefix.num_tokens), np.int32(view.num_chunks), limits,
            n=n, window=self._system.score_window, chunk_tokens=self._system.chunk_tokens,
        )  # fmt: skip

    def _guess(
        self, view: PrefixView, batch: Batch, hidden: Array, start: np.int32, period: int,
        probes: Probes,
    ) -> Array:  # fmt: skip
        """What `period` will probably select, by this hidden state and its own queries."""
        more = guessed_chunks(batch.limits, self._system.overfetch)
        first = [self._plan.first_layer(period)]
        return self._choose(view, batch, hidden, start, period, first, probes, more).ids

    def _ahead_pays(self, view: PrefixView, missing: int) -> bool:
        """Whether to speculate after a period that had to read so many packs."""
        num_bytes = missing * view.prefix.layout.pack_bytes
        return self._system.speculate_always or self._pace.ahead_pays(num_bytes)

    def _submit(self, source: PackSource, period: int, union: np.ndarray) -> int:
        """Starts the reads of a period; how many of its packs are not cached."""
        if self._system.prefetch == "none":
            return 0
        return sum(source.demand(group, union) for group in self._plan.groups(period))

    def _speculate(self, source: PackSource, period: int, ids: np.ndarray) -> None:
        chunks = np.unique(ids[ids >= 0])
        for group in self._plan.groups(period):
            source.speculate(group, chunks)

    def _speculate_first(self, view: PrefixView, batch: Batch, source: PackSource) -> None:
        """Reads the best of what the request before selected first, where requests are alike."""
        if self._system.prefetch == "inter" and view.recurrence >= RECURRENCE:
            self._speculate(source, 0, view.opening[: batch.limits.sum()])

    def _remember(self, view: PrefixView, period: int, selection: Selection) -> None:
        chosen, attention = np.asarray(selection.ids), np.asarray(selection.attention)
        taken = chosen >= 0
        view.last_selection[period] = union = np.unique(chosen[taken])
        if period:
            return
        most = np.zeros(view.num_chunks, np.float32)
        np.maximum.at(most, chosen[taken], attention[taken])
        best = union[np.argsort(-most[union], kind="stable")]
        n = min(len(best), len(view.opening))
        again = len(np.intersect1d(best[:n], view.opening[:n]))
        view.recurrence = again / n if n else 0.0
        view.opening = best

    def _step(
        self, view: PrefixView, source: PackSource, step: Step, chosen: np.ndarray,
        union: np.ndarray, hidden: Array, start: np.int32,
    ) -> tuple[Array, Context]:  # fmt: skip
        tables = np.full((len(step.groups), *chosen.shape), -1, np.int32)
        slot_of = np.full(view.num_chunks + 1, -1, np.int32)  # the last entry serves id -1
        if self._system.prefetch == "none":
            for group in step.groups:
                source.demand(group, union)
        for row, group in enumerate(step.groups):
            slot_of[union] = source.collect(group, union)
            tables[row] = slot_of[chosen]
        lengths = np.where(chosen >= 0, view.chunk_lengths[chosen], 0).astype(np.int32)
        hidden, kv = self._compute.run(
            step.layers, hidden, start, self._memory.pool.pages, tables, lengths
        )
        for group in step.groups:
            source.done(group, hidden)
        return hidden, Context(tables, lengths, kv)
