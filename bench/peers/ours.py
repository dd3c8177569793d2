"""This engine: a share of the stored KV, from the SSD for every question, or from memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.peers.base import Answer, Case, Held, Holder, Page, Way
from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore


def our_engine(folder: Path, store: Path, system: str, weights: str | None = None) -> Engine:
    """An engine that keeps no KV from one request to the next."""
    config = EngineConfig(
        system=system, weights=weights, device_cache_bytes=0, host_cache_bytes=0, warm_batch=0
    )
    model = load_pretrained(folder, dtype=config.dtype, weights=weights)
    whose = Fingerprint({"weights": str(folder)})  # the store has no other KV
    return Engine(model, None, ChunkStore.open(store), whose, config)


class Ours:
    """A peer among the others."""

    packages = ()
    install = ""

    def __init__(
        self, system: str, budgets: Sequence[float], *, weights: str | None = None
    ) -> None:
        """`weights`: see `EngineConfig`."""
        self._system, self._budgets, self._weights = system, budgets, weights

    @contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        """Engines over a store in `work`: one without any cache of KV, one that has all cached."""
        with ExitStack() as stack:
            folder = work / f"store-{case.name}-{self._weights}"
            cold = stack.enter_context(our_engine(case.folder, folder, self._system, self._weights))
            layout = cold.layout
            chunks = sum(-(-len(page.tokens) // layout.chunk_tokens) for page in case.pages)
            size = layout.groups * chunks * layout.pack_bytes
            room = replace(cold.config, device_cache_bytes=size)
            engines = {"from the SSD": cold, "in memory": stack.enter_context(cold.variant(room))}

            cold.ingest(case.pages[0].tokens[::-1])  # compiles what a prefill takes

            def hold(page: Page) -> Held:
                start = time.perf_counter()
                prefix, ways = cold.ingest(page.tokens), {}
                prefill_ms = (time.perf_counter() - start) * 1e3
                for where, engine in engines.items():
                    engine.warmup(
                        prefix, max_suffix=case.longest, budgets=self._budgets, max_tokens=case.text
                    )
                    engine.reprefill([Request(prefix=prefix, suffix=[1], budget=1.0)])
                    for budget in self._budgets:
                        what = f"{budget:.0%} of the KV {where}"
                        ways[what] = _way(engine, prefix, budget, page.text, prefill_ms)
                return ways

            yield hold


def _way(
    engine: Engine, prefix: Prefix, budget: float, text: np.ndarray | None, prefill_ms: float
) -> Way:
    def ask(suffix: np.ndarray) -> Answer:
        request = Request(prefix=prefix, suffix=suffix.tolist(), budget=budget)
        start = time.perf_counter()
        [result] = engine.reprefill([request])
        ms = (time.perf_counter() - start) * 1e3
        result.raise_for_error()
        further = None if text is None else token_ms(engine, request, text)
        return Answer(token=result.token_id, ms=ms, token_ms=further)

    return Way(ask=ask, kept=budget, prefill_ms=prefill_ms)


def token_ms(engine: Engine, request: Request, text: np.ndarray) -> float:
    """From the first to the last token of `text` int32 [N], mean of the N - 1 after the first."""
    forced = SamplingParams(max_tokens=len(text), forced_ids=tuple(text.tolist()))
    times = []
    stream = engine.generate(request, forced)
    for event in stream:
        if event.token_id is not None:
            times.append(time.perf_counter())
    [generation] = stream.results()
    generation.raise_for_error()
    if len(times) != len(text):
        raise RuntimeError(f"got {len(times)} tokens, expected {len(text)}")
    return (times[-1] - times[0]) * 1e3 / (len(times) - 1)
