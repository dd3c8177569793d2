"""Warm-up: compiles every shape that requests within given bounds can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ckv_jax.model.sampling import SamplingParams, sample, stack_params
from ckv_jax.pipeline.buckets import batch_bucket, suffix_bucket
from ckv_jax.pipeline.executor import selected_chunks
from ckv_jax.pipeline.kv_rows import rows_bucket
from ckv_jax.request import Placed, Request
from ckv_jax.serving.parts import Parts
from ckv_jax.serving.session import SparseSession
from ckv_jax.storage.prefix import Prefix


def warm(
    parts: Parts,
    prefix: Prefix,
    *,
    max_batch: int,
    max_suffix: int,
    budgets: Sequence[float],
    max_tokens: int,
) -> None:
    """Runs made-up requests over `prefix` in every combination of bucketed sizes.

    They count as use of the prefix's most attended chunks, as any request does.
    """
    parts.memory.warm(prefix.num_chunks)
    units = prefix.num_chunks if parts.system.chunked else prefix.num_tokens
    for batch in _powers(1, batch_bucket(max_batch)):
        for suffix in _powers(suffix_bucket(1), suffix_bucket(max_suffix)):
            for budget in _distinct(budgets, units):
                request = Request(prefix=prefix, suffix=[0])
                tokens = np.zeros(min(suffix, max_suffix), np.int32)
                placed = Placed(request=request, prefix=prefix, suffix=tokens, budget=budget)
                with (
                    parts.pace.always(),
                    SparseSession(parts, [placed] * batch, hold=max_tokens > 0) as session,
                ):
                    if max_tokens:
                        _warm_decode(session, len(tokens) + max_tokens)


def _warm_decode(session: SparseSession, tokens: int) -> None:
    """Steps at every size of the buffers, and what it takes to shrink the batch."""
    decoder = session.decoder()
    batch = decoder.batch
    params = stack_params([SamplingParams()] * batch)
    steps = np.zeros(batch, np.int32)
    first = np.zeros((batch, session.logits.shape[1]), np.float32)
    sample(first, params, steps).block_until_ready()
    for size in _powers(decoder.rows, rows_bucket(tokens + 1)):
        decoder.reserve(size)
        for reselect in (False, True):
            logits = decoder.step(steps, np.zeros(batch, bool), reselect=reselect)
        sample(logits, params, steps).block_until_ready()
        decoder.kv(0, decoder.start)
        for smaller in _powers(1, batch // 2):
            decoder.thinned(np.zeros(smaller, np.int32))
    for smaller in _powers(1, batch // 2):
        again = session.decoder()
        again.step(steps, np.zeros(batch, bool))
        again.keep(np.zeros(smaller, np.int32))


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _distinct(budgets: Sequence[float], units: int) -> list[float]:
    """One budget for each number of chunks (or tokens) that they select."""
    return list({selected_chunks(budget, units): budget for budget in budgets}.values())
