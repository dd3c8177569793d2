"""Warm-up: compiles every shape of requests within given bounds, at once or in the background;
and hints, which load a prefix into memory before requests or evict it after."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Hashable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ckv_jax.answer import MAX_TOKENS
from ckv_jax.buckets import batch_bucket, bucket, chunk_bucket, suffix_bucket
from ckv_jax.config import Budget, SystemConfig, check_budget
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.errors import EngineClosed, check_whole
from ckv_jax.model.sampling import Logprobs, SamplingParams
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.prefix.memory import job_packs
from ckv_jax.prefix.open_prefix import probe_chunks
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.request import Request
from ckv_jax.selection.select import Stages
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import PrefixNotFound, StoreUnavailable
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

_log = logging.getLogger(__name__)
_MAX_PACKS_PER_READ = 128
"""Maximum packs that a prefetch reads between two tokens of running generations."""

_POLL_S = 0.02
"""Longest wait for a compilation between two tokens of running generations."""
_QUESTION = 64
"""Tokens of the longest question that is compiled for behind what is stored."""


class Warmups:
    """Compiles what questions over stored prefixes need, while the engine is idle. Thread-safe.

    Once for prefixes of about one length: at every budget, for answers of up to 256 tokens, one
    question first and then more at once, as far as the process has room for programs.
    """

    def __init__(self, worker: Worker, scheduler: Scheduler, placement: Placement) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._placement = placement
        config = placement.config
        self._max_batch = min(config.warm_batch, config.max_batch)
        self._budgets = None if worker.system.chunked else (config.budget, 1.0)
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, Future[Any]] = {}
        self._done: set[Hashable] = set()

    def stored(self, prefix: Prefix) -> None:
        """Has what a question over `prefix` needs compiled, if it is not yet; returns at once."""
        limit = self._worker.layers.config.max_position_embeddings
        suffix = min(_QUESTION, limit - prefix.num_tokens - 1)
        if not self._max_batch or suffix < 1 or not self._worker.system.own.generates:
            return
        tokens = min(MAX_TOKENS, limit - prefix.num_tokens - suffix)
        needs = tuple(_budgets(self._worker.system, prefix, self._budgets))
        chunks = probe_chunks(prefix.num_chunks, prefix.layout)
        key = (chunks, needs, suffix_bucket(suffix), rows_bucket(suffix + tokens))
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

    def run(
        self,
        prefix: Prefix,
        batches: tuple[int, int],
        suffixes: tuple[int, int],
        *,
        budgets: Several[float | str] | None,
        max_tokens: int,
    ) -> None:
        """See `Engine.warmup`; `batches` and `suffixes`: least and most."""
        for name, (least, most) in (("batch", batches), ("suffix", suffixes)):
            check_whole(f"min_{name}", least, least=1)
            check_whole(f"max_{name}", most, least=least)
        check_whole("max_tokens", max_tokens, least=0)
        self._placement.check_context(prefix.num_tokens, suffixes[1], max_tokens)
        if budgets is None and not self._worker.system.chunked:
            budgets = [self._placement.config.budget]
        steps = warm(
            self._worker,
            prefix,
            min_batch=min(batches[0], self._placement.config.max_batch),
            max_batch=min(batches[1], self._placement.config.max_batch),
            min_suffix=suffixes[0],
            max_suffix=suffixes[1],
            budgets=None if budgets is None else [check_budget(budget) for budget in budgets],
            max_tokens=max_tokens,
        )
        self._scheduler.add(Job(steps)).future.result()

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
            _log.warning("cannot compile the programs of questions", exc_info=error)


def warm(
    worker: Worker,
    prefix: Prefix,
    *,
    max_batch: int,
    max_suffix: int,
    budgets: Several[float | str] | None,
    max_tokens: int,
    min_batch: int = 1,
    min_suffix: int = 1,
    enough: Callable[[], bool] = lambda: False,
) -> Generator[None, None, None]:
    """Runs made-up requests over `prefix` in every combination of bucketed sizes, one per step,
    small ones first, until `enough`. `budgets`: None: all.

    They count as use of the prefix's most attended chunks, as any request does.
    """
    jobs = job_packs(prefix.layout)
    worker.memory.pool.warm(sorted({bucket(n) for n in range(1, jobs + 1)}), prefix.num_chunks)
    worker.landing.warm()
    needs = _budgets(worker.system, prefix, budgets)
    for batch in _powers(batch_bucket(min_batch), batch_bucket(max_batch)):
        rooms = set[int]()
        for suffix in _powers(suffix_bucket(min_suffix), suffix_bucket(max_suffix)):
            worker.executor.warm(np.zeros((batch, suffix), np.int32))
            # One less than the bucket: a longer one has larger buffers, which come after those.
            tokens = np.zeros(min(suffix - 1, max_suffix), np.int32)
            for place, (need, budget) in enumerate(needs.items()):
                if enough():
                    return
                asked = [_WarmupSequence(prefix, tokens, budget) for _ in range(batch)]
                yield from _first_tokens(worker, asked)
                yield
                compiling = worker.runtime.background
                while worker.runtime.resident.fuses and not compiling.settle(_POLL_S):
                    yield  # generations go on meanwhile
                if not max_tokens or not worker.system.own.generates:
                    continue
                room = need.room if isinstance(need, _Need) else need
                if place == 0 or room not in rooms:
                    yield from _generations(worker, prefix, tokens, budget, batch, max_tokens)
                if suffix == suffix_bucket(min_suffix) and worker.system.decode is not None:
                    yield from _selections(worker, prefix, tokens, budget, batch)
                rooms.add(room)


def _smallest(tokens: np.ndarray) -> int:
    return rows_bucket(max(suffix_bucket(len(tokens)), len(tokens) + 1))


def _generations(
    worker: Worker, prefix: Prefix, tokens: np.ndarray, budget: float | str, batch: int, most: int
) -> Generator[None, None, None]:
    """Generations at every size of the buffers, half of whose rows leave, then half of those, …

    The host brings packs in the first ones; the second ones find all on the device.
    """
    smallest = _smallest(tokens)
    leaving = [2 + (batch // (row + 1)).bit_length() for row in range(batch)]
    for size in _powers(smallest, max(smallest, rows_bucket(len(tokens) + most + 1))):
        for context in (nullcontext(), worker.decoding.compiling()):
            made = [_WarmupSequence(prefix, tokens, budget, new) for new in leaving]
            with context:
                yield from _generate(worker, made, size)


def _selections(
    worker: Worker, prefix: Prefix, tokens: np.ndarray, budget: float | str, batch: int
) -> Generator[None, None, None]:
    """Generations whose rows have one prefix, and that select as if not all of them had."""
    for apart in (0, *_apart(batch)):
        made = [
            _WarmupSequence(prefix, tokens, budget, 3, apart=row < apart) for row in range(batch)
        ]
        yield from _generate(worker, made, _smallest(tokens))


def _generate(worker: Worker, made: Several[Sequence], size: int) -> Generator[None, None, None]:
    yield from _first_tokens(worker, made)
    worker.decoding.warm(made, size, suffix_bucket(len(made[0].suffix)))
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
            for sequence in batch:
                sequence.recovered.append(needed.recovered)
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


class _Need(NamedTuple):
    """The properties of a budget that programs depend on."""

    room: int
    """Of a selection, see `chunk_bucket`."""
    exact: bool
    """Tokens select nothing: everything takes part."""
    stages: tuple[Stages | None, ...]


def _budgets(
    system: SystemConfig, prefix: Prefix, asked: Several[float | str] | None
) -> dict[_Need | int, float | str]:
    """One budget for each set of programs that those `asked` (None: all) can need over `prefix`.

    Of a system that selects tokens, those that are asked.
    """
    if not system.chunked:
        assert asked is not None
        return {Budget.of(one).chunks(prefix.num_tokens): one for one in asked}
    chunks = prefix.num_chunks
    kept = system.always.most(prefix.layout, prefix.num_tokens)
    coarse = [one.coarse for one in (system.reprefill, system.decode) if one and one.coarse]

    def need(limit: int) -> _Need:
        return _Need(
            chunk_bucket(limit, chunks),
            limit == chunks,
            tuple(one.stages(np.asarray([limit]), chunks) for one in coarse),
        )

    found: dict[_Need | int, float | str] = {}
    for one in ["mass:1"] if asked is None else asked:
        budget = Budget.of(one)
        most = min(chunks, budget.chunks(chunks) + kept)
        limit = most if budget.mass is None else min(most, budget.floor(chunks) + kept)
        while limit <= most:
            known = need(limit)
            found.setdefault(known, max(1, limit - kept) / chunks if limit < chunks else 1.0)
            limit = bisect_left(range(most + 1), True, limit, key=lambda n: need(n) != known)
    return found


def prefetch(worker: Worker, prefix: Prefix, budget: float | str) -> Generator[None, None, int]:
    """Reads a prefix's digest and its most attended packs, some a `yield`; how many are cached.

    They stay where they are worth more than what is cached already, as after any request. It ends
    early, and well, where running requests leave no room or the store cannot give a pack.
    """
    if not prefix.num_tokens:
        return 0
    trace = Trace()
    with ExitStack() as stack:
        opened, tiers = worker.prefixes.use(prefix), worker.memory.tiers
        stack.callback(opened.close)
        every = np.arange(opened.num_chunks)
        try:
            probes = worker.executor.probes(opened, trace, stack)
            for period in range(worker.plan.periods):
                yield
                probes.bring(period)
            for group in range(prefix.layout.groups):
                worth = tiers.worth(opened.pages(group, every))
                most = Budget.of(budget).chunks(len(every))
                best = np.argsort(-worth, kind="stable")[:most]
                for some in np.array_split(best, -(-most // _MAX_PACKS_PER_READ)):
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
    if not prefix.num_tokens:
        return 0
    opened = worker.prefixes.known(prefix)
    opened.digest = None
    return worker.memory.tiers.let_go(opened.all_pages())
