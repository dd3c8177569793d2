"""Jobs: long work that the engine thread does block by block, between tokens of others."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, closing, suppress
from typing import Any

import jax.numpy as jnp
import numpy as np

from ckv_jax.documents.blending import BlendedRequest, Prefilled
from ckv_jax.documents.loading import DocumentLoader, JoinedDocuments, OpenDocuments
from ckv_jax.model.sampling import Logprobs, rank
from ckv_jax.pipeline.prefill import Prefills
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.serving.sequence import Sequence
from ckv_jax.trace import Trace

_SCORED = 16
"""Tokens whose logits [V] are on the device at once."""


class Job:
    """A prefill, an ingest, a recovery, a warm-up: a generator, one block of work a `yield`.

    What the generator returns is the result of `future`, what it raises its exception.

    Args:
        num_bytes: device bytes that it holds while it is in progress.
        ready: whether it could go on now; if not, what it waits for wakes the scheduler.
        background: it advances only while the engine has nothing else to do.
        sequence: the one that it answers, if any.
    """

    def __init__(
        self,
        steps: Generator[None, None, Any],
        *,
        num_bytes: int = 0,
        ready: Callable[[], bool] = lambda: True,
        background: bool = False,
        sequence: Sequence | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self.background = background
        self.sequence = sequence
        self._ready = ready
        self.future: Future[Any] = Future()
        self._steps = steps
        self._cancelled = False

    def cancel(self) -> None:
        """Its outcome is not wanted any more: it ends before its next block. Any thread."""
        self._cancelled = True

    def ready(self) -> bool:
        """Whether `advance` could do something now."""
        return self._cancelled or self._ready()

    def advance(self, leave: Callable[[], None]) -> None:
        """One block, in the engine thread.

        `leave` is called once nothing is left to do, before the outcome is set: a thread that waits
        for it finds the job gone.
        """
        if self._cancelled:
            self._steps.close()  # may raise: the job is then still among those that `end` ends
            leave()
            self.end(None)
            return
        try:
            next(self._steps)
        except StopIteration as end:
            leave()
            with suppress(InvalidStateError):
                self.future.set_result(end.value)
        except Exception as error:  # raised in the thread that waits for the job
            leave()
            self.fail(error)

    def end(self, error: BaseException | None) -> None:
        """Ends it early: with `error`, or as cancelled. Raises what its steps raise as they end."""
        try:
            self._steps.close()
        finally:  # threads that wait get an outcome all the same
            if error is not None:
                self.fail(error)
            elif self.future.cancel():  # unless there is an outcome
                self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Threads that wait for it get `error`, unless there is an outcome."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


def sequence_job(sequence: Sequence, steps: Generator[None, None, Any], num_bytes: int) -> Job:
    """A job whose errors are the sequence's, which lapses between its steps; one that is answered
    settles once the job has left."""

    def checked() -> Generator[None, None, None]:
        with closing(steps):
            while (lapsed := sequence.lapsed()) is None:
                if next(steps, steps) is steps:
                    return
                yield
            raise lapsed

    job = Job(checked(), num_bytes=num_bytes, sequence=sequence)

    def ended(_: object) -> None:
        error = None if job.future.cancelled() else job.future.exception()
        if error is not None:
            sequence.end(error)
        elif sequence.done():
            sequence.settle()

    job.future.add_done_callback(ended)
    return job


class PrefillJobs:
    """Jobs of sequences that share no batch until their first token. Any thread may make them; the
    engine thread runs their steps.

    An error is the sequence's own outcome; `done` gets what was computed.
    """

    def __init__(
        self,
        prefills: Prefills,
        loader: DocumentLoader,
        *,
        done: Callable[[Sequence, Prefilled], None],
    ) -> None:
        self._prefills = prefills
        self._loader = loader
        self._runtime = loader.runtime
        self._done = done

    def dense(self, sequence: Sequence) -> Job:
        """A dense prefill of all tokens of a sequence, whose KV stays on the device."""
        size = len(sequence.tokens) * self._runtime.layout.token_bytes
        return sequence_job(sequence, self._dense(sequence), size)

    def _dense(self, sequence: Sequence) -> Generator[None, None, None]:
        sequence.begin()
        trace = Trace()
        prefill = self._prefills.begin(sequence.tokens, bounded=False)
        while True:
            with trace.span("compute", lane="compute"):
                block = prefill.advance()
                block.hidden.block_until_ready()
            if prefill.done:
                break
            yield
        with trace.span("compute", lane="compute"):
            last = np.array([block.length - 1], np.int32)
            logits, token = map(np.asarray, self._prefills.layers.head(block.hidden, last)[:2])
        trace.end()
        steps = self._runtime.plan.steps
        kv = [tuple(prefill.kv[layer] for layer in step.layers) for step in steps]
        rows = len(sequence.tokens)
        self._done(sequence, Prefilled(logits, int(token[0]), kv, rows, 0, trace))

    def score(self, tokens: np.ndarray, top: int) -> Job:
        """The log probability of each token of int32 [n] but the first, after those before it, with
        the `top` likeliest: a list of n - 1 `Logprobs`. Nothing is read from a store."""
        size = len(tokens) * self._runtime.layout.token_bytes
        return Job(self._score(tokens, top), num_bytes=size)

    def _score(self, tokens: np.ndarray, top: int) -> Generator[None, None, list[Logprobs]]:
        found: list[Logprobs] = []
        prefill = self._prefills.begin(tokens, bounded=False)
        while True:
            block = prefill.advance()
            follow = tokens[block.first + 1 : block.first + block.length + 1]
            for at in range(0, len(follow), _SCORED):
                some = np.zeros(_SCORED, np.int32)
                count = min(_SCORED, len(follow) - at)
                some[:count] = follow[at : at + count]
                hidden = jnp.swapaxes(block.hidden[:, at : at + _SCORED], 0, 1)  # [n, 1, E]
                hidden = jnp.pad(hidden, ((0, _SCORED - len(hidden)), (0, 0), (0, 0)))
                logits = self._prefills.layers.head(hidden, np.zeros(_SCORED, np.int32))[0]
                values, ids, best = map(np.asarray, rank(logits, some, count=top))
                for row in range(count):
                    likeliest = zip(ids[row].tolist(), best[row].tolist(), strict=True)
                    found.append(Logprobs(token=float(values[row]), top=tuple(likeliest)))
            if prefill.done:
                return found
            yield

    def over_documents(self, sequence: Sequence) -> Job:
        """A sequence over several stored documents.

        It holds at most what is attended to, chunks around those that are computed again, and the
        suffix.
        """
        documents = sequence.documents
        share = sequence.parsed_budget.most * (1 + 2 * sequence.request.blend.recompute)
        rows = round(min(1.0, share) * sum(document.num_tokens for document in documents))
        size = (rows + len(sequence.suffix)) * self._runtime.layout.token_bytes
        return sequence_job(sequence, self._over_documents(sequence), size)

    def _over_documents(self, sequence: Sequence) -> Generator[None, None, None]:
        sequence.begin()
        trace, programs = Trace(), self._runtime.layers.programs
        with ExitStack() as stack:
            opened = yield from self._open(sequence, stack, trace)
            steps = BlendedRequest(
                self._loader, opened, sequence.suffix, sequence.parsed_budget,
                sequence.request.blend, trace, keep=sequence.sampling is not None,
                block=self._prefills.block,
            ).answer()  # fmt: skip
            while True:
                made = programs.made
                try:
                    next(steps)
                except StopIteration as end:
                    found: Prefilled = end.value
                    break
                finally:
                    trace.count("compiled", programs.made - made)
                yield
        self._done(sequence, found)

    def _open(
        self, sequence: Sequence, stack: ExitStack, trace: Trace
    ) -> Generator[None, None, OpenDocuments]:
        known, documents = self._runtime.prefixes, sequence.documents
        with trace.span("open", lane="host"):
            prefixes, which = known.use_all(documents, OpenPrefixes.use, stack)
        probes: list[Digest] = []
        while len(probes) < len(prefixes):
            try:
                probes.append(known.probes(prefixes[len(probes)], trace))
            except RecoveryNeeded as needed:
                sequence.recovered.append(needed.recovered)
                yield from recover(needed)
        return OpenDocuments(
            joined=JoinedDocuments.of(documents),
            which=tuple(which),
            prefixes=prefixes,
            probes=probes,
        )
