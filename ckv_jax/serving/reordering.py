"""A prefix in a new order takes over what the caches know and hold of it (IMPRESS §4.4)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

import numpy as np

from ckv_jax.cache.tiers import PoolExhausted
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace


def carried(worker: Worker, old: Prefix, new: Prefix) -> Generator[None, None, None]:
    """In every layer group as many packs of `new` come to memory as were there of `old`, those that
    are worth most by what was known of their tokens. A group a `yield`.

    Their bytes come from the store, as a chunk's tokens were in many chunks before. It ends early,
    and well, where running requests leave no room or the store cannot give something; what is not
    carried over is read when it is asked for.
    """
    tiers, trace = worker.memory.tiers, Trace()
    with ExitStack() as stack:
        try:
            before = worker.leases.open(old)
            stack.callback(before.close)
            order = worker.leases.order_of(new)
            worker.residents.carry_scores(before.resident, before.order, new, order)
            after = worker.leases.open(new)
            stack.callback(after.close)
            probes = worker.leases.probes(after, trace)
            stack.callback(probes.cancel)
            rows = 0 if before.resident.probe is None else worker.plan.periods
            every = np.arange(after.resident.num_chunks)
            for group in range(new.layout.groups):
                yield
                held = tiers.let_go(before.resident.pages(group, every))
                worth = tiers.worth(after.resident.pages(group, every))
                best = np.argsort(-worth, kind="stable")[:held]
                if held:
                    worker.make_way(held)
                    with worker.packs([after.source], trace) as packs:
                        packs.demand(0, group, best)
                        packs.collect(0, group, best)
            for row in range(rows):
                yield
                held = tiers.let_go(before.resident.probe_pages(row))
                if held:
                    probes.bring(row)
        except (PoolExhausted, RecoveryNeeded, StoreError):
            pass
    worker.residents.drop(old)
