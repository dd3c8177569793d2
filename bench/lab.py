"""The bench's set-up: one structured model, one store, an engine for each system side by side."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from bench.common import SHAPES, Setting
from bench.structured import structured_model
from bench.workload import FewShot, Synthetic
from ckv_jax import Engine, EngineConfig, Request, Result
from ckv_jax.baselines.impress import REORDER_EVERY, Impress
from ckv_jax.config import SystemConfig, layout_of
from ckv_jax.errors import CkvError
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.model.weights import load_pretrained, model_fingerprint
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.codec import codec_of
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import system_of

BASE = "contiguous-kv"
"""The system whose layout a prefix is first stored in."""

KEPT = "CKV_BENCH_PREFIXES"
"""Environment: folder for prefixes that benchmarks of one code compute, to be used by the next."""
KEPT_BYTES = 16 << 30

WARM_UP = REORDER_EVERY + 2
"""Requests before anything is measured: compiles, loads digests, and lets IMPRESS reorder."""


class Lab:
    """Owns model, store and engines; a context manager that removes what it stored.

    A prefix is computed once, in all benchmarks of `bench.report`, and written in every layout that
    is asked for.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.prefill_s: list[float] = []
        """Of those prefixes that had to be computed."""
        self._prefixes: dict[tuple[int, str], Prefix] = {}
        with ExitStack() as stack:  # closed again if the rest fails
            self._open(setting, stack)
            self._stack = stack.pop_all()

    def _open(self, setting: Setting, stack: ExitStack) -> None:
        if setting.folder is not None:
            setting.folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="ckv-bench-", dir=setting.folder))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.store = ChunkStore.open(self.folder / "store", config=StoreConfig(direct_io=True))
        stack.callback(self.store.close)
        kept = Path(os.environ.get(KEPT) or self.folder / "computed")
        self._kept = ChunkStore.open(kept, config=StoreConfig(max_bytes=KEPT_BYTES))
        stack.callback(self._kept.close)
        model, fingerprint, self.work = _model_and_work(setting)
        config = EngineConfig(
            system=BASE, dtype=setting.dtype, device_cache_bytes=0, host_cache_bytes=0, warm_batch=0
        )
        self.base = Engine(model, None, self.store, fingerprint, config)
        stack.callback(self.base.close)
        self.config: ModelConfig = self.base.model_config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def kv_bytes(self) -> int:
        """Bytes of one prefix's KV."""
        return self.work.prefix_tokens * self.base.layout.token_bytes

    def engine(
        self,
        system: str | SystemConfig,
        *,
        device_bytes: int = 0,
        memory: Mapping[str, int] | None = None,
    ) -> Engine:
        """An engine of its own pools; without a cache unless one is asked for.

        `memory` has sizes of `EngineConfig` by name, in place of those.
        """
        sizes = {"device_cache_bytes": device_bytes, "host_cache_bytes": 0} | dict(memory or {})
        config = dataclasses.replace(self.base.config, system=system, **sizes)
        return self.base.variant(config)

    def ingest(self, index: int, systems: Sequence[str | SystemConfig]) -> None:
        """Stores prefix `index` in the layouts of all `systems`; computes it once."""
        layouts = {layout.hex: layout for layout in map(self.layout, systems)}
        missing = [x for key, x in layouts.items() if (index, key) not in self._prefixes]
        if not missing:
            return
        tokens = self.work.prefix(index)
        kv = self._computed(tokens)
        for layout in missing:
            if (index, layout.hex) not in self._prefixes:
                with self.store.writer(
                    fingerprint=self.base.fingerprint,
                    layout=layout,
                    tokens=tokens,
                    codec=codec_of(layout),
                ) as writer:
                    writer.write(0, kv)
                    self._prefixes[index, layout.hex] = writer.commit()

    def _computed(self, tokens: np.ndarray) -> np.ndarray:
        """KV of a prefix, as `read_kv` gives it, which this or an earlier benchmark has computed.

        Nothing but what a prefill gives is kept from one benchmark to the next: what engines learn
        of a prefix, they learn in this lab's own store.
        """
        about = {"fingerprint": self.base.fingerprint, "layout": self.base.layout}
        found = self._kept.longest_prefix(tokens, **about)
        if found.num_tokens < len(tokens):
            start = time.perf_counter()
            with self.base.variant(self.base.config, store=self._kept) as engine:
                found = engine.ingest(tokens)
            self.prefill_s.append(time.perf_counter() - start)
        return read_kv(self._kept, found)

    def put(self, index: int, prefix: Prefix) -> None:
        """Prefix `index` is this one in its layout, which was written otherwise."""
        self._prefixes[index, prefix.layout.hex] = prefix

    def prefix(self, index: int, engine: Engine) -> Prefix:
        """Prefix `index` in the layout of `engine`, stored if it is not yet."""
        self.ingest(index, [engine.system])
        return self._prefixes[index, engine.layout.hex]

    def request(self, engine: Engine, index: int, question: int, budget: float) -> Request:
        """Question number `question` over prefix `index`."""
        return Request(
            prefix=self.prefix(index, engine),
            suffix=self.work.suffix(question, index).tolist(),
            budget=budget,
        )

    def ask(self, engine: Engine, index: int, question: int, budget: float) -> tuple[float, Result]:
        """One request; wall-clock ms from submission to answer, and the answer."""
        request = self.request(engine, index, question, budget)
        start = time.perf_counter()
        if engine.system.computes_all:
            result = engine.recompute(request)
        else:
            [result] = engine.reprefill([request])
        elapsed = (time.perf_counter() - start) * 1e3
        result.raise_for_error()
        return elapsed, result

    def warm(self, engine: Engine, index: int, budgets: Sequence[float]) -> None:
        """Brings an engine to the state it serves in: compiled, digests loaded, reordered."""
        if engine.system.computes_all:
            return
        if reorders(engine.system):
            for turn in range(WARM_UP):
                self.ask(engine, index, 10_000 + turn, budgets[turn % len(budgets)])
            engine.settle()
        if index == 0:
            prefix = self.prefix(index, engine)
            longest = max(len(self.work.suffix(question)) for question in range(32))
            engine.warmup(prefix, max_suffix=longest, budgets=budgets)

    def layout(self, system: str | SystemConfig) -> Layout:
        """How a prefix lies on disk for `system`."""
        return layout_of(system_of(system), self.config, self.setting.dtype)


def reorders(system: SystemConfig) -> bool:
    """Whether a system rewrites its prefixes in the background."""
    return isinstance(system.own.executor, Impress) and system.own.executor.reorder_every > 0


def forget_scores(store: ChunkStore, prefixes: Iterable[Prefix]) -> None:
    """What engines have learned of the packs of prefixes and kept in their store goes, so that the
    next one starts as the first."""
    for prefix in prefixes:
        for span in prefix.spans:
            scores = store.load_scores(span.segment_id)
            if scores is not None:
                store.save_scores(span.segment_id, *(0 * column for column in scores))


def _model_and_work(setting: Setting) -> tuple[Transformer, Fingerprint, Synthetic | FewShot]:
    """Structured weights and random tokens, or a checkpoint and a task.

    Raises SystemExit where checkpoint or examples are not what they should be.
    """
    if setting.checkpoint is None:
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
        model = structured_model(config, dtype=setting.dtype, seed=setting.seed)
        return model, fingerprint, work
    try:
        return _checkpoint_and_task(setting, setting.checkpoint)
    except (ValueError, OSError, CkvError) as error:
        raise SystemExit(f"{setting.checkpoint} with --task {setting.task}: {error}") from error


def _checkpoint_and_task(
    setting: Setting, folder: Path
) -> tuple[Transformer, Fingerprint, FewShot]:
    """Examples are read first: what is wrong with them is told before weights are loaded."""
    assert setting.task is not None and setting.train is not None and setting.test is not None
    tasks = FewShot(
        load_tokenizer(folder).encode,
        task=setting.task,
        train=setting.train,
        test=setting.test,
        shots=setting.shots,
        prefixes=setting.prefixes,
        seed=setting.seed,
    )
    model = load_pretrained(folder, dtype=setting.dtype)
    return model, model_fingerprint(folder, model.config, dtype=setting.dtype), tasks
