"""What the engine thread does for one model, store and system: first tokens, tokens, prefills."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from ckv_jax.budget import Budget
from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.errors import CkvError
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.parts.blending import Blending
from ckv_jax.parts.loading import Loading
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import Executor, FirstToken, ReprefillExecutor
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefill import Prefills
from ckv_jax.pipeline.recovery import Recoveries, RecoveryNeeded
from ckv_jax.prefix.landing import Landing, landing_for
from ckv_jax.prefix.memory import Memory, device_room
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.prefetcher import Prefetcher
from ckv_jax.serving.alone import Alone
from ckv_jax.serving.decoding import Decoding
from ckv_jax.serving.job import Job
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.prefill_jobs import recovery_job, score_job
from ckv_jax.serving.running import Running
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.shares import share_of, shares_of
from ckv_jax.serving.slot_room import SlotRoom, sparse
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.layout_versions import PLAIN
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import Trace


class Worker:
    """Computes for one engine. Engine thread only, except `close`."""

    def __init__(
        self,
        layers: Layers,
        store: ChunkStore,
        placement: Placement,
        tokenizer: Tokenizer | None,
        *,
        system: SystemConfig,
        layout: Layout,
        config: EngineConfig,
        fingerprint: Fingerprint,
        store_prompt: Callable[[Sequence], None],
        add_job: Callable[[Generator[None, None, Any]], Future[Any]],
    ) -> None:
        """`store_prompt` ingests a prompt in another thread and submits its sequence again;
        `add_job` has the engine thread go through steps, one between two tokens of others."""
        self.layers = layers
        self.store = store
        self.system = system
        self.add_job = add_job
        self.plan = Plan.of(
            layers.num_layers, system, parts=layout.num_kv_heads // layout.pack_heads
        )
        self.memory = Memory(layout, config, system, layers.target, layers.shardings)
        room = device_room(self.memory.pool.pages.devices())
        self.prefills = Prefills.within(
            room, layers, block=config.prefill_block, window=config.prefill_window
        )
        self.prefixes = OpenPrefixes(
            store,
            self.memory.tiers,
            digest_bytes=config.digest_bytes,
            periods=self.plan.periods,
            recompute=Recoveries(self.prefills).of,
            deadline_s=config.read_deadline_s,
            shardings=layers.shardings,
            # Turned keys have their heads first, and are not split over devices.
            turns=layers.target.in_host_memory and layers.shardings.size == 1,
        )
        self.prefetcher = Prefetcher(config.io_threads, patience_s=2 * config.read_deadline_s + 1)
        self._host_bytes = config.prefetch_host_bytes
        self.landing = landing_for(
            self.memory, layout, host_bytes=self._host_bytes, codec=system.coder
        )
        self._landings = [self.landing]
        self._layout = layout
        self.executor = executor_of(self)
        self._placement = placement
        self._tokenizer = tokenizer
        self._always = system.always.most
        self._recovering: dict[int, tuple[Job, int]] = {}
        self.decoding = Decoding(
            layers, self.memory, self.plan, system, store=store, prefixes=self.prefixes,
            fingerprint=fingerprint, tokenizer=tokenizer, segment_tokens=config.segment_tokens,
            open_packs=self.packs,
        )  # fmt: skip
        self._running = Running(
            self.decoding,
            recovery=self.recovery,
            hold_slots=self.memory.hold_slots,
            window=system.window,
            max_batch=config.max_batch,
        )
        self._room = SlotRoom(
            self.memory, self._running, system=system, plan=self.plan, layout=layout,
            max_bytes=config.admit_bytes if room is None else min(config.admit_bytes, room),
            segment_tokens=0 if self.decoding.segments is None else config.segment_tokens,
        )  # fmt: skip
        loading = Loading(
            layers, self.memory, self.plan, open_packs=self.packs, make_way=self.make_way
        )
        self.alone = Alone(
            self.prefills, self._running,
            Blending(
                layers=layers, loading=loading, prefixes=self.prefixes, plan=self.plan,
                system=system, block=config.prefill_block,
            ),
            self.prefixes, plan=self.plan, token_bytes=self._room.token_bytes,
            computes_all=system.computes_all, finish=self._finish,
            begin_text=self.decoding.begin, store_prompt=store_prompt,
        )  # fmt: skip

    # -- what may run together --------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences between two of their tokens that can go on."""
        return 0 if self._running.waiting() else len(self._running)

    def together(self, sequence: Sequence) -> Hashable:
        """See `scheduler.Computes`."""
        if not sparse(sequence, self.system):
            return None
        if not self.system.own.generates:
            return sequence.prefix.id, sequence.sampling is None
        return sequence.sampling is None

    def fits(self, batch: Several[Sequence], job_bytes: int) -> bool:
        """See `scheduler.Computes`."""
        return self._room.fits(batch, job_bytes)

    def prefill_bytes(self, tokens: int) -> int:
        """Device bytes that a bounded prefill of so many tokens holds."""
        return min(tokens, self.prefills.window) * self._room.token_bytes

    # -- first tokens -----------------------------------------------------------------------------

    def first_tokens(self, batch: Several[Sequence]) -> None:
        """See `scheduler.Computes`."""
        texts = batch[0].sampling is not None
        if texts and not self.system.own.generates:
            raise ValueError(
                f"got a generation, but system {self.system.name!r} serves first tokens only"
            )
        for sequence in batch:
            sequence.begin()
        trace, made = Trace(), self.layers.programs.made
        with ExitStack() as stack:
            prefixes, which = self.prefixes.use_all(
                [s.prefix for s in batch], self.executor, stack, lazily=not texts
            )
            probes = []
            for opened in prefixes:
                probes.append(self.executor.probes(opened, trace))
                stack.callback(probes[-1].cancel)
            units = [self._units(prefixes[i]) for i in which]
            asked = [Budget.of(sequence.budget) for sequence in batch]
            rows = Batch.of(
                [sequence.suffix for sequence in batch],
                [
                    min(n, budget.chunks(n) + self._always(self._layout, row.prefix.num_tokens))
                    for budget, n, row in zip(asked, units, batch, strict=True)
                ],
                [*zip(prefixes, probes, strict=True)],
                which,
                share_of(asked, units),
            )
            trace.add("open", "host", trace.start_ns, time.perf_counter_ns())
            hold = texts and self._room.held(batch)
            if len(self._running):
                self._room.make_way(batch, hold=hold)
            packs = stack.enter_context(self.packs(prefixes, trace))
            first = self.executor.run(rows, packs, trace, hold=hold)
            trace.end()
            trace.count("compiled", self.layers.programs.made - made)
            logits = np.asarray(first.logits)
            shares = shares_of(trace, first, units)
            if not texts:
                self._answer(batch, first, logits, shares)
            if hold:
                packs.keep()
            going = [
                (
                    row,
                    self.decoding.going(
                        sequence, prefixes[i], probes[i], first, row, shares[row], hold=hold
                    ),
                )
                for row, (sequence, i) in enumerate(zip(batch, which, strict=True) if texts else ())
            ]
        if texts:
            self._running.start(logits, first.kv, going)
        else:
            for sequence in batch:  # nothing is held for them any more
                sequence.settle()

    def packs(self, sources: Several[Source], trace: Trace) -> Packs:
        """The packs of some prefixes, for one batch."""
        return self.packs_in(self.landing, sources, trace)

    def packs_in(self, landing: Landing, sources: Several[Source], trace: Trace) -> Packs:
        """The same, read into another landing."""
        return Packs(
            sources,
            memory=self.memory,
            landing=landing,
            prefetcher=self.prefetcher,
            trace=trace,
        )

    def plain_landing(self) -> Landing:
        """A landing of what no codec encodes, closed with the worker."""
        if self.system.coder is None:
            return self.landing
        plain = replace(self._layout, codec=PLAIN, codec_bytes=0)
        self._landings.append(landing_for(self.memory, plain, host_bytes=self._host_bytes))
        return self._landings[-1]

    def make_way(self, slots: int) -> None:
        """Running texts give back device slots that they could do without, as far as need be."""
        self._running.rest()
        if slots > self.memory.step_slots:
            self._running.narrow()

    def _units(self, opened: OpenPrefix) -> int:
        """How many chunks, or tokens, there are to select from."""
        return opened.num_chunks if self.system.chunked else opened.prefix.num_tokens

    def _answer(
        self, batch: Several[Sequence], first: FirstToken, logits: np.ndarray, shares: list[Trace]
    ) -> None:
        for row, sequence in enumerate(batch):
            lapsed = sequence.lapsed()
            if lapsed is not None:
                sequence.fail(lapsed)
                continue
            attention = None
            if sequence.request.attention and first.attention is not None:
                attention = first.attention(row)
            token = int(first.token_ids[row])
            self._finish(sequence, token, logits[row].copy(), shares[row], attention)

    def _finish(
        self,
        sequence: Sequence,
        token: int,
        logits: np.ndarray,
        trace: Trace,
        attention: np.ndarray | None = None,
    ) -> None:
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode_next(token, after=sequence.last_tokens)
        sequence.answer(token, text, logits, trace, attention)

    # -- tokens -----------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """See `scheduler.Computes`."""
        return self._running.step()

    def warm(self, sequences: Several[Sequence], tokens: int, suffix: int) -> None:
        """See `Running.warm`."""
        self._running.warm(sequences, tokens, suffix)

    def end(self, error: CkvError) -> None:
        """See `scheduler.Computes`."""
        self._running.end(error)

    # -- prefills ---------------------------------------------------------------------------------

    def job_for(self, sequence: Sequence) -> Job | None:
        """See `scheduler.Computes`."""
        return self.alone.job(sequence)

    def score_job(self, tokens: np.ndarray, top: int) -> Job:
        """See `Engine.score`."""
        return score_job(tokens, self.prefills, len(tokens) * self._room.token_bytes, top)

    def recovery(self, needed: RecoveryNeeded) -> Job:
        """See `scheduler.Computes`. Who asks for more than a job under way computes asks again."""
        known, tokens = self._recovering.get(id(needed.recovered), (None, 0))
        if known is not None and not known.future.done() and tokens >= needed.tokens:
            return known
        job = recovery_job(needed, self.prefill_bytes(needed.tokens))
        self._recovering = {
            key: entry for key, entry in self._recovering.items() if not entry[0].future.done()
        }
        self._recovering[id(needed.recovered)] = (job, needed.tokens)
        return job

    def shorten(self, sequence: Sequence) -> bool:
        """See `scheduler.Computes`."""
        before = sequence.prefix
        self.executor.forget(before)
        self._placement.shorten(sequence)
        return sequence.prefix.num_tokens < before.num_tokens

    # -- life -------------------------------------------------------------------------------------

    def close(self, *, give_back: bool) -> None:
        """Stops the threads, then persists cache scores. With `give_back`, which is for an engine
        thread that has ended, the memory of pools and digests goes at once."""
        try:
            self.executor.close()
            self.prefetcher.close()
            self.decoding.close()
            self.prefixes.save_scores()
        finally:
            if give_back:
                self.prefixes.close()
                for landing in self._landings:
                    landing.close()
                self.memory.close()


def executor_of(worker: Worker) -> ReprefillExecutor:
    """What the worker's system answers re-prefills with. Raises `ValueError` for what cannot."""
    system = worker.system
    if system.own.executor is None:
        return Executor(worker.layers, worker.memory, worker.prefixes, worker.plan, system)
    made = system.own.executor(worker)
    if not isinstance(made, ReprefillExecutor) or type(made).run is ReprefillExecutor.run:
        raise ValueError(
            f"got {type(made).__name__} from the executor of system {system.name!r}, expected a "
            "ReprefillExecutor with a method run"
        )
    return made
