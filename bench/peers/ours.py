"""This engine: a share of the stored KV, read from the SSD for every question."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.peers.base import Answer, Case, Held, Holder, Way
from bench.versus_transformers import our_engine
from ckv_jax import Engine, Request
from ckv_jax.storage.prefix import Prefix


class Ours:
    """A peer among the others."""

    packages = ()
    install = ""

    def __init__(self, system: str, budgets: Sequence[float]) -> None:
        self._system, self._budgets = system, budgets

    @contextmanager
    def open(self, case: Case, work: Path) -> Iterator[Holder]:
        """An engine without any cache of KV, over a store in `work`."""
        with our_engine(case.folder, work / f"store-{case.name}", self._system) as engine:

            def hold(tokens: np.ndarray) -> Held:
                prefix = engine.ingest(tokens)
                engine.warmup(prefix, max_suffix=case.longest, budgets=self._budgets)
                return {
                    f"{budget:.0%} of the KV from the SSD": _way(engine, prefix, budget)
                    for budget in self._budgets
                }

            yield hold


def _way(engine: Engine, prefix: Prefix, budget: float) -> Way:
    def ask(suffix: np.ndarray) -> Answer:
        request = Request(prefix=prefix, suffix=suffix.tolist(), budget=budget)
        start = time.perf_counter()
        [result] = engine.reprefill([request])
        ms = (time.perf_counter() - start) * 1e3
        result.raise_for_error()
        return Answer(token=result.token_id, ms=ms)

    return Way(ask=ask, kept=budget)
