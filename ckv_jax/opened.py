"""An engine's life: what it is made of, how it is opened, compared with others, and closed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self

from jax import Array

from ckv_jax import compilation_cache
from ckv_jax.citations import Citations
from ckv_jax.config import EngineConfig
from ckv_jax.fitting import check_split, layout_of
from ckv_jax.identity import model_fingerprint
from ckv_jax.ingest import Ingest
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.generation import generation_defaults
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.pipeline.layers import Layers
from ckv_jax.questions import Questions
from ckv_jax.serving.job import Job
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.prompts import Prompts
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.worker import Worker
from ckv_jax.stats import EngineStats, stats_of
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import system_of


class OpenEngine:
    """What `Engine` is made of, until it is closed; thread-safe, a context manager."""

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
            add_job=lambda steps: self._scheduler.add(Job(steps)).future,
        )
        self._scheduler = Scheduler(
            self._worker, max_batch=config.max_batch, max_bytes=config.admit_bytes
        )
        self._ingest = Ingest(
            store=store, prefills=self._worker.prefills, scheduler=self._scheduler,
            prefill_bytes=self._worker.prefill_bytes, fingerprint=fingerprint,
            layout=self.layout, codec=self.system.coder,
        )  # fmt: skip
        self._prompts = Prompts(self._ingest, self._scheduler)
        self._questions = Questions(tokenizer, store)
        self._citations = Citations(tokenizer, self._questions.tokens)
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
    ) -> Self:
        """Loads a checkpoint (a folder of HF or Orbax, a GGUF file) and opens or creates the store.

        `default_sampling` is what the folder's `generation_config.json` says.
        Raises `CheckpointError` or `UnsupportedModel` for the folder, a `StoreError` for the store,
        `ValueError` for a system that does not exist or does not suit the model. A store is made
        only when all else is right.
        """
        config = config or EngineConfig()
        system = system_of(config.system)
        path = Path(folder)
        if config.compilation_cache:
            compilation_cache.enable()
        found = ModelConfig.from_hf(path)
        # Both refuse before anything is loaded.
        check_split(system, layout_of(system, found, config.dtype), config.tensor_parallel)
        shardings = Shardings.over(found, config.tensor_parallel)
        sampling = generation_defaults(path).sampling
        model = load_pretrained(
            path, dtype=config.dtype, weights=config.weights, shardings=shardings
        )
        tokenizer = load_tokenizer(path)
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
        self._prompts.close()
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
        """Returns once the system does nothing in the background, such as rewriting a prefix."""
        self._worker.executor.settle()

    def stats(self) -> EngineStats:
        """What is going on and what has happened so far."""
        return stats_of(self._worker, self._scheduler, self.store)

    @property
    def layers(self) -> Layers:
        """The jitted calls over the model, for measurements; engines of one model share them."""
        return self._worker.layers

    @property
    def pages(self) -> Array:
        """The device's page pool as it is now, for measurements: [slots, pl, 2, C, K*D]. Not of a
        closed engine."""
        return self._worker.memory.pool.pages

    @property
    def periods(self) -> int:
        """Selections that one request makes."""
        return self._worker.plan.periods
