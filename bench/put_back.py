"""Engines with one thing as it was before the rivals were mended (`bench.mended`), and no option.

The product has one way of doing each of these. What is here changes an engine that is open, or
being opened, by what its parts offer to anybody; it is for comparisons and nothing else.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

import ckv_jax.rivals.executor
from bench.lab import Lab
from ckv_jax import Engine
from ckv_jax.config import SystemConfig
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import FirstToken
from ckv_jax.reads.packs import Packs
from ckv_jax.rivals.layers import Choice, RivalLayers
from ckv_jax.trace import Trace

Memory = dict[str, int]


def probes_from_disk(lab: Lab, system: SystemConfig, memory: Memory) -> Engine:
    """Every request reads its probe keys from the SSD: what is cached of them leaves memory before
    it begins, and they count as worth nothing, so that they push no pack out."""
    engine = lab.engine(system, memory=memory)
    worker = engine.worker
    worker.residents.record_probe = lambda *_: None  # type: ignore[method-assign]
    worker.executor = _ProbesLeave(worker.executor, worker.memory.tiers)  # type: ignore[assignment]
    return engine


def keys_speculated(lab: Lab, system: SystemConfig, memory: Memory) -> Engine:
    """H2O's keys of layers ahead are speculation: after everything that is demanded, and not by the
    last of the reader's threads."""
    engine = lab.engine(system, memory=memory)
    worker = engine.worker
    worker.executor = _Speculates(worker.executor)  # type: ignore[assignment]
    return engine


def all_rows_fall_back(lab: Lab, system: SystemConfig, memory: Memory) -> Engine:
    """Where one question of a batch falls back, all of them do."""
    with mock.patch.object(ckv_jax.rivals.executor, "RivalLayers", _NoRowAgrees):
        return lab.engine(system, memory=memory)


class _Wrapped:
    """An executor that something is done before."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        first: FirstToken = self.inner.run(batch, packs, trace, hold=hold)
        return first


class _ProbesLeave(_Wrapped):
    def __init__(self, inner: Any, tiers: Any) -> None:
        super().__init__(inner)
        self._tiers = tiers

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        for member in batch.members:
            for row in range(len(member.resident.prefix.layout.probe_layers)):
                self._tiers.let_go(member.resident.probe_pages(row))
        return super().run(batch, packs, trace, hold=hold)


class _Speculates(_Wrapped):
    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        return super().run(batch, _Unsure(packs), trace, hold=hold)  # type: ignore[arg-type]


class _Unsure:
    """Packs of which none that is read ahead is sure to be demanded."""

    def __init__(self, packs: Packs) -> None:
        self._packs = packs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packs, name)

    def ahead(self, which: int, group: int, chunks: np.ndarray, *, sure: bool = False) -> None:
        self._packs.ahead(which, group, chunks, sure=False)


class _NoRowAgrees(RivalLayers):
    def choose_by_heads(self, *args: Any, n: int) -> Choice:
        *given, agreed = args
        return super().choose_by_heads(*given, np.zeros_like(agreed), n=n)
