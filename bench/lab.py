"""The bench's set-up: one structured model, one store, an engine for each system side by side."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bench.common import SHAPES, Setting
from bench.structured import structured_model
from bench.workload import FewShot, Synthetic
from ckv_jax import Engine, EngineConfig, Request, Result
from ckv_jax.config import SystemConfig
from ckv_jax.identity import model_fingerprint
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.qwen2 import Qwen2
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.pipeline.compute import Compute
from ckv_jax.pipeline.prefill import DensePrefill
from ckv_jax.reorder import REORDER_AFTER
from ckv_jax.storage.chunk_store import ChunkStore
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import system_named

WARM_UP = REORDER_AFTER + 2
"""Requests before anything is measured: compiles, loads digests, and lets IMPRESS reorder."""


class Lab:
    """Owns model, store and engines; a context manager that removes what it stored.

    A prefix is computed once and written in every layout that is asked for.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        model, fingerprint, self.work = _model_and_work(setting)
        self.config: ModelConfig = model.config
        self._stack = ExitStack()
        if setting.folder is not None:
            setting.folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="ckv-bench-", dir=setting.folder))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.store = ChunkStore.open(self.folder / "store", config=StoreConfig(direct_io=True))
        self._compute = Compute(model)
        self._prefill = DensePrefill(self._compute, block=512)
        base = EngineConfig(
            system="recompute", dtype=setting.dtype, device_cache_bytes=0, host_cache_bytes=0
        )
        self.base = self._stack.enter_context(Engine(model, None, self.store, fingerprint, base))
        self._prefixes: dict[tuple[int, str], Prefix] = {}
        self.prefill_s: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def kv_bytes(self) -> int:
        """Bytes of one prefix's KV."""
        row = self.config.num_kv_heads * self.config.head_dim
        size = 4 if self.setting.dtype == "float32" else 2
        return 2 * self.config.num_layers * self.work.prefix_tokens * row * size

    def engine(
        self,
        system: str | SystemConfig,
        *,
        device_bytes: int = 0,
        host_bytes: int = 0,
        io_threads: int = 4,
    ) -> Engine:
        """An engine of its own pools; without a cache unless one is asked for."""
        config = dataclasses.replace(
            self.base.config,
            system=system,
            device_cache_bytes=device_bytes,
            host_cache_bytes=host_bytes,
            io_threads=io_threads,
        )
        return self.base.variant(config)

    def ingest(self, index: int, systems: Sequence[str | SystemConfig]) -> None:
        """Stores prefix `index` in the layouts of all `systems`; computes it once."""
        layouts = {layout.hex: layout for layout in map(self._layout, systems)}
        missing = [x for key, x in layouts.items() if (index, key) not in self._prefixes]
        if not missing:
            return
        tokens = self.work.prefix(index)
        start = time.perf_counter()
        blocks = [np.asarray(block.kv)[:, :, : block.length] for block in self._prefill.run(tokens)]
        self.prefill_s.append(time.perf_counter() - start)
        for layout in missing:
            with self.store.writer(
                fingerprint=self.base.fingerprint, layout=layout, tokens=tokens
            ) as writer:
                first = 0
                for block in blocks:
                    writer.write(first, block.view(layout.numpy_dtype))
                    first += block.shape[2]
                self._prefixes[index, layout.hex] = writer.commit()

    def prefix(self, index: int, engine: Engine) -> Prefix:
        """Prefix `index` in the layout of `engine`, stored if it is not yet."""
        self.ingest(index, [engine.system])
        return self._prefixes[index, engine.layout.hex]

    def request(self, engine: Engine, index: int, question: int, budget: float) -> Request:
        """Question number `question` over prefix `index`."""
        return Request(
            prefix=self.prefix(index, engine),
            suffix=self.work.suffix(question).tolist(),
            budget=budget,
        )

    def ask(self, engine: Engine, index: int, question: int, budget: float) -> tuple[float, Result]:
        """One request; wall-clock ms from submission to answer, and the answer."""
        request = self.request(engine, index, question, budget)
        start = time.perf_counter()
        if engine.system.selector == "none":
            result = engine.recompute(request)
        else:
            [result] = engine.reprefill([request])
        elapsed = (time.perf_counter() - start) * 1e3
        result.raise_for_error()
        return elapsed, result

    def warm(self, engine: Engine, index: int, budgets: Sequence[float]) -> None:
        """Brings an engine to the state it serves in: compiled, digests loaded, reordered."""
        if engine.system.selector == "none":
            self.ask(engine, index, 10_000, budgets[0])
            return
        if engine.system.reorder:
            for turn in range(WARM_UP):
                self.ask(engine, index, 10_000 + turn, budgets[turn % len(budgets)])
            engine.settle()
        if index == 0:
            prefix = self.prefix(index, engine)
            longest = max(len(self.work.suffix(question)) for question in range(32))
            engine.warmup(prefix, max_suffix=longest, budgets=budgets)
        for budget in budgets:
            self.ask(engine, index, 11_000, budget)

    def _layout(self, system: str | SystemConfig) -> Layout:
        config = system_named(system) if isinstance(system, str) else system
        return config.layout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.setting.dtype,
        )


def _model_and_work(setting: Setting) -> tuple[Qwen2, Fingerprint, Synthetic | FewShot]:
    """Structured weights and random tokens, or a checkpoint and a task."""
    if setting.checkpoint is None:
        if setting.task is not None:
            raise ValueError(f"got task={setting.task!r} without a checkpoint to answer it")
        config = SHAPES[setting.model]
        work = Synthetic(
            vocab_size=config.vocab_size,
            prefix_tokens=setting.prefix_tokens,
            suffix_tokens=setting.suffix_tokens,
            seed=setting.seed,
        )
        # Not a hash of the weights: they follow from these, and may be 64 GB on a device.
        made = {"weights": f"structured, seed {setting.seed}", "config": setting.model}
        fingerprint = Fingerprint(made | {"dtype": setting.dtype, "tokenizer": "", "rope": ""})
        return structured_model(config, dtype=setting.dtype, seed=setting.seed), fingerprint, work
    if setting.task is None or setting.train is None or setting.test is None:
        raise ValueError("got a checkpoint, expected --task, --train and --test with it")
    model = load_pretrained(setting.checkpoint, dtype=setting.dtype)
    tasks = FewShot(
        load_tokenizer(setting.checkpoint).encode,
        task=setting.task,
        train=setting.train,
        test=setting.test,
        shots=setting.shots,
        prefixes=setting.prefixes,
        seed=setting.seed,
    )
    return model, model_fingerprint(setting.checkpoint, model.config, dtype=setting.dtype), tasks
