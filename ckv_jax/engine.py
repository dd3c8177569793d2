"""The engine: one model, one store, one system. Ingest prefixes, answer requests over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ckv_jax.config import EngineConfig, SystemConfig, check_budget
from ckv_jax.identity import model_fingerprint
from ckv_jax.ingest import Progress, ingest
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.qwen2 import Qwen2
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.pipeline.layers import Compute
from ckv_jax.request import Request, Result
from ckv_jax.serving.answering import Answering
from ckv_jax.serving.append import append
from ckv_jax.serving.fair_lock import FairLock
from ckv_jax.serving.generation import Generation
from ckv_jax.serving.handle import Handle
from ckv_jax.serving.intake import Intake
from ckv_jax.serving.parts import Parts
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.server import Server
from ckv_jax.serving.streams import result_of
from ckv_jax.serving.warmup import warm
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import system_named
from ckv_jax.validate import check_whole

Tokens = np.ndarray  # int32 [n]


class Engine(Answering):
    """Answers requests over stored prefixes. Thread-safe; what is computed runs in one thread.

    Requests of all callers wait in one queue, first come, first served; those over one prefix are
    computed together. A request's own fault (a prefix that is not stored, too many tokens, a
    deadline that has passed, a second use of an id) is the `error` of its own outcome and fails
    nothing else. Calls themselves raise only for what no single request is to blame for.

    A context manager; `close` persists cache scores and stops the threads.
    """

    def __init__(
        self,
        model: Qwen2,
        tokenizer: Tokenizer | None,
        store: ChunkStore,
        fingerprint: Fingerprint,
        config: EngineConfig | None = None,
    ) -> None:
        self._build(Compute(model), tokenizer, store, fingerprint, config or EngineConfig())
        self._owns_store = True

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str],
        config: EngineConfig | None = None,
    ) -> Self:
        """Loads a Qwen2.5 checkpoint folder (HF format) and opens or creates the store at a URL.

        Raises `CheckpointError` or `UnsupportedModel` for the folder, a `StoreError` for the store,
        `ValueError` for a system that does not exist or does not suit the model. A store is made
        only when all else is right.
        """
        config = config or EngineConfig()
        system = _system(config)
        path = Path(folder)
        model = load_pretrained(path, dtype=config.dtype)
        tokenizer = load_tokenizer(path)
        fingerprint = model_fingerprint(path, model.config, dtype=config.dtype)
        _layout(system, model.config, config)
        opened = ChunkStore.open(store)
        try:
            return cls(model, tokenizer, opened, fingerprint, config)
        except BaseException:
            opened.close()
            raise

    def variant(self, config: EngineConfig, *, store: ChunkStore | None = None) -> Engine:
        """An engine over the same model with another configuration, and perhaps another store.

        It shares the weights and what has been compiled for them, so that systems can be compared
        side by side. It closes no store: its own is closed by whoever opened it. `dtype` must stay.
        """
        if config.dtype != self.config.dtype:
            raise ValueError(f"got dtype={config.dtype!r}, expected {self.config.dtype!r}")
        other = Engine.__new__(Engine)
        other._build(
            self._parts.compute, self.tokenizer, store or self.store, self.fingerprint, config
        )
        other._owns_store = False
        return other

    def _build(
        self,
        compute: Compute,
        tokenizer: Tokenizer | None,
        store: ChunkStore,
        fingerprint: Fingerprint,
        config: EngineConfig,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.store = store
        self.fingerprint = fingerprint
        self.model_config = model = compute.config
        self.system = _system(config)
        self.layout = _layout(self.system, model, config)
        self._parts = Parts.build(
            compute=compute, store=store, system=self.system, layout=self.layout, config=config
        )
        self._placement = Placement(
            model=model,
            tokenizer=tokenizer,
            store=store,
            fingerprint=fingerprint,
            layout=self.layout,
            system=self.system,
            config=config,
        )
        self._server = Server(
            self._parts, self._placement, self.layout, tokenizer, model.eos_token_ids
        )
        self._lock = FairLock()
        self._scheduler = Scheduler(
            self._server,
            lock=self._lock,
            max_batch=config.max_batch,
            max_bytes=config.admit_bytes,
        )
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fails what still waits, persists cache scores, stops the threads. Idempotent."""
        self._scheduler.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._parts.close()
            finally:
                if self._owns_store:
                    self.store.close()

    def encode(self, text: str | Sequence[int] | np.ndarray) -> Tokens:
        """Token ids int32 [n] of a text; ids are checked and passed through."""
        return self._placement.encode(text)

    def chat(self, messages: str | Sequence[dict[str, str]]) -> str:
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
        self._placement.check_prefix(prefix)

    def ingest(
        self, text: str | Sequence[int] | np.ndarray, *, progress: Progress | None = None
    ) -> Prefix:
        """Computes and stores the KV of a text, or of what of it is not stored yet."""
        tokens = self.encode(text)
        if not len(tokens):
            raise ValueError("got an empty text, expected at least one token")
        self._placement.check_context(len(tokens), 0)
        with self._lock:
            return ingest(
                tokens,
                store=self.store,
                prefill=self._parts.prefill,
                fingerprint=self.fingerprint,
                layout=self.layout,
                salt=self.config.salt,
                progress=progress,
            )

    def append(self, generation: Generation) -> Prefix:
        """Stores a generation made with `keep_kv`: its prefix, suffix and text as one prefix.

        The next turn over it computes only what is new. Its keys and values are those that the
        generation saw, under its budget: at a budget of 1 they are what `ingest` would store.
        """
        completion = generation.completion()
        with self._lock:
            return append(
                completion,
                store=self.store,
                prefill=self._parts.prefill,
                fingerprint=self.fingerprint,
                layout=self.layout,
                salt=self.config.salt,
            )

    def recompute(self, request: Request) -> Result:
        """The same request with nothing from the store: a dense prefill of all its tokens.

        Raises what is wrong with the request.
        """
        handle = Handle(request)
        handle.placed = self._placement.place(request)
        with self._lock:
            self._server.recompute(handle)
        return result_of(handle)

    def warmup(
        self,
        prefix: Prefix,
        *,
        max_batch: int = 1,
        max_suffix: int = 64,
        budgets: Sequence[float] | None = None,
        max_tokens: int = 0,
    ) -> None:
        """Compiles what requests over `prefix`, or one of about its length, can need.

        Afterwards nothing is compiled for up to `max_batch` requests at once, suffixes of up to
        `max_suffix` tokens, any of `budgets` (None: the engine's) and, with `max_tokens`, texts
        of up to so many tokens.
        """
        check_whole("max_batch", max_batch, least=1)
        check_whole("max_suffix", max_suffix, least=1)
        check_whole("max_tokens", max_tokens, least=0)
        budgets = [self.config.budget] if budgets is None else budgets
        self._placement.check_context(prefix.num_tokens, max_suffix, max_tokens)
        with self._lock:
            warm(
                self._parts,
                prefix,
                max_batch=min(max_batch, self.config.max_batch),
                max_suffix=max_suffix,
                budgets=[check_budget(budget) for budget in budgets],
                max_tokens=max_tokens,
            )

    def settle(self) -> None:
        """Returns once nothing is being done in the background (IMPRESS's reordering)."""
        if self._parts.reorderer is not None:
            self._parts.reorderer.wait()

    def last_selection(self, prefix: Prefix) -> list[np.ndarray]:
        """Chunk ids that the latest batch over `prefix` chose, period by period; else empty."""
        with self._lock:
            chosen = self._parts.views.open(prefix).last_selection
            return [chosen[period] for period in sorted(chosen)]

    @property
    def periods(self) -> int:
        """Selections that one request makes."""
        return self._parts.plan.periods

    def executables(self) -> int:
        """Programs compiled so far; constant once warm."""
        return self._parts.executables() + self._server.executables()

    def _intake(self) -> Intake:
        return Intake(self._placement, self._scheduler)

    @property
    def _window(self) -> int:
        return 2 * self.config.max_batch  # one batch computing, one waiting


def _system(config: EngineConfig) -> SystemConfig:
    return system_named(config.system) if isinstance(config.system, str) else config.system


def _layout(system: SystemConfig, model: ModelConfig, config: EngineConfig) -> Layout:
    return system.layout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=config.dtype,
    )
