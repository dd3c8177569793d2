"""Dense prefills as jobs: a prompt that is not stored, and KV that the store has lost."""

from __future__ import annotations

from collections.abc import Callable, Generator

import jax.numpy as jnp
import numpy as np

from ckv_jax.model.sampling import Logprobs, rank
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.prefill import Prefills
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.serving.job import Job
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.sequence_job import given_up, sequence_job
from ckv_jax.trace import Trace

_SCORED = 16
"""Tokens whose logits [V] are on the device at once."""
Done = Callable[[Sequence, np.ndarray, int, LayerKv, Trace], None]
"""(sequence, logits float32 [1, V], their argmax, each layer's (K, V), trace)."""


def dense_job(sequence: Sequence, prefills: Prefills, num_bytes: int, done: Done) -> Job:
    """Computes all tokens of a sequence, whose KV stays on the device; `done` gets what came out.

    What goes wrong is the sequence's own outcome.
    """
    return sequence_job(sequence, _dense(sequence, prefills, done), num_bytes)


def _dense(sequence: Sequence, prefills: Prefills, done: Done) -> Generator[None, None, None]:
    if given_up(sequence):
        return
    sequence.begin()
    trace = Trace()
    prefill = prefills.begin(sequence.tokens, bounded=False)
    while True:
        with trace.span("compute", lane="compute"):
            block = prefill.advance()
            block.hidden.block_until_ready()
        if prefill.done:
            break
        yield
        if given_up(sequence):
            return
    with trace.span("compute", lane="compute"):
        last = np.array([block.length - 1], np.int32)
        found = prefills.layers.head(block.hidden, last)
        logits, token = np.asarray(found[0]), np.asarray(found[1])
    trace.end()
    done(sequence, logits, int(token[0]), prefill.kv, trace)


def score_job(tokens: np.ndarray, prefills: Prefills, num_bytes: int, top: int) -> Job:
    """The log probability of each token of int32 [n] but the first, after those before it, with
    the `top` likeliest: a list of n - 1 `Logprobs`. Nothing is read from a store."""
    return Job(_score(tokens, prefills, top), num_bytes=num_bytes)


def _score(
    tokens: np.ndarray, prefills: Prefills, top: int
) -> Generator[None, None, list[Logprobs]]:
    found: list[Logprobs] = []
    prefill = prefills.begin(tokens, bounded=False)
    while True:
        block = prefill.advance()
        follow = tokens[block.first + 1 : block.first + block.length + 1]
        for at in range(0, len(follow), _SCORED):
            some = np.zeros(_SCORED, np.int32)
            count = min(_SCORED, len(follow) - at)
            some[:count] = follow[at : at + count]
            hidden = jnp.swapaxes(block.hidden[:, at : at + _SCORED], 0, 1)  # [n, 1, E]
            hidden = jnp.pad(hidden, ((0, _SCORED - len(hidden)), (0, 0), (0, 0)))
            logits = prefills.layers.head(hidden, np.zeros(_SCORED, np.int32))[0]
            values, ids, best = map(np.asarray, rank(logits, some, count=top))
            for row in range(count):
                likeliest = zip(ids[row].tolist(), best[row].tolist(), strict=True)
                found.append(Logprobs(token=float(values[row]), top=tuple(likeliest)))
        if prefill.done:
            return found
        yield


def recovery_job(needed: RecoveryNeeded, num_bytes: int) -> Job:
    """The same as a job of its own, for all who wait for it."""
    return Job(recover(needed), num_bytes=num_bytes)
