"""Sequences that share no batch until their first token is there: dense prefills, and parts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from ckv_jax.decode.decoder import Row
from ckv_jax.parts.blending import Blended, Blending
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefill import Prefills
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.serving.going import Going
from ckv_jax.serving.job import Job
from ckv_jax.serving.parts_jobs import PartsJobs
from ckv_jax.serving.prefill_jobs import dense_job
from ckv_jax.serving.running import Running
from ckv_jax.serving.sequence import Sequence
from ckv_jax.trace import Trace

Finish = Callable[[Sequence, int, np.ndarray, Trace], None]
"""Ends a sequence with its first token: (sequence, token, logits float32 [V], trace)."""


class Alone:
    """Makes jobs of such sequences, and goes on with what comes out. Engine thread only."""

    def __init__(
        self,
        prefills: Prefills,
        running: Running,
        blending: Blending,
        prefixes: OpenPrefixes,
        *,
        plan: Plan,
        token_bytes: int,
        computes_all: bool,
        finish: Finish,
        begin_text: Callable[[Sequence, Trace], None],
        store_prompt: Callable[[Sequence], None],
    ) -> None:
        """`computes_all`: nothing is ever stored; `store_prompt` ingests a prompt in another thread
        and submits its sequence again."""
        self._prefills = prefills
        self._running = running
        self._parts = PartsJobs(blending, prefixes, token_bytes=token_bytes, done=self._parts_done)
        self._plan = plan
        self._token_bytes = token_bytes
        self._computes_all = computes_all
        self._finish = finish
        self._begin_text = begin_text
        self._store_prompt = store_prompt

    def job(self, sequence: Sequence) -> Job | None:
        """See `scheduler.Computes.job_for`."""
        if sequence.parts:
            return self._parts.job(sequence)
        if not self._computes_all and len(sequence.tokens) > self._prefills.window:
            self._store_prompt(sequence)
            return None
        return self.dense_job(sequence)

    def dense_job(self, sequence: Sequence) -> Job:
        """A dense prefill of all tokens of a sequence, whose KV stays on the device."""
        size = len(sequence.tokens) * self._token_bytes
        return dense_job(sequence, self._prefills, size, self.dense_done)

    def dense_done(
        self, sequence: Sequence, logits: np.ndarray, token: int, kv: LayerKv, trace: Trace
    ) -> None:
        """What all tokens of a sequence came to: its answer, or the beginning of its text."""
        by_step = [tuple(kv[layer] for layer in step.layers) for step in self._plan.steps]
        row = Row(start=0, length=len(sequence.tokens), window=None)
        self._go_on(sequence, logits, token, by_step, row, trace)

    def _parts_done(self, sequence: Sequence, found: Blended) -> None:
        row = Row(start=found.start, length=found.rows, window=None)
        self._go_on(sequence, found.logits, found.token, found.kv, row, found.trace)

    def _go_on(
        self, sequence: Sequence, logits: np.ndarray, token: int, kv: Several[LayerKv], row: Row,
        trace: Trace,
    ) -> None:  # fmt: skip
        if sequence.sampling is None:
            self._finish(sequence, token, logits[0].copy(), trace)
            return
        self._begin_text(sequence, trace)
        self._running.start(logits, kv, [(0, Going(sequence=sequence, row=row))])
