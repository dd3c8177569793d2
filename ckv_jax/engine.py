"""The engine: one model, one store, one system. Ingest prefixes, re-prefill requests over them."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.errors import ContextOverflow
from ckv_jax.identity import model_fingerprint
from ckv_jax.ingest import Progress, ingest
from ckv_jax.model.qwen2 import Qwen2
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.pipeline.compute import Compute
from ckv_jax.pipeline.executor import Batch, Executor
from ckv_jax.pipeline.memory import Memory
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefetcher import Prefetcher
from ckv_jax.pipeline.prefill import DensePrefill
from ckv_jax.pipeline.probes import Probes
from ckv_jax.pipeline.recovery import Recovery
from ckv_jax.pipeline.source import PackSource
from ckv_jax.pipeline.view import Views
from ckv_jax.request import Request, Result
from ckv_jax.storage.chunk_store import ChunkStore
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import system_named
from ckv_jax.trace import Trace

Tokens = np.ndarray  # int32 [n]


class Engine:
    """Serves first tokens over stored prefixes. Thread-safe: calls run one after the other.

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

    def variant(self, config: EngineConfig) -> Engine:
        """An engine over the same model and store with another configuration.

        It shares the weights and what has been compiled for them, so that systems can be compared
        side by side. The store closes with the first engine. `dtype` must stay.
        """
        if config.dtype != self.config.dtype:
            raise ValueError(f"got dtype={config.dtype!r}, expected {self.config.dtype!r}")
        other = Engine.__new__(Engine)
        other._build(self._compute, self.tokenizer, self.store, self.fingerprint, config)
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
        system = self.config.system
        self.system: SystemConfig = system_named(system) if isinstance(system, str) else system
        self.layout = self.system.layout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.config.dtype,
        )
        self._compute = compute
        self._plan = Plan.of(model.num_layers, self.system)
        self._memory = Memory(self.layout, self.config, self.system)
        self._views = Views(store, self._memory.tiers, digest_bytes=self.config.digest_bytes)
        self._prefill = DensePrefill(self._compute, block=self.config.prefill_block)
        self._executor = Executor(self._compute, self._memory, self._plan, self.system)
        self._prefetcher = Prefetcher(self.config.io_threads, self.config.prefetch_host_bytes)
        self._probe_threads = ThreadPoolExecutor(2, "ckv-probe")
        self._lock = threading.RLock()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str],
        config: EngineConfig | None = None,
    ) -> Self:
        """Loads a Qwen2.5 checkpoint folder (HF format) and opens or creates the store at a URL.

        Raises `CheckpointError` or `UnsupportedModel` for the folder, a `StoreError` for the store.
        """
        config = config or EngineConfig()
        path = Path(folder)
        model = load_pretrained(path, dtype=config.dtype)
        tokenizer = load_tokenizer(path)
        fingerprint = model_fingerprint(path, model.config, dtype=config.dtype)
        return cls(model, tokenizer, ChunkStore.open(store), fingerprint, config)

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
        """Persists cache scores, stops threads, closes the store. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._prefetcher.close()
            self._probe_threads.shutdown(cancel_futures=True)
            try:
                self._views.save_scores()
            finally:
                if self._owns_store:
                    self.store.close()

    def encode(self, text: str | Sequence[int] | np.ndarray) -> Tokens:
        """Token ids int32 [n] of a text; ids are checked and passed through."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("got text, expected token ids: this engine has no tokenizer")
            return self.tokenizer.encode(text)
        tokens = np.asarray(text)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(f"got tokens {tokens.dtype}{tokens.shape}, expected integers [n]")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.model_config.vocab_size:
            raise ValueError(
                f"got token ids from {tokens.min()} to {tokens.max()}, "
                f"expected [0, {self.model_config.vocab_size})"
            )
        return tokens.astype(np.int32)

    def ingest(
        self, text: str | Sequence[int] | np.ndarray, *, progress: Progress | None = None
    ) -> Prefix:
        """Computes and stores the KV of a text, or of what of it is not stored yet."""
        tokens = self.encode(text)
        if not len(tokens):
            raise ValueError("got an empty text, expected at least one token")
        self._check_context(len(tokens), 0)
        with self._lock:
            return ingest(
                tokens,
                store=self.store,
                prefill=self._prefill,
                fingerprint=self.fingerprint,
                layout=self.layout,
                salt=self.config.salt,
                progress=progress,
            )

    def reprefill(self, requests: Sequence[Request]) -> list[Result]:
        """First tokens of `requests`, in their order; those that share a prefix run together."""
        with self._lock:
            placed = [self._place(request) for request in requests]
            together: dict[str, list[int]] = defaultdict(list)
            for index, (prefix, _) in enumerate(placed):
                together[prefix.id].append(index)
            results: dict[int, Result] = {}
            for members in together.values():
                for first in range(0, len(members), self.config.max_batch):
                    part = members[first : first + self.config.max_batch]
                    found = self._serve(
                        placed[part[0]][0],
                        [placed[index][1] for index in part],
                        [requests[index] for index in part],
                    )
                    results.update(zip(part, found, strict=True))
        return [results[index] for index in range(len(requests))]

    def recompute(self, request: Request) -> Result:
        """The same request with nothing from the store: a dense prefill of all its tokens."""
        with self._lock:
            prefix, suffix = self._place(request)
            return self._dense(np.concatenate([prefix.tokens, suffix]), request)

    @property
    def periods(self) -> int:
        """Selections that one request makes."""
        return self._plan.periods

    def executables(self) -> int:
        """Programs compiled so far; constant once warm."""
        return (
            self._compute.executables()
            + self._memory.pool.executables()
            + self._prefill.executables()
        )

    def _place(self, request: Request) -> tuple[Prefix, Tokens]:
        """The stored prefix of a request, and the tokens to compute after it."""
        suffix = self.encode(request.suffix)
        if not len(suffix):
            raise ValueError("got an empty suffix, expected text or at least one token")
        if isinstance(request.prefix, str):
            prefix = self.store.prefix(request.prefix, fingerprint=self.fingerprint)
        elif isinstance(request.prefix, Prefix):
            prefix = request.prefix
            prefix.fingerprint.require(self.fingerprint)
        else:
            tokens = self.encode(request.prefix)
            prefix = self._longest(tokens)
            suffix = np.concatenate([tokens[prefix.num_tokens :], suffix])
        self._check_context(prefix.num_tokens, len(suffix))
        return prefix, suffix

    def _longest(self, tokens: Tokens) -> Prefix:
        return self.store.longest_prefix(
            tokens, fingerprint=self.fingerprint, layout=self.layout, salt=self.config.salt
        )

    def _check_context(self, prefix: int, suffix: int) -> None:
        limit = self.model_config.max_position_embeddings
        if prefix + suffix > limit:
            raise ContextOverflow(
                f"got {prefix} prefix and {suffix} suffix tokens, "
                f"expected at most {limit} together (the model's context)"
            )

    def _serve(
        self, prefix: Prefix, suffixes: list[Tokens], requests: list[Request]
    ) -> Iterator[Result]:
        """One batch over one prefix. A prefix that is gone is looked up again, shorter."""
        if prefix.num_tokens and self.system.selector != "all":
            try:
                reader = self.store.reader(prefix)
            except StoreError:
                shorter = self._longest(prefix.tokens)
                rest = prefix.tokens[shorter.num_tokens :]
                return self._serve(shorter, [np.concatenate([rest, s]) for s in suffixes], requests)
            with reader:
                return iter(self._sparse(prefix, reader, suffixes, requests))
        return iter(
            [
                self._dense(np.concatenate([prefix.tokens, suffix]), request)
                for suffix, request in zip(suffixes, requests, strict=True)
            ]
        )

    def _sparse(
        self,
        prefix: Prefix,
        reader: PrefixReader,
        suffixes: list[Tokens],
        requests: list[Request],
    ) -> list[Result]:
        trace = Trace()
        view = self._views.open(prefix)
        recovery = Recovery(prefix, self._prefill)
        budgets = [r.budget if r.budget is not None else self.config.budget for r in requests]
        batch = Batch.of(suffixes, budgets, view.num_chunks)
        source = PackSource(
            view=view,
            reader=reader,
            memory=self._memory,
            prefetcher=self._prefetcher,
            recompute=recovery.packs,
            trace=trace,
        )
        probes = Probes(
            view=view,
            views=self._views,
            reader=reader,
            plan=self._plan,
            system=self.system,
            threads=self._probe_threads,
            recovery=recovery,
            trace=trace,
        )
        with source:
            first = self._executor.run(view, batch, source, probes, trace)
            trace.end()
            probes.cancel()
        logits = np.asarray(first.logits)
        return [
            self._result(request, int(first.token_ids[row]), logits[row], trace)
            for row, request in enumerate(requests)
        ]

    def _dense(self, tokens: Tokens, request: Request) -> Result:
        trace = Trace()
        start = time.perf_counter_ns()
        logits, token = self._prefill.logits(tokens)
        token_id = int(np.asarray(token)[0])
        trace.add("compute", "compute", start, time.perf_counter_ns())
        trace.end()
        return self._result(request, token_id, np.asarray(logits)[0], trace)

    def _result(self, request: Request, token_id: int, logits: np.ndarray, trace: Trace) -> Result:
        text = self.tokenizer.decode([token_id]) if self.tokenizer is not None else ""
        return Result(request=request, token_id=token_id, text=text, logits=logits, trace=trace)
