"""The engine: ingests prefixes and answers requests over them, with one model, store and system."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np

from ckv_jax.answer import Answer, Citation, CitationFinder, room
from ckv_jax.config import EngineConfig, check_budget, check_split, layout_of
from ckv_jax.conversation import ChatPrompts
from ckv_jax.errors import check_whole
from ckv_jax.fidelity import Calibration, budget_for, calibrate, fidelity_of
from ckv_jax.ingest import Ingest, Progress
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.grammar import Grammar, GrammarKind, Grammars
from ckv_jax.model.sampling import MOST_LOGPROBS, Logprobs, SamplingParams, generation_defaults
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import load_pretrained, model_fingerprint
from ckv_jax.pipeline.layers import Layers
from ckv_jax.request import Generation, Request, Result
from ckv_jax.serving import streams
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.placement import (
    Options,
    Placement,
    check_loaded,
    placed_quickly,
    sampled,
    several,
)
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Listener, Sequence, result_of
from ckv_jax.serving.streams import AsyncTokenStream, Item, Mailboxes, TokenStream
from ckv_jax.serving.warmup import Warmups, demote, prefetch
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.inspect import find_prefix
from ckv_jax.systems import system_of
from ckv_jax.trace import EngineStats, stats_of
from ckv_jax.user_cache import enable_compilation_cache

Tokens = np.ndarray  # int32 [n]
TextOrIds = str | Several[int] | np.ndarray


class Engine:
    """Answers requests over stored prefixes. Thread-safe; one thread does all computation.

    Requests of all callers wait in one queue, first come, first served. Those that fit in memory
    are computed together, over any prefixes. Long work (`ingest`, prompts that are not stored) runs
    one block at a time between tokens. An invalid request (a prefix that is not stored, too many
    tokens, a deadline that has passed, a repeated id) ends with an `error` in its own outcome and
    affects no other request. Calls raise only errors that concern no single request. A forked
    process cannot use the engine of its parent (`EngineClosed`).

    A context manager; `close` saves cache scores and stops the threads.
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
        """Creates an engine over a loaded model; most callers use `from_pretrained`.

        Args:
            model: the model, or the layers of another engine over it.
            tokenizer: None: requests have token ids only.
            store: an open store, which the engine closes.
            fingerprint: identifies the model's KV in the store.
            config: None: the defaults of `EngineConfig`.
            default_sampling: sampling of `generate` calls without any; None: greedy.

        Raises `ValueError` for a configuration that does not suit the model, or whose pools cannot
        hold one chunk of one layer group.
        """
        self.config = config = config or EngineConfig()
        layers = model if isinstance(model, Layers) else Layers(model)
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling or SamplingParams()
        self.store = store
        self.fingerprint = fingerprint
        self.model_config = layers.config
        self.system = system_of(config.system)
        self.layout = layout_of(self.system, layers.config, config.dtype)
        check_loaded(config, layers)
        check_split(self.system, self.layout, config.tensor_parallel)
        self._mailboxes = Mailboxes()
        self._placement = Placement(
            model=layers.config, tokenizer=tokenizer, store=store, fingerprint=fingerprint,
            layout=self.layout, system=self.system, config=config,
        )  # fmt: skip
        self._worker = Worker(
            layers,
            self._placement,
            store_prompt=lambda sequence: self._ingest.store_prompt(sequence),
            add_job=lambda steps: self._scheduler.add(Job(steps)).future,
        )
        self._scheduler = Scheduler(
            self._worker, max_batch=config.max_batch, max_bytes=config.admit_bytes
        )
        self._ingest = Ingest(
            self._placement, self._worker.prefills, self._scheduler, self._worker.prefill_bytes
        )
        self._warmups = Warmups(self._worker, self._scheduler, self._placement)
        self._prompts = ChatPrompts(self._placement)
        self._grammars = None if tokenizer is None else Grammars(tokenizer)
        self._citations = CitationFinder(tokenizer, self._prompts.tokens)
        self._owns_store = True
        self._closing = threading.Lock()  # taken once
        store.bounds.in_use.append(self._worker.prefixes.segments)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str],
        config: EngineConfig | None = None,
        store_config: StoreConfig | None = None,
        check: Callable[[Tokenizer, ModelConfig], object] | None = None,
    ) -> Self:
        """Loads a checkpoint (a folder of HF or Orbax, a GGUF file) and opens or creates the store.

        Args:
            folder: the checkpoint. Its `generation_config.json` sets the default sampling.
            store: a folder, or a file://, s3://, gs:// or memory:// URL. A new store is created
                last, after everything else has been loaded.
            config: None: the defaults of `EngineConfig`.
            store_config: None: the defaults of `StoreConfig`.
            check: called with the tokenizer and the model's config before the store is opened; an
                exception that it raises ends the call.

        Raises `CheckpointError` or `UnsupportedModel` for the checkpoint, a `StoreError` for the
        store, and `ValueError` for a system that does not exist or does not suit the model.
        """
        config = config or EngineConfig()
        system = system_of(config.system)
        path = Path(folder)
        if config.compilation_cache:
            enable_compilation_cache()
        found = ModelConfig.from_hf(path)
        # Both refuse before anything is loaded.
        check_split(system, layout_of(system, found, config.dtype), config.tensor_parallel)
        shardings = Shardings.over(found, config.tensor_parallel)
        sampling = generation_defaults(path).sampling
        model = load_pretrained(
            path, dtype=config.dtype, weights=config.weights, shardings=shardings
        )
        tokenizer = load_tokenizer(path)
        if check is not None:
            check(tokenizer, model.config)
        fingerprint = model_fingerprint(
            path, model.config, dtype=config.dtype, weights=config.weights
        )
        opened = ChunkStore.open(store, config=store_config)
        try:
            return cls(model, tokenizer, opened, fingerprint, config, default_sampling=sampling)
        except BaseException:
            opened.close()
            raise

    def variant(self, config: EngineConfig, *, store: ChunkStore | None = None) -> Self:
        """Creates an engine over the same model, with another configuration or another store.

        The two engines share the weights and the compiled programs, so that systems can be compared
        side by side. The new engine does not close its store. Raises `ValueError` for another
        `dtype`.
        """
        if config.dtype != self.config.dtype:
            raise ValueError(f"got dtype={config.dtype!r}, expected {self.config.dtype!r}")
        store = store or self.store
        other = type(self)(self.layers, self.tokenizer, store, self.fingerprint, config)
        other.default_sampling = self.default_sampling
        other._owns_store = False
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends waiting requests with `EngineClosed`, stops the threads, saves cache scores and
        frees memory. Idempotent."""
        ended = self._scheduler.close()
        if not self._closing.acquire(blocking=False):
            return
        self._ingest.close(wait=ended)  # else this is the thread that they wait for
        try:
            self._worker.close(give_back=ended)
        finally:
            self.store.bounds.in_use.remove(self._worker.prefixes.segments)
            if self._owns_store:
                self.store.close()

    @property
    def worker(self) -> Worker:
        """The worker that computes batches, for measurements."""
        return self._worker

    @property
    def closed(self) -> bool:
        """Whether requests get `EngineClosed`: after `close`, and if the engine's thread failed."""
        return self._scheduler.closed

    def settle(self) -> None:
        """Waits for all background work: the rewriting of prefixes, and compilation for stored
        prefixes (see `EngineConfig.warm_batch`) and for generated tokens."""
        self._warmups.settle()
        self._worker.settle()

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters, caches and queues."""
        return stats_of(self._worker, self._scheduler, self.store)

    @property
    def layers(self) -> Layers:
        """The jitted calls over the model, for measurements; engines of one model share them."""
        return self._worker.layers

    # -- texts and prefixes -----------------------------------------------------------------------

    def encode(self, text: TextOrIds, *, begins: bool = False) -> Tokens:
        """Encodes a text as token ids, int32 [n]; checks and returns token ids.

        `begins`: whether the text begins a sequence, as an ingested text does; the tokenizer's
        begin-of-text token, if any, is then prepended. Raises `ValueError` for ids outside of the
        vocabulary.
        """
        return self._placement.encode(text, begins=begins)

    def chat(self, messages: str | Several[dict[str, Any]], **template_values: Any) -> Tokens:
        """Encodes messages as token ids, int32 [n], by the tokenizer's chat template.

        A string is one message of the user. `template_values` are variables of the template, such
        as `enable_thinking`; `add_generation_prompt=False` omits the start of an answer. Control
        tokens spelled out within messages are encoded as text. Raises `ValueError` for messages
        that the template refuses, `CheckpointError` if there is no template.
        """
        return self._prompts.chat(messages, **template_values)

    def question(self, prefix: Prefix, question: str) -> Tokens:
        """Encodes a question about a stored document as token ids, int32 [n], up to its answer.

        The question is rendered by the document's chat template; after plain text it is encoded
        unchanged.
        """
        return self._prompts.tokens(prefix, question)

    def is_document(self, prefix: Prefix) -> bool:
        """Whether a prefix is a document inside the chat template, which questions continue."""
        return self._prompts.around(prefix) != ("", "")

    def check_prefix(self, prefix: Prefix, *, salt: str | None = None) -> None:
        """Checks that a prefix has this engine's model, tenant and layout.

        `salt`: the tenant's; None: the engine's. Raises `FingerprintMismatch` for another model,
        tokenizer or dtype, `PrefixNotFound` for another tenant, `ValueError` for another layout.
        """
        self._placement.check_prefix(prefix, self.config.salt if salt is None else salt)

    def ingest(
        self,
        document: TextOrIds,
        *,
        raw: bool = False,
        turn: str | None = None,
        instructions: str = "",
        progress: Progress | None = None,
        grouping: Progress | None = None,
        salt: str | None = None,
    ) -> Prefix:
        """Computes and stores the KV of a document, except for a part that is already stored.

        If the tokenizer has a chat template, a text is stored as the template renders it, up to the
        end of the document; `ask` and `question` continue it. Token ids are stored unchanged.

        Args:
            document: text, or token ids (int [T]).
            raw: store plain text without the template; control tokens spelled out in it become
                control tokens.
            turn: "system" or "user", the turn that contains the document; None: the system turn,
                or the user turn where the template supports no system turn.
            instructions: text of the system turn, before the document.
            progress: called as `progress(done, total)` in this thread, in tokens, after each block.
            grouping: called as `grouping(done, total)` in another thread, after each run of tokens
                that is clustered, where chunks are clusters.
            salt: the tenant's; None: the engine's.

        Raises `ValueError` for an empty text, `ContextOverflow` for one that is too long, and
        `StoreFull` or another `StoreError` if it cannot be stored; then nothing is stored.
        """
        tokens, placed = self._prompts.document(
            document, raw=raw, turn=turn, instructions=instructions
        )
        salt = self.config.salt if salt is None else salt
        prefix = self._ingest.store(tokens, progress, grouping, salt=salt)
        if placed is not None:
            self._prompts.note(prefix, placed)
        self._warmups.stored(prefix)
        return prefix

    def citations(self, generation: Generation, *, most: int = 3) -> tuple[Citation, ...]:
        """Finds the passages of the prefix that an answer attended to most, at most `most`.

        It runs at most five short re-prefills over the same prefix. The result is empty over
        several documents and with systems that score no chunks. Attention is evidence, not proof.
        Raises the error of the generation, if it has one.
        """
        check_whole("most", most, least=0)
        return self._citations.of(generation, most, self.reprefill)

    def append(self, generation: Generation, *, exact: bool = True) -> Prefix:
        """Stores prefix, suffix and tokens of a generation made with `keep_kv` as one prefix.

        The next turn over it computes only its new tokens. KV generated under a budget of 1 is
        exact and stored unchanged. Under a smaller budget it is approximate: with `exact` the turn
        is recomputed densely, so that the prefix equals that of `ingest`; without, the approximate
        KV is stored, under an id that lookups of exact KV do not find. Raises `ValueError` without
        `keep_kv`, and the error of the generation, if it has one.
        """
        if not isinstance(generation, Generation):
            raise TypeError(f"got {type(generation).__name__}, expected a Generation")
        prefix = self._ingest.append(generation.completion(), exact=exact)
        self._warmups.stored(prefix)
        return prefix

    # -- requests ---------------------------------------------------------------------------------

    def ask(
        self,
        prefix: Prefix | str,
        question: str,
        *,
        budget: float | str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Answer:
        """Answers a question about a stored document.

        Args:
            prefix: a handle from `ingest`, an id, the start of an id, or a name.
            question: the question's text.
            budget: see `Request.budget`; None: the engine's. "fidelity:0.95" is the smallest budget
                whose first token equals that of full attention with this probability, see
                `calibrate`; "auto" means "fidelity:0.98".
            sampling: None: greedy, up to the end of the answer, at most 256 tokens.

        Raises the error of the request, such as `PrefixNotFound` or `ContextOverflow`.
        """
        if isinstance(prefix, str):
            prefix = find_prefix(self.store, prefix, salt=self.config.salt)
        suffix = self.question(prefix, question)
        if sampling is None:
            limit = self.model_config.max_position_embeddings
            sampling = SamplingParams(max_tokens=room(prefix.num_tokens, len(suffix), limit))
        before_ms = 0.0
        if (wanted := fidelity_of(budget)) is not None:
            budget, before_ms, _ = budget_for(self, prefix, suffix.tolist(), wanted)
        request = Request(prefix=prefix, suffix=suffix.tolist(), budget=budget)
        (generation,) = self.generate(request, sampling).results()
        return Answer.of(generation, lambda: self.citations(generation), before_ms=before_ms)

    def calibrate(
        self,
        prefixes: Prefix | Several[Prefix],
        *,
        questions: int | Several[str] = 200,
        progress: Progress | None = None,
    ) -> Calibration:
        """Measures the data that `ask(budget="fidelity:0.98")` needs, once per model and system.

        Args:
            prefixes: stored documents to calibrate on; several make the result less specific to
                one.
            questions: number of passages that the model continues; or your own questions, for which
                the probabilities then hold.
            progress: called as `progress(done, total)`, in requests.

        Raises `ValueError` for a prefix of fewer than 512 tokens, and for more than 10,000
        questions.
        """
        some = [prefixes] if isinstance(prefixes, Prefix) else prefixes
        return calibrate(self, some, questions=questions, progress=progress)

    def grammar(self, kind: GrammarKind, value: Any) -> Grammar:
        """Compiles a grammar for `SamplingParams.grammar`.

        Args:
            kind: "json_schema" (a schema), "regex", "choice" (a list of texts), "grammar" (GBNF or
                Lark), "lark".
            value: the grammar's text, or a value that is converted to JSON.

        Raises `ValueError` for a grammar that is invalid or too large, and without a tokenizer.
        """
        if self._grammars is None:
            raise ValueError("got an engine without a tokenizer, expected one that reads text")
        return self._grammars.compile(kind, value if isinstance(value, str) else json.dumps(value))

    def submit(self, request: Request, sampling: SamplingParams | None = None) -> Sequence:
        """Queues one request and returns at once. Its outcome is a `Generation` with `sampling`,
        else a `Result`."""
        return self._submit([request], [(sampling, False)])[0]

    def reprefill(self, requests: Several[Request]) -> list[Result]:
        """Computes the first tokens of `requests`, in their order. A request that fails has
        `Result.error`."""
        sequences = self._submit(several(requests))
        try:
            return [result_of(sequence, settled=True) for sequence in sequences]
        except BaseException:
            for sequence in sequences:
                sequence.cancel()
            raise

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Yields first tokens in order of completion.

        `requests` may be endless; it is read while the queue has room. Closing the iterator cancels
        the requests that are running. An id may be used again after its request has ended.
        """
        place, submit = self._placement.sequences, self._scheduler.submit
        return streams.results(requests, place, submit, max_batch=self.config.max_batch)

    def generate(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
        *,
        keep_kv: bool | Several[bool] = False,
    ) -> TokenStream:
        """Generates tokens after each suffix.

        Returns an iterator of `TokenEvent`s, whose `results()` are the generations. Each token
        attends to the chunks that it selects (`SystemConfig.decode`; without it, to those that the
        re-prefill selected), to the suffix, and to the tokens generated before. All running
        sequences are decoded together, over any prefixes and with any `sampling`.

        Args:
            requests: one request, or several.
            sampling: one for all requests, or one each; None: `default_sampling`.
            keep_kv: whether to keep keys and values in host memory for `append`; one for all, or
                one each.
        """
        asked, options = sampled(requests, sampling, self.default_sampling, keep_kv)
        items: SimpleQueue[Item] = SimpleQueue()
        return TokenStream(self._submit(asked, options, items.put), items)

    async def areprefill(self, requests: Several[Request]) -> list[Result]:
        """`reprefill` in an event loop."""
        asked = several(requests)
        sequences = await streams.submitted(lambda: self._submit(asked))
        await streams.outcomes(sequences)
        return [result_of(sequence) for sequence in sequences]

    def astream(self, requests: Iterable[Request]) -> AsyncIterator[Result]:
        """`stream` in an event loop."""
        place, submit = self._placement.sequences, self._scheduler.submit
        return streams.results_async(requests, place, submit, max_batch=self.config.max_batch)

    def agenerate(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
        *,
        keep_kv: bool | Several[bool] = False,
    ) -> AsyncTokenStream:
        """`generate` in an event loop: an asynchronous iterator with an asynchronous `results`."""
        asked, options = sampled(requests, sampling, self.default_sampling, keep_kv)
        submit, quick = partial(self._submit, asked, options), all(map(placed_quickly, asked))
        return AsyncTokenStream(submit, self._mailboxes, quick=quick)

    def score(self, text: TextOrIds, *, top: int = 0) -> Future[list[Logprobs]]:
        """Computes the log probability of each token of a text, by a dense prefill without the
        store.

        Returns a future at once; cancelling it ends the computation. The result is a `Logprobs` for
        every token but the first, each with the `top` likeliest tokens.
        """
        tokens = self.encode(text, begins=True)
        if not len(tokens):
            raise ValueError("got an empty text, expected at least one token")
        check_whole("top", top, least=0, most=MOST_LOGPROBS)
        self._placement.check_context(len(tokens), 0)
        job = self._scheduler.add(self._worker.jobs.score(tokens, top))
        job.future.add_done_callback(lambda future: job.cancel() if future.cancelled() else None)
        return job.future

    def recompute(self, request: Request) -> Result:
        """Computes a request's first token by a dense prefill of all its tokens, without the store.

        Raises the error of the request, if it has one.
        """
        sequence = self._placement.dense(request)
        self._scheduler.add(self._worker.jobs.dense(sequence))
        result = result_of(sequence)
        result.raise_for_error()
        return result

    def _submit(
        self,
        requests: Several[Request],
        options: Iterable[Options] | None = None,
        listener: Listener | None = None,
    ) -> list[Sequence]:
        """Queues one sequence for each request of a call; invalid ones have failed already."""
        sequences = self._placement.sequences(requests, options, listener=listener)
        self._scheduler.submit(sequences)
        return sequences

    # -- the engine itself ------------------------------------------------------------------------

    def warmup(
        self,
        prefix: Prefix,
        *,
        min_batch: int = 1,
        max_batch: int = 1,
        min_suffix: int = 1,
        max_suffix: int = 64,
        budgets: Several[float | str] | None = None,
        max_tokens: int = 0,
    ) -> None:
        """Compiles the programs of requests over `prefix`, or over one of about its length.

        It returns when they are compiled; `EngineConfig.warm_batch` compiles in the background.
        Afterwards the engine compiles nothing for requests within these bounds.

        Args:
            min_batch, max_batch: number of requests at once.
            min_suffix, max_suffix: tokens of their suffixes.
            budgets: None: every budget, or the engine's for a system that selects tokens.
            max_tokens: tokens of their generations; 0: first tokens only.

        Raises `ValueError` for bounds out of range, `ContextOverflow` where they exceed the model's
        context.
        """
        batches, suffixes = (min_batch, max_batch), (min_suffix, max_suffix)
        self._warmups.run(prefix, batches, suffixes, budgets=budgets, max_tokens=max_tokens)

    def prefetch(self, prefix: Prefix, *, budget: float | str | None = None) -> Future[int]:
        """Loads the digest of `prefix` and the packs that questions attended to most into memory.

        Use it as a hint that questions will come. It loads as many packs as `budget` (None: the
        engine's) allows and as are worth more than the cached ones. Returns a future at once; the
        result is the number of packs in memory, 0 for a prefix that is no longer stored. Loading
        runs between the tokens of other requests; cancelling the future does not stop it. Raises
        the errors of `check_prefix`.
        """
        self._placement.check_prefix(prefix, prefix.salt)
        selected = check_budget(self.config.budget if budget is None else budget)
        return self._scheduler.add(Job(prefetch(self._worker, prefix, selected))).future

    def demote(self, prefix: Prefix) -> Future[int]:
        """Evicts the digest and the packs of `prefix` from memory, except those in use.

        Use it as a hint that no question will come soon. Packs shared with other prefixes are
        evicted too; cache scores are kept. Returns a future at once; the result is the number of
        packs evicted. Raises the errors of `check_prefix`.
        """
        self._placement.check_prefix(prefix, prefix.salt)
        return self._scheduler.add(Job(demote(self._worker, prefix))).future

    def last_selection(self, prefix: Prefix) -> list[np.ndarray]:
        """Returns the chunk ids (int64 [N]) of each selection of the latest batch over `prefix`.

        There is one selection per period, or one per period and KV head where heads select
        separately (entry `period * num_kv_heads + head`). Empty if there was no batch.
        """
        if not prefix.num_tokens:
            return []
        latest = self._scheduler.call(lambda: dict(self._worker.prefixes.known(prefix).latest))
        selections = [ids for period in sorted(latest) for ids in latest[period].swapaxes(0, 1)]
        return [np.unique(ids[ids >= 0]).astype(np.int64) for ids in selections]
