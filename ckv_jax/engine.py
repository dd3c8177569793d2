"""The engine: one model, one store, one system. Ingest prefixes, answer requests over them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np

from ckv_jax.answer import Answer, Citation, CitationFinder, room
from ckv_jax.config import EngineConfig, check_budget, check_split, layout_of
from ckv_jax.conversation import ChatPrompts, check_length, document_tokens
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
from ckv_jax.serving.placement import GenerateOptions, Placement, sampled, several
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Listener, Sequence, result_of
from ckv_jax.serving.streams import AsyncTokenStream, Item, Mailboxes, Submit, TokenStream
from ckv_jax.serving.warmup import Warmups, demote, prefetch, warm
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
_QUICK_TOKENS = 1024


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

        `default_sampling`: of a `generate` that is given none; None is greedy. Raises
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
        self.system = system_of(config.system)
        self.layout = layout_of(self.system, layers.config, config.dtype)
        if config.tensor_parallel != layers.shardings.size:
            raise ValueError(
                f"got tensor_parallel={config.tensor_parallel}, expected "
                f"{layers.shardings.size}, the devices that the model is split over"
            )
        if (config.weights == "int8") != layers.int8:
            has = "int8" if layers.int8 else None
            raise ValueError(f"got weights={config.weights!r}, expected {has!r}, the model's")
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
        self._warmups = Warmups(self._worker, self._scheduler, config)
        self._prompts = ChatPrompts(tokenizer, store)
        self._grammars = None if tokenizer is None else Grammars(tokenizer)
        self._citations = CitationFinder(tokenizer, self._prompts.tokens)
        self._owns_store = True
        self._closed = False
        self._closing = threading.Lock()

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

        `default_sampling` is what the folder's `generation_config.json` says.
        Raises `CheckpointError` or `UnsupportedModel` for the folder, a `StoreError` for the store,
        `ValueError` for a system that does not exist or does not suit the model. A store is made
        only when all else is right, and `check` has raised nothing.
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
        """An engine over the same model with another configuration, and perhaps another store.

        It shares the weights and what has been compiled for them, so that systems can be compared
        side by side. It closes no store: the caller that opened one closes it. `dtype` must stay.
        """
        if config.dtype != self.config.dtype:
            raise ValueError(f"got dtype={config.dtype!r}, expected {self.config.dtype!r}")
        layers = self._worker.layers
        other = type(self)(layers, self.tokenizer, store or self.store, self.fingerprint, config)
        other.default_sampling = self.default_sampling
        other._owns_store = False
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fails what still waits, stops the threads, persists cache scores, gives memory back.
        Idempotent."""
        ended = self._scheduler.close()
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._ingest.close()
        try:
            self._worker.close(give_back=ended)
        finally:
            if self._owns_store:
                self.store.close()

    @property
    def worker(self) -> Worker:
        """What computes, for measurements."""
        return self._worker

    def settle(self) -> None:
        """Returns once nothing is done in the background: questions over what was stored compile
        nothing (see `EngineConfig.warm_batch`), and no prefix is being rewritten."""
        self._warmups.settle()
        self._worker.executor.settle()

    def stats(self) -> EngineStats:
        """What is going on and what has happened so far."""
        return stats_of(self._worker, self._scheduler, self.store)

    @property
    def layers(self) -> Layers:
        """The jitted calls over the model, for measurements; engines of one model share them."""
        return self._worker.layers

    # -- texts and prefixes -----------------------------------------------------------------------

    def encode(self, text: TextOrIds, *, begins: bool = False) -> Tokens:
        """Token ids int32 [n] of a text; ids are checked and passed through.

        `begins`: whether a sequence begins with it, as what is ingested does: then the tokenizer's
        begin-of-text stands before it, if it has one.
        """
        return self._placement.encode(text, begins=begins)

    def chat(self, messages: str | Several[dict[str, Any]], **template_values: Any) -> Tokens:
        """Token ids int32 [n] of messages, by the tokenizer's own chat template.

        A string is one message of the user's. `template_values` are variables of the template, such
        as `enable_thinking`; with `add_generation_prompt=False` no answer begins. Names of control
        tokens within messages are text. Raises `ValueError` for messages that the template refuses,
        `CheckpointError` if there is no template.
        """
        return self._prompts.chat(messages, **template_values)

    def question(self, prefix: Prefix, question: str) -> Tokens:
        """Token ids int32 [n] of a question after a stored document, up to where its answer begins.

        As the document's chat template has it; after bare text, the question as it is.
        """
        return self._prompts.tokens(prefix, question)

    def is_document(self, prefix: Prefix) -> bool:
        """Whether a prefix is a document in the chat template, which questions continue."""
        return self._prompts.around(prefix) != ("", "")

    def check_prefix(self, prefix: Prefix, *, salt: str | None = None) -> None:
        """Refuses a prefix of another model, tenant or layout; the error says what differs.

        `salt`: of the tenant; None: the engine's own.
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
        """Computes and stores the KV of a document, or of what of it is not stored yet.

        Where the tokenizer has a chat template, a text is stored as the template renders it, up to
        the document's end; `ask` and `question` continue it. Token ids are stored as they are.

        Args:
            document: text, or token ids.
            raw: store bare text, without the template; names of control tokens in it become
                control tokens.
            turn: "system" or "user", the turn that the document stands in; None: the system turn,
                or the user's where the template takes no document in a system turn.
            instructions: text of the system turn, before a document that stands there.
            progress: called in this thread, block by block between the tokens of others.
            grouping: called in another thread at the end of runs that are grouped, where chunks are
                of alike tokens.
            salt: the tenant's; None: the engine's.
        """
        if isinstance(document, str) and self.tokenizer is not None:
            tokens, placed = document_tokens(
                self.tokenizer, self.model_config, document,
                raw=raw, turn=turn, instructions=instructions,
            )  # fmt: skip
        else:
            if turn is not None or instructions:
                raise ValueError("got turn or instructions for bare text, expected neither")
            tokens, placed = self.encode(document, begins=True), None
            check_length(tokens, self.model_config)
        salt = self.config.salt if salt is None else salt
        prefix = self._ingest.store(tokens, progress, grouping, salt=salt)
        if placed is not None:
            self._prompts.note(prefix, placed)
        self._warmups.stored(prefix)
        return prefix

    def citations(self, generation: Generation, *, most: int = 3) -> tuple[Citation, ...]:
        """The passages of the prefix that an answer attended to most, at most so many.

        Found by at most five short re-prefills over the same prefix. Empty over several documents,
        and with systems that score no chunks. Attention is evidence of reading, not proof. Raises
        what is wrong with the generation.
        """
        check_whole("most", most, least=0)
        return self._citations.of(generation, most, self.reprefill)

    def append(self, generation: Generation, *, exact: bool = True) -> Prefix:
        """Stores a generation made with `keep_kv`: its prefix, suffix and text as one prefix.

        The next turn over it computes only what is new. What was generated under a budget of 1 is
        stored as it is. Under a smaller one its KV is approximate: with `exact` the turn is
        computed again densely, so that the prefix is what `ingest` would store; without, the KV is
        stored as it is, under an id that no lookup of exact KV finds.
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
        """The answer to a question about a stored document.

        Args:
            prefix: a handle from `ingest`, an id or the start of one, or a name.
            question: text.
            budget: see `Request.budget`; None: the engine's. "fidelity:0.95": the smallest one
                whose first token is full attention's with that probability, see `calibrate`;
                "auto": "fidelity:0.98".
            sampling: None: the likeliest tokens, up to the answer's end, at most 256.

        Raises what is wrong with the request.
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
        """Learns what `ask(budget="fidelity:0.98")` needs, once for this model and system.

        Args:
            prefixes: stored documents to ask about; several depend less on any one of them.
            questions: how many passages of them to begin again; or questions of your own, for whose
                kind the probability then holds.
            progress: called with how many requests are done, and all of them.

        Raises `ValueError` for a prefix of fewer than 512 tokens.
        """
        some = [prefixes] if isinstance(prefixes, Prefix) else prefixes
        return calibrate(self, some, questions=questions, progress=progress)

    def grammar(self, kind: GrammarKind, value: Any) -> Grammar:
        """What a generation may be, for `SamplingParams.grammar`.

        Args:
            kind: "json_schema" (a schema), "regex", "choice" (a list of texts), "grammar" (GBNF or
                Lark), "lark".
            value: text, or what becomes JSON.

        Raises `ValueError` for one that is wrong or too large, and without a tokenizer.
        """
        if self._grammars is None:
            raise ValueError("got an engine without a tokenizer, expected one that reads text")
        return self._grammars.compile(kind, value if isinstance(value, str) else json.dumps(value))

    def submit(self, request: Request, sampling: SamplingParams | None = None) -> Sequence:
        """Queues one request and returns at once; with `sampling` it ends in a `Generation`."""
        return self._submit([request], [GenerateOptions(sampling=sampling)])[0]

    def reprefill(self, requests: Several[Request]) -> list[Result]:
        """First tokens of `requests`, in their order. See `Result.error` for those that fail."""
        sequences = self._submit(several(requests))
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
        return streams.results(requests, self._one_call(), window=self._window)

    def generate(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
        *,
        keep_kv: bool | Several[bool] = False,
    ) -> TokenStream:
        """Generates after each suffix: an iterator of tokens; its `results()` are the generations.

        Every token attends to chunks that it selects itself (`SystemConfig.decode`; without, to
        those that the re-prefill selected), the suffix, and what was generated. All running
        sequences are decoded together, whatever their prefix and `sampling`.

        Args:
            sampling: for all requests, or one each; None: `default_sampling`.
            keep_kv: keep keys and values in host memory for `append`; for all, or one each.
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
        return streams.results_async(requests, self._one_call(), window=self._window)

    def agenerate(
        self,
        requests: Request | Several[Request],
        sampling: SamplingParams | Several[SamplingParams] | None = None,
        *,
        keep_kv: bool | Several[bool] = False,
    ) -> AsyncTokenStream:
        """`generate` in an event loop: an asynchronous iterator with an asynchronous `results`."""
        asked, options = sampled(requests, sampling, self.default_sampling, keep_kv)

        def submit(listener: Listener) -> list[Sequence]:
            return self._submit(asked, options, listener)

        quick = all(  # to place: nothing has to be looked up or encoded
            isinstance(one, Request)
            and isinstance(one.prefix, Prefix)
            and not isinstance(one.suffix, str)
            and len(one.suffix) <= _QUICK_TOKENS
            for one in asked
        )
        return AsyncTokenStream(submit, self._mailboxes, quick=quick)

    def score(self, text: TextOrIds, *, top: int = 0) -> Future[list[Logprobs]]:
        """How likely each token of a text is after those before it, by a dense prefill.

        Returns at once; cancelling the future ends the computation. The result is a `Logprobs` for
        every token but the first, each with the `top` likeliest. Nothing comes from the store.
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
        """The same request with nothing from the store: a dense prefill of all its tokens.

        Raises what is wrong with the request.
        """
        sequence = Sequence(request)
        self._placement.place(sequence)
        nothing = Prefix.empty(self.fingerprint, self.layout, sequence.prefix.salt)
        sequence.place(nothing, sequence.tokens, 1.0)
        self._scheduler.add(self._worker.jobs.dense(sequence))
        return result_of(sequence)

    def _submit(
        self,
        requests: Several[Request],
        options: Iterable[GenerateOptions] | None = None,
        listener: Listener | None = None,
    ) -> list[Sequence]:
        """One sequence for each request of a call, queued together; bad ones have failed alone."""
        sequences = self._placement.sequences(requests, options, listener=listener)
        self._scheduler.submit(sequences)
        return sequences

    def _one_call(self) -> Submit:
        """Queues more and more requests of one call; ids are unique among those under way."""
        under_way: dict[str, Sequence] = {}
        asked = 0

        def forget(sequence: Sequence) -> None:
            name = sequence.request.id
            if name is not None and under_way.get(name) is sequence:
                del under_way[name]

        def more(requests: Several[Request]) -> list[Sequence]:
            nonlocal asked
            sequences = self._placement.sequences(requests, under_way=under_way, first=asked)
            asked += len(sequences)
            self._scheduler.submit(sequences)
            for sequence in sequences:
                sequence.on_done(forget)
            return sequences

        return more

    @property
    def _window(self) -> int:
        return 2 * self.config.max_batch  # one batch computing, one waiting

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
        """Compiles what requests over `prefix`, or one of about its length, can need.

        For those who would rather wait than have it done in the background, see
        `EngineConfig.warm_batch`. Afterwards nothing is compiled for `min_batch` to `max_batch`
        requests over it at once, suffixes of `min_suffix` to `max_suffix` tokens, any of `budgets`
        (None: every one) and generations of up to `max_tokens` tokens (0: first tokens only). A
        system that selects tokens takes None as the engine's budget.
        """
        check_whole("min_batch", min_batch, least=1)
        check_whole("max_batch", max_batch, least=min_batch)
        check_whole("min_suffix", min_suffix, least=1)
        check_whole("max_suffix", max_suffix, least=min_suffix)
        check_whole("max_tokens", max_tokens, least=0)
        if budgets is None and not self.system.chunked:
            budgets = [self.config.budget]
        self._placement.check_context(prefix.num_tokens, max_suffix, max_tokens)
        steps = warm(
            self._worker,
            prefix,
            min_batch=min(min_batch, self.config.max_batch),
            max_batch=min(max_batch, self.config.max_batch),
            min_suffix=min_suffix,
            max_suffix=max_suffix,
            budgets=None if budgets is None else [check_budget(budget) for budget in budgets],
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
        self._placement.check_prefix(prefix, prefix.salt)
        selected = check_budget(self.config.budget if budget is None else budget)
        return self._scheduler.add(Job(prefetch(self._worker, prefix, selected))).future

    def demote(self, prefix: Prefix) -> Future[int]:
        """A hint that no question over `prefix` will come soon: its digest and its packs leave
        memory, those that it shares with other prefixes too, but for what is being used.

        What they are worth is kept. Returns at once; the result is how many packs left.
        """
        self._placement.check_prefix(prefix, prefix.salt)
        return self._scheduler.add(Job(demote(self._worker, prefix))).future

    def last_selection(self, prefix: Prefix) -> list[np.ndarray]:
        """Chunk ids that the latest batch over `prefix` selected, selection by selection; else
        empty.

        A period is one selection; where heads select for themselves it has one for each KV head:
        entry `period * num_kv_heads + head`.
        """
        latest = self._scheduler.call(lambda: dict(self._worker.prefixes.known(prefix).latest))
        selections = [ids for period in sorted(latest) for ids in latest[period].swapaxes(0, 1)]
        return [np.unique(ids[ids >= 0]).astype(np.int64) for ids in selections]
