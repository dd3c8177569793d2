"""The worker of one model, store and system: computes first tokens, tokens and prefills."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np

from ckv_jax.decode.decoder import Row, rows_bucket
from ckv_jax.documents.blending import Prefilled
from ckv_jax.documents.loading import DocumentLoader
from ckv_jax.errors import CkvError
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import Executor, FirstToken, ReprefillExecutor, Runtime
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefill import Prefills
from ckv_jax.pipeline.programs import Background
from ckv_jax.pipeline.recovery import Recoveries, RecoveryNeeded, recover
from ckv_jax.pipeline.resident import Resident
from ckv_jax.prefix.landing import landing_for
from ckv_jax.prefix.memory import Memory, device_room
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.prefetcher import Prefetcher
from ckv_jax.selection.base import Share
from ckv_jax.serving.decode_batch import DecodeBatches
from ckv_jax.serving.jobs import Job, PrefillJobs
from ckv_jax.serving.offload import most_buffered
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.sequence import RunningSequence, Sequence
from ckv_jax.storage.chain import EXACT
from ckv_jax.trace import Trace


class Worker:
    """Computes what the scheduler asks for. Engine thread only, except `close`."""

    def __init__(
        self,
        layers: Layers,
        placement: Placement,
        *,
        store_prompt: Callable[[Sequence], None],
        add_job: Callable[[Generator[None, None, Any]], Future[Any]],
    ) -> None:
        """`store_prompt` ingests a prompt in another thread and submits its sequence again;
        `add_job` has the engine thread go through steps, one between two tokens of others."""
        store, system, layout = placement.store, placement.system, placement.layout
        config = placement.config
        self.layers = layers
        self.store = store
        self.system = system
        self.add_job = add_job
        apart = layout.num_kv_heads // layout.pack_heads
        self.plan = Plan.of(layers.num_layers, system, selections_per_period=apart)
        self.memory = Memory(layout, config, system, layers.target, layers.shardings)
        room = device_room(self.memory.pool.pages.devices())
        self.prefills = Prefills.within(
            room, layers, block=config.prefill_block, window=config.prefill_window
        )
        encrypted = store.config.encrypt_key_file is not None
        self.recoveries = Recoveries(self.prefills, config.admit_bytes if encrypted else None)
        self.prefixes = OpenPrefixes(
            store,
            self.memory.tiers,
            digest_bytes=config.digest_bytes,
            periods=self.plan.periods,
            recompute=self.recoveries.of,
            deadline_s=config.read_deadline_s,
            shardings=layers.shardings,
        )
        self.host_bytes = config.prefetch_host_bytes
        """Of each landing."""
        self.landing = landing_for(
            self.memory, layout, host_bytes=self.host_bytes, codec=system.coder
        )
        self.landings = [self.landing]
        """All that are closed with the worker."""
        self._placement = placement
        self._tokenizer = placement.tokenizer
        self._end_ids = layers.config.eos_token_ids
        self._store_prompt = store_prompt
        self._recovering: dict[int, tuple[Job, int]] = {}
        self.runtime = Runtime(
            layers=layers, store=store, system=system, layout=layout, plan=self.plan,
            memory=self.memory, prefixes=self.prefixes, open_packs=self.packs,
            resident=Resident(layers, self.memory.tiers, self.plan), background=Background(),
        )  # fmt: skip
        self.executor = executor_of(self)
        self.decoding = DecodeBatches(
            self.runtime,
            recovery=self.recovery,
            max_batch=config.max_batch,
            segment_tokens=config.segment_tokens,
        )
        with ExitStack() as undo:  # of what has threads
            undo.callback(self.decoding.close)
            self._admission = Admission(
                self.runtime,
                self.decoding,
                max_bytes=config.admit_bytes if room is None else min(config.admit_bytes, room),
                segment_tokens=0 if self.decoding.offload is None else config.segment_tokens,
            )
            loader = DocumentLoader(self.runtime, make_way=self.make_way)
            self.jobs = PrefillJobs(self.prefills, loader, done=self._prefilled)
            timeout_s = 2 * config.read_deadline_s + 1
            self.prefetcher = Prefetcher(config.io_threads, hang_timeout_s=timeout_s)
            undo.pop_all()

    # -- what may run together --------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences between two of their tokens that can go on."""
        if not self.decoding.batches or self.decoding.waiting():
            return 0
        return len(self.decoding)

    def together(self, sequence: Sequence) -> Hashable:
        """Sequences with equal keys may share a batch; None: this one is no batch but a job."""
        if not sequence.sparse(self.system):
            return None
        if not self.system.own.generates:
            return sequence.prefix.id, sequence.sampling is None
        return sequence.sampling is None

    def fits(self, batch: Several[Sequence], job_bytes: int) -> bool:
        """Whether there is room for a batch beside what runs and jobs of so many bytes."""
        return self._admission.fits(batch, job_bytes)

    def prefill_bytes(self, tokens: int) -> int:
        """Device bytes that a bounded prefill of so many tokens holds."""
        return min(tokens, self.prefills.window) * self.runtime.layout.token_bytes

    # -- first tokens -----------------------------------------------------------------------------

    def first_tokens(self, batch: Several[Sequence]) -> None:
        """Gives every sequence its outcome, or lets it run on. After a raise none runs on, and some
        may have their outcome."""
        generate = batch[0].sampling is not None
        if generate and not self.system.own.generates:
            raise ValueError(
                f"got a generation, but system {self.system.name!r} serves first tokens only"
            )
        for sequence in batch:
            sequence.begin()
        trace, made = Trace(), self.layers.programs.made
        with ExitStack() as stack:
            using = stack.enter_context(ExitStack())
            prefixes, which = self.prefixes.use_all(
                [sequence.prefix for sequence in batch], self.executor.use, using
            )
            probes = []
            for opened in prefixes:
                if generate and not opened.replaceable:
                    opened.hold()
                probes.append(self.executor.probes(opened, trace, stack))
            chunked = self.system.chunked  # else they select tokens
            units = [
                prefixes[i].num_chunks if chunked else prefixes[i].prefix.num_tokens for i in which
            ]
            rows = self._rows(batch, units, [*zip(prefixes, probes, strict=True)], which)
            trace.add("open", "host", trace.start_ns, time.perf_counter_ns())
            hold = generate and self._admission.held(batch)
            if self.decoding.batches:
                self.make_way(self._admission.slots(batch, hold=hold))
            undo = stack.enter_context(ExitStack())
            packs = stack.enter_context(self.packs(prefixes, trace))
            first = self.executor.run(rows, packs, trace, hold=hold)
            trace.end()
            trace.count("compiled", self.layers.programs.made - made)
            logits = np.asarray(first.logits)
            traces = traces_of(trace, first, units)
            if hold:
                packs.keep()
            running = []
            for row, sequence in enumerate(batch):
                if generate:
                    i = which[row]
                    one = self.decoding.running_sequence(
                        sequence, prefixes[i], probes[i], first, row, hold=hold
                    )
                    undo.callback(one.close)
                    sequence.begin_generation(self._tokenizer, self._end_ids, traces[row])
                    running.append((row, one))
                elif not sequence.fail_if_lapsed():
                    attention = first.attention if sequence.request.attention else None
                    sequence.answer(
                        int(first.token_ids[row]), self._tokenizer, logits[row].copy(), traces[row],
                        None if attention is None else attention(row),
                    )  # fmt: skip
            if not generate:  # answered: what the caches keep needs nothing of the store
                packs.rest()
                using.close()
            undo.pop_all()
        if generate:
            self.decoding.start(logits, first.kv, running)
        else:
            for sequence in batch:  # nothing is held for them any more
                sequence.settle()

    def _rows(
        self,
        batch: Several[Sequence],
        units: list[int],
        prefixes: list[tuple[OpenPrefix, Any]],
        which: list[int],
    ) -> Batch:
        """The batch for the executor; `units`: what there is to select from, for each sequence."""
        limits, mass, least = [], [], []
        for sequence, count, place in zip(batch, units, which, strict=True):
            budget, opened = sequence.parsed_budget, prefixes[place][0]
            if opened.always is None:
                tokens = sequence.prefix.num_tokens
                opened.always = self.system.always.most(self.runtime.layout, tokens)
            limits.append(min(count, budget.chunks(count) + opened.always))
            mass.append(1.0 if budget.mass is None else budget.mass)
            least.append(budget.floor(count))
        share = Share(np.array(mass, np.float32), np.array(least, np.int32))
        return Batch.of([sequence.suffix for sequence in batch], limits, prefixes, which, share)

    def packs(self, sources: Several[Source], trace: Trace) -> Packs:
        """The packs of some prefixes, for one batch."""
        return Packs(
            sources,
            memory=self.memory,
            landing=self.landing,
            prefetcher=self.prefetcher,
            trace=trace,
        )

    def make_way(self, slots: int) -> None:
        """Running sequences give back device slots that they could do without, as far as needed."""
        self.decoding.rest()
        if slots > self.memory.step_slots:
            self.decoding.narrow()

    def _prefilled(self, sequence: Sequence, found: Prefilled) -> None:
        """Ends a sequence that was a job with its first token, or goes on from there."""
        if sequence.sampling is None:
            logits = found.logits[0].copy()
            sequence.answer(found.token, self._tokenizer, logits, found.trace)
            return
        sequence.begin_generation(self._tokenizer, self._end_ids, found.trace)
        row = Row(start=found.start, length=found.rows, window=None)
        running = RunningSequence(sequence=sequence, row=row)
        self.decoding.start(found.logits, found.kv, [(0, running)])

    # -- tokens -----------------------------------------------------------------------------------

    def step(self) -> list[Job]:
        """One token for every running sequence; jobs that some of them turn out to wait for."""
        return self.decoding.step()

    def end(self, error: CkvError) -> None:
        self.decoding.end(error)

    # -- prefills ---------------------------------------------------------------------------------

    def job_for(self, sequence: Sequence) -> Job | None:
        """The prefill of a sequence that has nothing stored; None: it will be submitted again."""
        if sequence.documents:
            return self.jobs.over_documents(sequence)
        if not self.system.computes_all and len(sequence.tokens) > self.prefills.window:
            self._store_prompt(sequence)
            return None
        return self.jobs.dense(sequence)

    def recovery(self, needed: RecoveryNeeded) -> Job:
        """The job, perhaps running already, that computes again what the store lost; a later one
        where it computes less than is needed."""
        known, tokens = self._recovering.get(id(needed.recovered), (None, 0))
        if known is not None and not known.future.done() and tokens >= needed.tokens:
            return known
        job = Job(recover(needed), num_bytes=self.prefill_bytes(needed.tokens))
        self._recovering = {
            key: entry for key, entry in self._recovering.items() if not entry[0].future.done()
        }
        self._recovering[id(needed.recovered)] = (job, needed.tokens)
        return job

    def shorten(self, sequence: Sequence) -> bool:
        """Looks up again what of a sequence is stored; False if that changes nothing."""
        before = sequence.prefix
        self._placement.shorten(sequence)
        return sequence.prefix.num_tokens < before.num_tokens

    # -- life -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for all background work."""
        self.executor.settle()
        self.runtime.background.settle()

    def close(self, *, give_back: bool) -> None:
        """Stops the threads, then persists cache scores. With `give_back`, which is for an engine
        thread that has ended, the memory of pools and digests goes at once."""
        try:
            self.executor.close()
            self.runtime.background.close()
            self.prefetcher.close()
            self.decoding.close()
            self.prefixes.save_scores()
        finally:
            if give_back:
                self.prefixes.close()
                for landing in self.landings:
                    landing.close()
                self.memory.close()


class Admission:
    """Decides whether another batch fits in memory and device slots. Engine thread only."""

    def __init__(
        self, runtime: Runtime, running: DecodeBatches, *, max_bytes: int, segment_tokens: int
    ) -> None:
        """`segment_tokens`: of offloaded segments; 0: generated tokens stay in their buffers."""
        self._runtime = runtime
        self._memory = runtime.memory
        self._system = runtime.system
        self._layout = runtime.layout
        self._running = running
        self._max_bytes = max_bytes
        self._segment_tokens = segment_tokens
        self._step = max(len(step.groups) for step in runtime.plan.steps)

    def fits(self, batch: Several[Sequence], job_bytes: int) -> bool:
        """Whether a batch fits beside all that runs and jobs of so many bytes: bytes in all, slots
        of one step, slots that stay."""
        if self._num_bytes(batch) + job_bytes > self._max_bytes:
            return False
        if self.slots(batch, hold=False) > self._memory.step_slots + self._running.excess:
            return False
        return batch[0].sampling is None or self.held(batch)

    def held(self, batch: Several[Sequence]) -> bool:
        """Whether one selection of every sequence of a batch and of those running may stay in its
        slots.

        Windows keep more than that only while no other sequence needs the slots.
        """
        chunks = self._chunks([*self._running.holding, *batch])
        return chunks * self._layout.groups <= self._memory.hold_slots

    def slots(self, batch: Several[Sequence], *, hold: bool) -> int:
        """Device slots that a batch needs: for all layer groups where its packs stay (`hold`), else
        for those of one step; 0 where the system's own executor makes do with any."""
        if not self._system.own.generates:
            return 0
        return self._chunks(batch) * (self._layout.groups if hold else self._step)

    def _new(self, sequence: Sequence) -> int:
        """Generated tokens that a sequence's buffers hold at most."""
        if sequence.sampling is None:
            return 0
        most, prefix = sequence.sampling.max_tokens, sequence.prefix
        segments = (
            self._segment_tokens and sequence.sparse(self._system) and prefix.provenance == EXACT
        )
        if not segments or sequence.parsed_budget.exact:  # it may find no slots to move onto
            return most
        return min(most, most_buffered(self._segment_tokens, prefix.layout.chunk_tokens))

    def _chunks(self, sequences: Several[Sequence]) -> int:
        """Chunks that sequences select at most, those of one prefix in common at best."""
        most: dict[str, list[int]] = {}
        for sequence in sequences:
            if sequence.sparse(self._system):
                prefix = sequence.prefix
                count = sequence.parsed_budget.chunks(prefix.num_chunks)
                count += self._system.always.most(prefix.layout, prefix.num_tokens)
                most.setdefault(sequence.prefix.id, [sequence.prefix.num_chunks]).append(count)
        offloaded = sum(sequence.offloaded_chunks for sequence in sequences)
        return offloaded + sum(min(total, sum(counts)) for total, *counts in most.values())

    def _num_bytes(self, batch: Several[Sequence]) -> int:
        """Device bytes of a batch and of all that runs: packs, and the keys and values of suffixes
        and of what is generated."""
        rows = 0
        for sequence in [*self._running.sequences, *batch]:
            own = len(sequence.suffix) if sequence.sparse(self._system) else len(sequence.tokens)
            rows += rows_bucket(own + self._new(sequence))
        generating = [*self._running.holding, *(s for s in batch if s.sampling is not None)]
        others = [sequence for sequence in batch if sequence.sampling is None]
        packs = self._chunks(generating) * self._layout.groups + self._chunks(others) * self._step
        return packs * self._layout.pack_bytes + rows * self._layout.token_bytes


def executor_of(worker: Worker) -> ReprefillExecutor:
    """Creates the executor of the worker's system. Raises `ValueError` if it is none."""
    system = worker.system
    if system.own.executor is None:
        return Executor(worker.runtime)
    made = system.own.executor(worker)
    if not isinstance(made, ReprefillExecutor) or type(made).run is ReprefillExecutor.run:
        raise ValueError(
            f"got {type(made).__name__} from the executor of system {system.name!r}, expected a "
            "ReprefillExecutor with a method run"
        )
    return made


def traces_of(trace: Trace, first: FirstToken, units: list[int]) -> list[Trace]:
    """Each row's own view of the batch's trace: what was read is common, the selection is not."""
    return [
        trace.share(
            selected=[int((ids[row] >= 0).sum()) for ids in first.selections],
            total=len(first.selections) * count,
            attention_mass=first.attention_mass[:, row].tolist(),
        )
        for row, count in enumerate(units)
    ]
