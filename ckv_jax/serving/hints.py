"""Hints: what of a prefix is brought to memory before anybody asks, or let go after."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

import numpy as np

from ckv_jax.budget import Budget
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

_AT_ONCE = 128
"""Packs that are read between two tokens of others at most."""


def brought(worker: Worker, prefix: Prefix, budget: float | str) -> Generator[None, None, int]:
    """Reads a prefix's digest and its most attended packs, a part a `yield`; how many are cached.

    They stay where they are worth more than what is cached already, as after any request. It ends
    early, and well, where running requests leave no room or the store cannot give a pack.
    """
    trace = Trace()
    with ExitStack() as stack:
        opened, tiers = worker.prefixes.use(prefix), worker.memory.tiers
        stack.callback(opened.close)
        every = np.arange(opened.num_chunks)
        try:
            probes = worker.executor.probes(opened, trace)
            stack.callback(probes.cancel)
            for period in range(worker.plan.periods):
                yield
                probes.bring(period)
            for group in range(prefix.layout.groups):
                worth = tiers.worth(opened.pages(group, every))
                most = Budget.of(budget).chunks(len(every))
                best = np.argsort(-worth, kind="stable")[:most]
                for part in np.array_split(best, -(-most // _AT_ONCE)):
                    yield
                    worker.make_way(len(part))
                    with worker.packs([opened], trace) as packs:
                        packs.demand(0, group, part)
                        packs.collect(0, group, part)
        except (PoolExhausted, RecoveryNeeded):
            pass
        device, host = tiers.lookup(opened.all_pages())
        return int(((device >= 0) | (host >= 0)).sum())


def let_go(worker: Worker, prefix: Prefix) -> Generator[None, None, int]:
    """Takes a prefix's packs and digest out of memory, as far as nobody uses them; how many packs.

    What they are worth is kept, and persisted as ever.
    """
    yield
    opened = worker.prefixes.known(prefix)
    opened.digest = None
    return worker.memory.tiers.let_go(opened.all_pages())
