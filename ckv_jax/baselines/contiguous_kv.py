"""ContiguousKV, as its paper describes it (`contiguous-kv`).

- §4.2, chunks: 16 tokens are the unit of selection, reading, caching and eviction. A pack holds
  keys and values of four layers together.
- §4.3.1, selection: the first layer of a period of 8 selects for all of it by its own keys, which
  are in an array of their own and are read before.
- §4.3.2 and §4.5, prefetch: within a period subperiod by subperiod (of 4 layers); across periods
  what the period before selected is read ahead, then the difference. Demands go first.
- §4.4, Equation 1: attention of all tokens of the question, summed by chunk. The softmax goes over
  the prefix alone, not over prefix and suffix.
- §4.4, Equation 2: a chunk is worth the attention it received while selected, times the number of
  its uses; two heaps, no pack in both tiers.

The paper generates no text. Here a generation goes on with what the re-prefill selected.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ckv_jax.baselines.probe_keys import KeyProbes, PagedKeys
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.pipeline.batch import Member
from ckv_jax.pipeline.executor import Executor
from ckv_jax.pipeline.layers import Scorer
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import Selection
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.layout import Layout
from ckv_jax.trace import Trace


class KeysBefore(Executor):
    """The core's schedule; keys of the next period's first layer are read while one computes."""

    looks_up = False  # a period's keys are read before it selects

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.runtime)
        self._keys = PagedKeys(worker)

    def probes(self, opened: OpenPrefix, trace: Trace, stack: ExitStack) -> KeyProbes:
        """The keys of each period's first layer."""
        return self._keys.of(opened, trace, stack)

    def _begin(self, member: Member) -> None:
        _keys(member).ahead(0)

    def _selected(self, member: Member, period: int, selection: Selection) -> None:
        scores = np.asarray(selection.scores)
        _keys(member).used(period, scores[member.lengths > 0].sum(axis=0))
        _keys(member).ahead(period + 1)  # behind the packs, which are needed sooner

    def _scorer(self, member: Member, period: int) -> Scorer:
        layers = self._plan.by_period[period].scoring[:1]
        return self._layers.scorer(layers, member.probes.get(layers, period))


def _keys(member: Member) -> KeyProbes:
    assert isinstance(member.probes, KeyProbes)
    return member.probes


def with_keys(layout: Layout, num_heads: int) -> Layout:
    """All keys of the first layer of every pack in an array of their own."""
    return replace(layout, probe="keys")


CONTIGUOUS_KV = SystemConfig(
    name="contiguous-kv",
    period=8,
    subperiod=4,
    pack_layers=4,
    digest="none",
    prefetch="previous",
    policy="attention",
    own=OwnParts(layout=with_keys, executor=KeysBefore),
)
