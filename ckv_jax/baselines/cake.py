"""Cake: computes the blocks that take less time to compute than to read (`cake`).

Jin et al. 2024 (arXiv 2410.03065): a stored prefix is loaded from its end, while the device
computes it from its start, as a token's KV needs that of all tokens before it; both go on until
they meet.

Requests that attend to everything do so; under a budget this is `ckv`, over the same stores. How
much is computed follows what was measured before: seconds that blocks take to compute, and seconds
a pack takes to read. Computing ends early where reading has caught up. docs/baselines.md says what
differs.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ckv_jax.config import OwnParts
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.executor import Executor, FirstToken
from ckv_jax.pipeline.recovery import Recovered
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import CKV
from ckv_jax.trace import Trace

STRETCH = 16
"""Chunks that are read ahead together."""
LEAST_READS = 64
"""Packs from which on the reads of a request say how fast the store is."""


def blocks_to_compute(block_s: Sequence[float], read_s: Sequence[float]) -> int:
    """How many blocks from the start on are computed, while the others are read.

    Args:
      block_s: seconds that each block takes to compute, where they are known.
      read_s: seconds that what each block lacks takes to read; as many or more.
    """
    computing = np.concatenate([[0.0], np.cumsum(block_s)])
    reading = np.sum(read_s) - np.concatenate([[0.0], np.cumsum(read_s)])
    return int(np.argmin(np.maximum(computing, reading[: len(computing)])))


class Cake(Executor):
    """Re-prefill at a budget of 1, of whose packs some are computed while others are read."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.runtime)
        self._worker = worker
        self.block_s: list[float] = []
        """Seconds of the first blocks of a prefix, as they were computed last."""
        self.pack_s = 0.0
        """Seconds of a read, over the packs that it brings; 0: not known."""
        self._measuring: Future[Any] | None = None

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        [member, *others] = batch.members
        opened = member.opened
        exact = member.columns is not None and not others
        exact = exact and member.limits[member.lengths > 0].min() == opened.num_chunks
        if exact and self._computable(opened):
            self._load_or_compute(opened, packs, trace)
        first = super().run(batch, packs, trace, hold=hold)
        self._learn(opened.prefix, trace)
        return first

    def _computable(self, opened: OpenPrefix) -> bool:
        """Whether a prefix is stored as a prefill computes it, neither made under a budget nor
        encoded, and there is room for what is computed."""
        prefix, layout = opened.prefix, opened.prefix.layout
        if prefix.provenance != EXACT or layout.codec != PLAIN:
            return False
        chunk_fits = layout.chunk_tokens <= self._worker.prefills.block
        return chunk_fits and 2 * opened.groups * opened.num_chunks <= self._memory.step_slots

    def _load_or_compute(self, opened: OpenPrefix, packs: Packs, trace: Trace) -> None:
        """Brings some blocks from the start on, while the others are read; what is left after that
        is read as any request reads it."""
        block, recovered = self._worker.prefills.block, opened.recovered
        assert isinstance(recovered, Recovered)
        size = block // opened.prefix.layout.chunk_tokens
        chunks = np.arange(opened.num_chunks)
        blocks = np.split(chunks, range(size, len(chunks), size))
        read_s = [self.pack_s * self._absent(opened, chunks) for chunks in blocks]
        known = recovered.tokens // block
        wanted = blocks_to_compute([*[0.0] * known, *self.block_s[known:]][: len(blocks)], read_s)
        if not wanted:
            return
        self._read_from_end(opened, packs, blocks[wanted:])
        done = 0
        while done < wanted:
            began = time.perf_counter_ns()
            if recovered.tokens < min((done + 1) * block, opened.prefix.num_tokens):
                idle = self._worker.prefetcher.idle
                if idle and sum(read_s[done:wanted]) < self.block_s[done]:
                    break  # reading has caught up
                recovered.advance()
                ended = time.perf_counter_ns()
                self.block_s[done] = (ended - began) * 1e-9
                trace.add("compute again", "compute", began, ended, block=done)
            done += 1
        recovered.pause()
        try:
            for group in range(opened.groups):
                for chunks in blocks[:done]:
                    packs.computed(0, group, chunks)
        except PoolExhausted:
            return  # the rest is read
        trace.count("computed_blocks", done)

    def _absent(self, opened: OpenPrefix, chunks: np.ndarray) -> int:
        """Packs of some chunks that are not cached."""
        groups = np.arange(opened.groups)[:, None]
        device, host = self._memory.tiers.lookup(opened.pages(groups, chunks[None]).reshape(-1))
        return int(((device < 0) & (host < 0)).sum())

    def _read_from_end(self, opened: OpenPrefix, packs: Packs, blocks: list[np.ndarray]) -> None:
        for chunks in reversed(blocks):
            for stop in range(len(chunks), 0, -STRETCH):
                for group in range(opened.groups):
                    packs.ahead(0, group, chunks[max(0, stop - STRETCH) : stop], early=True)

    def _learn(self, prefix: Prefix, trace: Trace) -> None:
        """Takes the time of a request's reads; measures blocks once, after the first of them."""
        reads = [span for span in trace.spans if span.lane == "ssd"]
        count = sum(span.args["packs"] for span in reads)
        if count < LEAST_READS:
            return
        reading, until = 0, 0
        for span in sorted(reads, key=lambda span: span.start_ns):  # while any is in progress
            reading += max(0, span.end_ns - max(until, span.start_ns))
            until = max(until, span.end_ns)
        self.pack_s = reading * 1e-9 / count
        if self._measuring is None:
            self._measuring = self._worker.add_job(self._measure(prefix))

    def settle(self) -> None:
        """Returns once blocks are measured."""
        if self._measuring is not None:
            with suppress(CancelledError):
                self._measuring.result()

    def _measure(self, prefix: Prefix) -> Generator[None, None, None]:
        """Computes the blocks of a prefix, a second time once what they need is compiled."""
        for _ in range(2):
            seconds, computed = [], self._worker.recoveries.begin(prefix, lambda kv: None)
            while computed.tokens < prefix.num_tokens:
                began = time.perf_counter()
                computed.advance()
                seconds.append(time.perf_counter() - began)
                yield
        self.block_s = seconds


CAKE = replace(CKV, name="cake", own=OwnParts(executor=Cake))
