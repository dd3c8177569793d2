"""Warm-up: compiles every shape that requests within given bounds can take."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Several

import numpy as np

from ckv_jax.buckets import batch_bucket, bucket, chunk_bucket, suffix_bucket
from ckv_jax.budget import Budget
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.model.sampling import Logprobs, SamplingParams
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.prefix.memory import job_packs
from ckv_jax.request import Request
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.prefix import Prefix


def warm(
    worker: Worker,
    prefix: Prefix,
    *,
    max_batch: int,
    max_suffix: int,
    budgets: Several[float | str],
    max_tokens: int,
) -> Generator[None, None, None]:
    """Runs made-up requests over `prefix` in every combination of bucketed sizes, one per step.

    They count as use of the prefix's most attended chunks, as any request does.
    """
    jobs = job_packs(prefix.layout)
    worker.memory.pool.warm(sorted({bucket(n) for n in range(1, jobs + 1)}), prefix.num_chunks)
    worker.landing.warm()
    units = prefix.num_chunks if worker.system.chunked else prefix.num_tokens
    for batch in _powers(1, batch_bucket(max_batch)):
        for suffix in _powers(suffix_bucket(1), suffix_bucket(max_suffix)):
            worker.executor.warm(np.zeros((batch, suffix), np.int32))
            tokens = np.zeros(min(suffix, max_suffix), np.int32)
            for budget in _distinct(budgets, units):
                asked = [_MadeUp(prefix, tokens, budget) for _ in range(batch)]
                yield from _first_tokens(worker, asked)
                yield
                if max_tokens and worker.system.own.generates:
                    yield from _warm_texts(worker, prefix, tokens, budget, batch, max_tokens)


def _warm_texts(
    worker: Worker, prefix: Prefix, tokens: np.ndarray, budget: float | str, batch: int, most: int
) -> Generator[None, None, None]:
    """Texts at every size of the buffers, half of whose rows leave, then half of those, …

    At the smallest size they choose once more as if not all of them stood on one prefix.
    """
    smallest = rows_bucket(max(suffix_bucket(len(tokens)), len(tokens) + 1))
    leaving = [2 + (batch // (row + 1)).bit_length() for row in range(batch)]
    for size in _powers(smallest, max(smallest, rows_bucket(len(tokens) + most + 1))):
        texts = [_MadeUp(prefix, tokens, budget, new) for new in leaving]
        yield from _text(worker, texts, size)
    for apart in _apart(batch) if worker.system.decode is not None else ():
        texts = [_MadeUp(prefix, tokens, budget, 3, apart=row < apart) for row in range(batch)]
        yield from _text(worker, texts, smallest)


def _text(worker: Worker, texts: Several[Sequence], size: int) -> Generator[None, None, None]:
    yield from _first_tokens(worker, texts)
    worker.warm(texts, size, suffix_bucket(len(texts[0].suffix)))
    while not all(text.done() for text in texts):
        yield  # the scheduler steps them, with everybody else


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


class _MadeUp(Sequence):
    """A request of warm-up's own; with `new`, a text of so many tokens, whatever they are."""

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
        """No token ends it."""
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
