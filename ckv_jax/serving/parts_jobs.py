"""Sequences over several stored prefixes put together: each is a job by itself."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack

from ckv_jax.budget import Budget
from ckv_jax.parts.blending import Blended, Blending
from ckv_jax.parts.joined import Joined
from ckv_jax.parts.loading import Opened
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.serving.job import Job
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.sequence_job import given_up, sequence_job
from ckv_jax.trace import Trace

Done = Callable[[Sequence, Blended], None]


class PartsJobs:
    """Makes such jobs for one engine. Engine thread only."""

    def __init__(
        self, blending: Blending, prefixes: OpenPrefixes, *, token_bytes: int, done: Done
    ) -> None:
        """`token_bytes`: keys and values of one token; `done` gets what came out."""
        self._blending = blending
        self._prefixes = prefixes
        self._token_bytes = token_bytes
        self._done = done

    def job(self, sequence: Sequence) -> Job:
        """The job that answers a sequence, or begins its text."""
        return sequence_job(sequence, self._steps(sequence), self._num_bytes(sequence))

    def _num_bytes(self, sequence: Sequence) -> int:
        """Device bytes that it holds at most: what is attended to, chunks around those that are
        computed again, and the suffix."""
        joined = Joined.of(sequence.parts)
        share = Budget.of(sequence.budget).most * (1 + 2 * sequence.request.blend.recompute)
        rows = round(min(1.0, share) * joined.num_tokens) + len(sequence.suffix)
        return rows * self._token_bytes

    def _steps(self, sequence: Sequence) -> Generator[None, None, None]:
        if given_up(sequence):
            return
        sequence.begin()
        trace, programs = Trace(), self._blending.layers.programs
        with ExitStack() as stack:
            opened = yield from self._open(sequence, stack, trace)
            request = sequence.request
            steps = self._blending.run(
                opened, sequence.suffix, sequence.budget, request.blend, trace,
                keep=sequence.sampling is not None,
            )  # fmt: skip
            while True:
                made = programs.made
                try:
                    next(steps)
                except StopIteration as end:
                    found: Blended = end.value
                    break
                finally:
                    trace.count("compiled", programs.made - made)
                yield
                if given_up(sequence):
                    return
        self._done(sequence, found)

    def _open(
        self, sequence: Sequence, stack: ExitStack, trace: Trace
    ) -> Generator[None, None, Opened]:
        places: dict[str, int] = {}
        prefixes: list[OpenPrefix] = []
        with trace.span("open", lane="host"):
            for part in sequence.parts:
                if part.id not in places:
                    places[part.id] = len(prefixes)
                    prefixes.append(self._prefixes.use(part))
                    stack.callback(prefixes[-1].close)
        probes: list[Digest] = []
        while len(probes) < len(prefixes):
            try:
                probes.append(self._prefixes.probes(prefixes[len(probes)], trace))
                stack.callback(probes[-1].cancel)
            except RecoveryNeeded as needed:
                yield from recover(needed)
        return Opened(
            joined=Joined.of(sequence.parts),
            which=tuple(places[part.id] for part in sequence.parts),
            prefixes=prefixes,
            probes=probes,
        )
