"""Warm-up: compiles every shape that requests within given bounds can take, at once or behind what
is stored; and hints, which bring a prefix to memory before requests come or let it go after."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Hashable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any

import numpy as np

from ckv_jax.answer import MAX_TOKENS
from ckv_jax.buckets import batch_bucket, bucket, chunk_bucket, selection_bucket, suffix_bucket
from ckv_jax.config import Budget, EngineConfig
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.errors import EngineClosed
from ckv_jax.model.sampling import Logprobs, SamplingParams
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.prefix.memory import job_packs
from ckv_jax.prefix.open_prefix import probe_chunks
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.request import Request
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import PrefixNotFound, StoreUnavailable
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

_log = logging.getLogger(__name__)
_AT_ONCE = 128
"""Packs that are read between two tokens of others at most."""

_QUESTION = 64
"""Tokens of the longest question that is compiled for behind what is stored."""


class Warmups:
    """Compiles what questions over stored prefixes need, while the engine is idle. Thread-safe.

    Once for prefixes of about one length: at the engine's budget, exactly, and at those of `cover`,
    for answers of up to 256 tokens, one question first and then more at once, as far as the process
    has room for programs.
    """

    def __init__(self, worker: Worker, scheduler: Scheduler, config: EngineConfig) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._max_batch = min(config.warm_batch, config.max_batch)
        self._budgets: tuple[float | str, ...] = ()
        self.cover(config.budget, 1.0)
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, Future[Any]] = {}
        self._done: set[Hashable] = set()

    def cover(self, *budgets: float | str) -> None:
        """What is stored from now on is warmed up for these budgets, too."""
        self._budgets = tuple(dict.fromkeys((*self._budgets, *budgets)))

    def stored(self, prefix: Prefix) -> None:
        """Has what a question over `prefix` needs compiled, if it is not yet; returns at once."""
        limit = self._worker.layers.config.max_position_embeddings
        suffix = min(_QUESTION, limit - prefix.num_tokens - 1)
        if not self._max_batch or suffix < 1 or not self._worker.system.own.generates:
            return
        tokens = min(MAX_TOKENS, limit - prefix.num_tokens - suffix)
        key = (self._shape(prefix), suffix_bucket(suffix), rows_bucket(suffix + tokens))
        steps = warm(
            self._worker, prefix, max_batch=self._max_batch, max_suffix=suffix,
            budgets=self._budgets, max_tokens=tokens,
            enough=lambda: self._worker.layers.programs.full,
        )  # fmt: skip
        job = Job(self._while_stored(prefix, steps), background=True)
        with self._lock:
            if key in self._done or key in self._under_way:
                return
            self._under_way[key] = job.future
        job.future.add_done_callback(lambda future: self._end(key, future))
        try:
            self._scheduler.add(job)
        except EngineClosed as error:  # what is stored stays
            job.end(error)

    def settle(self) -> None:
        """Returns once all that was asked for is compiled, or cannot be."""
        with self._lock:
            under_way = list(self._under_way.values())
        wait(under_way)

    def _while_stored(
        self, prefix: Prefix, steps: Generator[None, None, None]
    ) -> Generator[None, None, None]:
        """`steps`, which warm no reads of a prefix that goes meanwhile: then `PrefixNotFound`."""
        self._worker.store.prefix(prefix.id, salt=prefix.salt)
        yield from steps
        self._worker.store.prefix(prefix.id, salt=prefix.salt)

    def _end(self, key: Hashable, future: Future[Any]) -> None:
        with self._lock:
            del self._under_way[key]
            error = None if future.cancelled() else future.exception()
            if error is None and not future.cancelled():
                self._done.add(key)
        if error is not None and not isinstance(
            error, EngineClosed | PrefixNotFound | StoreUnavailable
        ):
            _log.warning("what questions need could not be compiled", exc_info=error)

    def _shape(self, prefix: Prefix) -> Hashable:
        """What programs over a prefix depend on: its size, and how many chunks are selected."""
        system, chunks = self._worker.system, prefix.num_chunks
        always = system.always.most(prefix.layout, prefix.num_tokens)
        coarse = [one.coarse for one in (system.reprefill, system.decode) if one and one.coarse]
        shape: list[Hashable] = [probe_chunks(prefix.num_chunks, prefix.layout)]
        for budget in self._budgets:
            limit = min(chunks, Budget.of(budget).chunks(chunks) + always)
            stages = [one.stages(np.asarray([limit]), chunks) for one in coarse]
            shape.append((chunk_bucket(limit), selection_bucket(limit), *stages))
        return tuple(shape)


def warm(
    worker: Worker,
    prefix: Prefix,
    *,
    max_batch: int,
    max_suffix: int,
    budgets: Several[float | str],
    max_tokens: int,
    enough: Callable[[], bool] = lambda: False,
) -> Generator[None, None, None]:
    """Runs made-up requests over `prefix` in every combination of bucketed sizes, one per step,
    small ones first, until `enough`.

    They count as use of the prefix's most attended chunks, as any request does.
    """
    jobs = job_packs(prefix.layout)
    worker.memory.pool.warm(sorted({bucket(n) for n in range(1, jobs + 1)}), prefix.num_chunks)
    worker.landing.warm()
    units = prefix.num_chunks if worker.system.chunked else prefix.num_tokens
    for batch in _powers(1, batch_bucket(max_batch)):
        for suffix in _powers(suffix_bucket(1), suffix_bucket(max_suffix)):
            worker.executor.warm(np.zeros((batch, suffix), np.int32))
            # One less than the bucket: a longer one has larger buffers, which come after those.
            tokens = np.zeros(min(suffix - 1, max_suffix), np.int32)
            for budget in _distinct(budgets, units):
                if enough():
                    return
                asked = [_WarmupSequence(prefix, tokens, budget) for _ in range(batch)]
                yield from _first_tokens(worker, asked)
                yield
                if max_tokens and worker.system.own.generates:
                    yield from _warm_generations(worker, prefix, tokens, budget, batch, max_tokens)


def _warm_generations(
    worker: Worker, prefix: Prefix, tokens: np.ndarray, budget: float | str, batch: int, most: int
) -> Generator[None, None, None]:
    """Generations at every size of the buffers, half of whose rows leave, then half of those, …

    At the smallest size they select once more as if not all of them had one prefix.
    """
    smallest = rows_bucket(max(suffix_bucket(len(tokens)), len(tokens) + 1))
    leaving = [2 + (batch // (row + 1)).bit_length() for row in range(batch)]
    for size in _powers(smallest, max(smallest, rows_bucket(len(tokens) + most + 1))):
        made = [_WarmupSequence(prefix, tokens, budget, new) for new in leaving]
        yield from _generate(worker, made, size)
    for apart in _apart(batch) if worker.system.decode is not None else ():
        made = [
            _WarmupSequence(prefix, tokens, budget, 3, apart=row < apart) for row in range(batch)
        ]
        yield from _generate(worker, made, smallest)


def _generate(worker: Worker, made: Several[Sequence], size: int) -> Generator[None, None, None]:
    yield from _first_tokens(worker, made)
    worker.warm(made, size, suffix_bucket(len(made[0].suffix)))
    while not all(one.done() for one in made):
        yield  # the scheduler steps them, with all others


def _apart(batch: int) -> list[int]:
    """How many rows of a batch have prefixes of their own while the rest share one, so that each
    number of each kind is met, both up to a power of two."""
    alone = [1 << power for power in range(batch.bit_length())]
    together = [batch - (1 << power) for power in range(1, batch.bit_length() - 1)]
    return sorted({apart for apart in (*alone, *together) if batch - apart != 1 < batch})


def _first_tokens(worker: Worker, batch: Several[Sequence]) -> Generator[None, None, None]:
    """As the scheduler does it: what the store cannot give is computed again, then tried again."""
    while True:
        try:
            return worker.first_tokens(batch)
        except RecoveryNeeded as needed:
            yield from recover(needed)


class _WarmupSequence(Sequence):
    """A request of warm-up's own; with `new`, a generation of so many tokens, whatever they are."""

    def __init__(
        self, prefix: Prefix, suffix: np.ndarray, budget: float | str, new: int = 0, *,
        apart: bool = False,
    ) -> None:  # fmt: skip
        sampling = SamplingParams(max_tokens=new) if new else None
        super().__init__(
            Request(prefix=prefix, suffix=[0]),
            sampling=sampling,
            keep_kv=new > 0,
        )
        self.apart = apart
        self.place(prefix, suffix, budget)

    def push(self, token: int, logprobs: Logprobs | None = None) -> None:
        """No token ends it early."""
        super().push(token, logprobs)
        assert self.sampling is not None
        if self.reason == "stop" and len(self.token_ids) < self.sampling.max_tokens:
            self.reason = None


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _distinct(budgets: Several[float | str], units: int) -> list[float | str]:
    """One budget for each number of chunks (or tokens) that they select, or may."""
    found: dict[object, float | str] = {}
    for budget in budgets:
        parsed = Budget.of(budget)
        most = parsed.chunks(units)
        if parsed.mass is None:
            found[most] = budget
            continue
        found[most, "mass"] = budget
        for count in range(parsed.floor(units), most + 1):
            bucketed = min(chunk_bucket(count), most)
            found.setdefault(bucketed, bucketed / units)
    return list(found.values())


def prefetch(worker: Worker, prefix: Prefix, budget: float | str) -> Generator[None, None, int]:
    """Reads a prefix's digest and its most attended packs, some a `yield`; how many are cached.

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
                for some in np.array_split(best, -(-most // _AT_ONCE)):
                    yield
                    worker.make_way(len(some))
                    with worker.packs([opened], trace) as packs:
                        packs.demand(0, group, some)
                        packs.collect(0, group, some)
        except (PoolExhausted, RecoveryNeeded):
            pass
        device, host = tiers.lookup(opened.all_pages())
        return int(((device >= 0) | (host >= 0)).sum())


def demote(worker: Worker, prefix: Prefix) -> Generator[None, None, int]:
    """Takes a prefix's packs and digest out of memory, as far as they are not in use; how many
    packs.

    What they are worth is kept, and persisted as ever.
    """
    yield
    opened = worker.prefixes.known(prefix)
    opened.digest = None
    return worker.memory.tiers.let_go(opened.all_pages())
