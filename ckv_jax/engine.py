"""The engine: one model, one store, one system. Ingest prefixes, answer requests over them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import numpy as np
from jax import Array

from ckv_jax import compilation_cache
from ckv_jax.cache.widths import Widths
from ckv_jax.config import EngineConfig, check_budget
from ckv_jax.fitting import check_processes, check_split, layout_of, system_for
from ckv_jax.identity import model_fingerprint
from ckv_jax.ingest import Ingest, Progress
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.generation import generation_defaults
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.peers import ALONE, Peers
from ckv_jax.pipeline.layers import Layers
from ckv_jax.request import Generation, Request, Result, TokenEvent
from ckv_jax.serving.async_streams import AsyncTokenStream, outcomes, results_async
from ckv_jax.serving.hints import brought, let_go
from ckv_jax.serving.intake import Intake, Way, sampled, several
from ckv_jax.serving.job import Job
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.prompts import Prompts
from ckv_jax.serving.reordering import carried
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.streams import Item, TokenStream, result_of, results
from ckv_jax.serving.warmup import warm
from ckv_jax.serving.worker import Worker
from ckv_jax.stats import EngineStats, stats_of
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.validate import check_whole

Tokens = np.ndarray  # int32 [n]
TextOrIds = str | Several[int] | np.ndarray


class Engine:
    """Answers requests over stored prefixes. Thread-safe; what is computed runs in one thread.

    Requests of all callers wait in one queue, first come, first served; those that fit are computed
    together, whatever prefixes they stand on. Long work (`ingest`, prompts that are not stored)
    advances a block at a time between tokens. A request's own fault (a prefix that is not stored,
    too many tokens, a deadline that has passed, a second use of an id) is the `error` of its own
    outcome and fails nothing else. Calls themselves raise only for what no single request is to
    blame for. A process that was forked from the engine's own cannot use it (`EngineClosed`).

    A context manager; `close` persists cache scores and stops the threads.
    """

    def __init__(
        self,
        model: Transformer | Layers,
        tokenizer: Tokenizer | None,
        store: ChunkStore,
        fingerprint: Fingerprint,
        config: EngineConfig | None = None,
        *,
        default_sampling: SamplingParams | None = None,
    ) -> None:
        """Over a model, or over the layers of another engine's. `store` is closed with the engine.

        `default_sampling`: of a `generate` that is told none; None is greedy. Raises
        `ValueError` for a configuration that does not suit the model, or whose pools cannot hold
        one chunk of one layer group.
        """
        self.config = config = config or EngineConfig()
        layers = model if isinstance(model, Layers) else Layers(model)
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling or SamplingParams()
        self.store = store
        self.fingerprint = fingerprint
        self.model_config = layers.config
        self.system = system_for(config)
        self.layout = layout_of(self.system, layers.config, config.dtype)
        if config.tensor_parallel != layers.shardings.size:
            raise ValueError(
                f"got tensor_parallel={config.tensor_parallel}, expected "
                f"{layers.shardings.size}, the devices that the model is split over"
            )
        check_split(self.system, config.tensor_parallel)
        self._peers = layers.peers
        check_processes(config, self._peers.size)
        self._placement = Placement(
            model=layers.config, tokenizer=tokenizer, store=store, fingerprint=fingerprint,
            layout=self.layout, system=self.system, config=config,
        )  # fmt: skip
        self._worker = Worker(
            layers,
            store,
            self._placement,
            tokenizer,
            system=self.system,
            layout=self.layout,
            config=config,
            fingerprint=fingerprint,
            store_prompt=lambda sequence: self._prompts.store(sequence),
            carry_over=self._carry_over,
        )
        self._scheduler = Scheduler(
            self._worker, max_batch=config.max_batch, max_bytes=config.admit_bytes
        )
        self._ingest = Ingest(
            store=store, prefills=self._worker.prefills, scheduler=self._scheduler,
            prefill_bytes=self._worker.prefill_bytes, fingerprint=fingerprint,
            layout=self.layout, codec=self.system.coder,
        )  # fmt: skip
        self._intake = Intake(self._placement, self._scheduler)
        self._prompts = Prompts(self._ingest, self._scheduler)
        self._owns_store = True
        self._closed = False
        self._peers.on_lost(self._scheduler.abandon)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str],
        config: EngineConfig | None = None,
        store_config: StoreConfig | None = None,
        peers: Peers = ALONE,
    ) -> Self:
        """Loads a checkpoint folder (HF or Orbax) and opens or creates the store at a URL.

        `default_sampling` is what the folder's `generation_config.json` says.
        Raises `CheckpointError` or `UnsupportedModel` for the folder, a `StoreError` for the store,
        `ValueError` for a system that does not exist or does not suit the model. A store is made
        only when all else is right. `peers`: what `ckv_jax.processes` made of other processes.
        """
        config = config or EngineConfig()
        system = system_for(config)
        path = Path(folder)
        if config.compilation_cache:
            compilation_cache.enable()
        found = ModelConfig.from_hf(path)
        layout_of(system, found, config.dtype)  # refuses before anything is loaded
        check_split(system, config.tensor_parallel)
        shardings = Shardings.over(found, config.tensor_parallel, config.processes)
        sampling = generation_defaults(path).sampling
        model = load_pretrained(path, dtype=config.dtype, shardings=shardings)
        tokenizer = load_tokenizer(path)
        fingerprint = model_fingerprint(path, model.config, dtype=config.dtype)
        opened = ChunkStore.open(store, config=store_config)
        try:
            layers = Layers(model, peers)
            return cls(layers, tokenizer, opened, fingerprint, config, default_sampling=sampling)
        except BaseException:
            opened.close()
            raise

    def variant(self, config: EngineConfig, *, store: ChunkStore | None = None) -> Engine:
        """An engine over the same model with another configuration, and perhaps another store.

        It shares the weights and what has been compiled for them, so that systems can be compared
        side by side. It closes no store: the caller that opened one closes it. `dtype` must stay.
        """
        check_processes(config, 1)
        if config.dtype != self.config.dtype:
            raise ValueError(f"got dtype={config.dtype!r}, expected {self.config.dtype!r}")
        layers = self._worker.layers
        other = Engine(layers, self.tokenizer, store or self.store, self.fingerprint, config)
        other.default_sampling = self.default_sampling
        other._owns_store = False
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fails what still waits, persists cache scores, stops the threads. Idempotent."""
        self._scheduler.close()
        if self._closed:
            return
        self._closed = True
        self._prompts.close()
        try:
            self._peers.leave()
            self._worker.close()
        finally:
            if self._owns_store:
                self.store.close()

    # -- texts and prefixes -----------------------------------------------------------------------

    def encode(self, text: TextOrIds, *, begins: bool = False) -> Tokens:
        """Token ids int32 [n] of a text; ids are checked and passed through.

        `begins`: whether a sequence begins with it, as what is ingested does: then the tokenizer's
        begin-of-text stands before it, if it has one.
        """
        return self._placement.encode(text, begins=begins)

    def chat(self, messages: str | Several[dict[str, str]]) -> str:
        """Messages as text for the model to go on from, by the tokenizer's own template.

        A string is one message of the user's. Raises `ValueError` for messages that the template
        refuses, `CheckpointError` if there is no template.
        """
        if self.tokenizer is None:
            raise ValueError("got messages, expected token ids: this engine has no tokenizer")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.tokenizer.apply_chat(messages)

    def check_prefix(self, prefix: Prefix) -> None:
        """Refuses a prefix of another model, tenant or layout; the error says what differs."""
        self._placement.check_prefix(prefix, self.config.salt)

    def ingest(
        self, text: TextOrIds, *, progress: Progress | None = None, salt: str | None = None
    ) -> Prefix:
        """Computes and stores the KV of a text, or of what of it is not stored yet.

        A block at a time between the tokens of others; `progress` is called in this thread. `salt`:
        whose prefix it is; None: the engine's.
        """
        tokens = self.encode(text, begins=True)
        if not len(tokens):
            raise ValueError("got an empty text, expected at least one token")
        self._placement.check_context(len(tokens), 0)
        return self._ingest.store(tokens, progress, salt=self.config.salt if salt is None else salt)

    def append(self, generation: Generation, *, exact: bool = True) -> Prefix:
        """Stores a generation made with `keep_kv`: its prefix, suffix and text as one prefix.

        The next turn over it computes only what is new. What was generated under a budget of 1 is
        stored as it is. Under a smaller one its KV is approximate: with `exact` the turn is
        computed again densely, so that the prefix is what `ingest` would store; without, the KV is
        stored as it is, under an id that no lookup of exact KV finds.
        """
        if not isinstance(generation, Generation):
            raise TypeError(f"got {type(generation).__name__}, expected a Generation")
        return self._ingest.append(generation.completion(), exact=exact)

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, sampling: SamplingParams | None = None) -> Sequence:
        """Queues one request and returns at once; with `sampling` it ends in a `Generation`."""
        return self._intake.submit([request], [Way(sampling=sampling)])[0]

    def reprefill(self, requests: Several[Request]) -> list[Result]:
        """First tokens of `requests`, in their order. See `Result.error` for those that fail."""
        sequences = self._intake.submit(several(requests))
        try:
            return [result_of(sequence, settled=True) for sequence in sequences]
        except BaseException:
            for sequence in sequences:
                sequence.cancel()
            raise

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        """First tokens in order of completion. `requests` may be endless: it is read as room
        comes free. Closing the iterator cancels what is on its way. An id may come again once its
        request is done."""
        return results(requests, self._intake.one_call(), window=self._window)

    def generate(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
        *,
        keep_kv: bool | Several[bool] = False,
    ) -> TokenStream:
        """Text after each suffix: an iterator of tokens; its `results()` are the generations.

        Every token attends to chunks that it chooses itself (`SystemConfig.decode`; without, to
        those that the re-prefill chose), the suffix, and what was generated. All running texts
        are decoded together, whatever their prefix and `sampling`.

        Args:
            sampling: for all requests, or one each; None: `default_sampling`.
            keep_kv: keep keys and values in host memory for `append`; for all, or one each.
        """
        asked, ways = sampled(requests, sampling, self.default_sampling, keep_kv)
        items: SimpleQueue[Item] = SimpleQueue()
        return TokenStream(self._intake.submit(asked, ways, listener=items.put), items)

    def profile_windows(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
    ) -> Widths:
        """Generates, and shares decode windows out by what was chosen: periods whose choices come
        back have wider ones, within the same memory (KVDrive §5.2).

        The widths are kept for this model and system and used by texts that begin from now on, in
        engines to come as well (`SystemConfig.widths`). No answer depends on them. Texts of some
        200 tokens over prefixes of the kind that will be asked tell most. Raises what is wrong
        with a request, `ValueError` where nothing is chosen anew for long enough, or not by
        every token (`Select.drift`).
        """
        profile = self._worker.profile
        if self.system.decode is None or self.system.widths != "profiled":
            raise ValueError(
                f"got system {self.system.name!r}, expected one that chooses anew and has "
                "widths='profiled', such as 'ckv' or 'kvdrive'"
            )
        if self.system.decode.drift is not None:
            raise ValueError(f"got drift={self.system.decode.drift}, expected None while profiling")
        self._scheduler.call(profile.begin)
        try:
            for text in self.generate(requests, sampling).results():
                text.raise_for_error()
        finally:
            recorded = self._scheduler.call(profile.end)
        widths = profile.made_of(recorded)
        self._scheduler.call(lambda: profile.use(widths))
        return widths

    async def areprefill(self, requests: Several[Request]) -> list[Result]:
        """`reprefill` in an event loop."""
        sequences = await asyncio.to_thread(self._intake.submit, several(requests))
        await outcomes(sequences)
        return [result_of(sequence) for sequence in sequences]

    def astream(self, requests: Iterable[Request]) -> AsyncIterator[Result]:
        """`stream` in an event loop."""
        return results_async(requests, self._intake.one_call(), window=self._window)

    def agenerate(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
        *,
        keep_kv: bool | Several[bool] = False,
    ) -> AsyncTokenStream:
        """`generate` in an event loop: an asynchronous iterator with an asynchronous `results`."""
        asked, ways = sampled(requests, sampling, self.default_sampling, keep_kv)

        def submit(listener: Callable[[TokenEvent], None]) -> list[Sequence]:
            return self._intake.submit(asked, ways, listener=listener)

        return AsyncTokenStream(submit)

    def recompute(self, request: Request) -> Result:
        """The same request with nothing from the store: a dense prefill of all its tokens.

        Raises what is wrong with the request.
        """
        sequence = Sequence(request)
        self._placement.place(sequence)
        nothing = Prefix.empty(self.fingerprint, self.layout, sequence.prefix.salt)
        sequence.place(nothing, sequence.tokens, 1.0)
        self._scheduler.add(self._worker.alone.dense_job(sequence))
        return result_of(sequence)

    @property
    def _window(self) -> int:
        return 2 * self.config.max_batch  # one batch computing, one waiting

    # -- the engine itself ------------------------------------------------------------------------

    def warmup(
        self,
        prefix: Prefix,
        *,
        max_batch: int = 1,
        max_suffix: int = 64,
        budgets: Several[float | str] | None = None,
        max_tokens: int = 0,
    ) -> None:
        """Compiles what requests over `prefix`, or one of about its length, can need.

        Afterwards nothing is compiled for up to `max_batch` requests over it at once, suffixes of
        up to `max_suffix` tokens, any of `budgets` (None: the engine's) and, with `max_tokens`,
        texts of up to so many tokens.
        """
        check_processes(self.config, 1)
        check_whole("max_batch", max_batch, least=1)
        check_whole("max_suffix", max_suffix, least=1)
        check_whole("max_tokens", max_tokens, least=0)
        budgets = [self.config.budget] if budgets is None else budgets
        self._placement.check_context(prefix.num_tokens, max_suffix, max_tokens)
        steps = warm(
            self._worker,
            prefix,
            max_batch=min(max_batch, self.config.max_batch),
            max_suffix=max_suffix,
            budgets=[check_budget(budget) for budget in budgets],
            max_tokens=max_tokens,
        )
        self._scheduler.add(Job(steps)).future.result()

    def prefetch(self, prefix: Prefix, *, budget: float | str | None = None) -> Future[int]:
        """A hint that questions over `prefix` will come: its digest and the packs that questions
        have attended to most, as many as `budget` (None: the engine's), are brought to memory.

        Returns at once; it goes on between the tokens of others. The result is how many packs are
        in memory then: as many as are worth more than what is there, none of a prefix that is
        gone. Cancelling the future does not stop it. Raises what `check_prefix` does for a prefix
        of another model or layout.
        """
        check_processes(self.config, 1)
        self._placement.check_prefix(prefix, prefix.salt)
        chosen = check_budget(self.config.budget if budget is None else budget)
        return self._scheduler.add(Job(brought(self._worker, prefix, chosen))).future

    def demote(self, prefix: Prefix) -> Future[int]:
        """A hint that no question over `prefix` will come soon: its digest and its packs leave
        memory, those that it shares with other prefixes too, but for what is being used.

        What they are worth is kept. Returns at once; the result is how many packs left.
        """
        check_processes(self.config, 1)
        self._placement.check_prefix(prefix, prefix.salt)
        return self._scheduler.add(Job(let_go(self._worker, prefix))).future

    @property
    def worker(self) -> Worker:
        """What computes, for a process that follows another one's engine (`ckv_jax.processes`)."""
        return self._worker

    def _carry_over(self, old: Prefix, new: Prefix) -> None:
        self._scheduler.add(Job(carried(self._worker, old, new))).future.result()

    def settle(self) -> None:
        """Returns once nothing is being done in the background: IMPRESS's reordering, and bringing
        what was cached of a prefix to memory in its new order."""
        if self._worker.reorderer is not None:
            self._worker.reorderer.wait()

    def last_selection(self, prefix: Prefix) -> list[np.ndarray]:
        """Chunk ids that the latest batch over `prefix` chose, period by period; else empty."""
        chosen = self._scheduler.call(
            lambda: dict(self._worker.residents.open(prefix).last_selection)
        )
        return [chosen[period] for period in sorted(chosen)]

    def stats(self) -> EngineStats:
        """What is going on and what has happened so far."""
        return stats_of(self._worker, self._scheduler, self.store)

    @property
    def layers(self) -> Layers:
        """The jitted calls over the model, for measurements; engines of one model share them."""
        return self._worker.layers

    @property
    def pages(self) -> Array:
        """The device's page pool as it is now, for measurements: [slots, pl, 2, C, K*D]."""
        return self._worker.memory.pool.pages

    @property
    def periods(self) -> int:
        """Selections that one request makes."""
        return self._worker.plan.periods
