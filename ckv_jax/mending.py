"""Mending: what is stored and marked as bad is put right where it lies, with little computed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np

from ckv_jax.pipeline.prefill import Block, Prefills
from ckv_jax.serving.job import Job
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.stored_kv import EarlierKv

_MOST_BLOCKS = 16  # what is bad in more blocks of the prefill than that is stored anew


class Longest(Protocol):
    """The longest stored prefix of tokens int32 [T]; `marked`: bad chunks count as stored."""

    def __call__(self, tokens: np.ndarray, marked: bool = False) -> Prefix: ...


class Mending:
    """Puts prefixes of one store right, by one engine. In the caller's thread, which waits."""

    def __init__(
        self,
        store: ChunkStore,
        prefills: Prefills,
        scheduler: Scheduler,
        prefill_bytes: Callable[[int], int],
        codec: Codec | None,
    ) -> None:
        self._store = store
        self._codec = codec
        self._prefills = prefills
        self._scheduler = scheduler
        self._prefill_bytes = prefill_bytes

    def mend(
        self,
        tokens: np.ndarray,
        longest: Longest,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefix:
        """What is stored of `tokens` int32 [T], after what is marked as bad was put right.

        Probes and digests are made anew from packs; packs are computed, those of one block of the
        prefill at a time, from what is stored before them. What cannot be mended stays marked.
        """
        tried: set[int] = set()  # chunks whose packs are as good as they can be
        while True:
            stored, whole = longest(tokens), longest(tokens, marked=True)
            bad = self._store.marked_chunks(whole)
            blocks = np.unique(bad * whole.layout.chunk_tokens // self._prefills.block)
            if whole.num_tokens <= stored.num_tokens or len(blocks) > _MOST_BLOCKS:
                return stored
            todo = [chunk for chunk in bad.tolist() if chunk not in tried]
            try:
                if not tried or not todo:  # what needs no computing; last, what needed packs
                    self._store.remake_probes(whole, codec=self._codec)
                    if len(self._store.marked_chunks(whole)) < len(bad):
                        continue
                    if not todo:
                        return stored
                todo = self._bad_packs(whole, np.array(todo))
                if not todo:  # it is probes or the digest that are bad, and want other packs first
                    tried.update(bad.tolist())
                    continue
                chunks, reach = self._reach(whole, todo)
                kv = self._compute(whole, reach)
                first = reach.start // whole.layout.chunk_tokens
                self._store.replace_packs(whole, first, kv, codec=self._codec)
            except StoreError:  # such as bad packs ahead, which are marked by now
                if np.array_equal(self._store.marked_chunks(longest(tokens, marked=True)), bad):
                    return stored
                continue
            tried.update(chunks)
            if progress is not None:
                progress(reach.stop, len(tokens))

    def _bad_packs(self, whole: Prefix, chunks: np.ndarray) -> list[int]:
        """Those of some chunks that have packs which cannot be read; and the first ones of segments
        whose assignment cannot."""
        good = np.ones(len(chunks), bool)
        out = np.empty((len(chunks), *whole.layout.stored_shape), whole.layout.stored_dtype)
        with self._store.reader(whole) as reader:
            for group in range(whole.layout.groups):
                good &= reader.read_packs(group, chunks, out)
            lost = set(reader.lost_orders() if whole.layout.alike else ())
        bad: list[int] = chunks[~good | np.isin(chunks, list(lost))].tolist()
        return bad

    def _reach(self, whole: Prefix, bad: list[int]) -> tuple[list[int], range]:
        """The first bad chunks that are mended together, and the tokens to compute for that: about
        a block of the prefill, and no more than a segment has; or what groups of alike tokens
        take."""
        size = whole.layout.chunk_tokens
        if whole.layout.alike:
            with self._store.reader(whole) as reader:
                return reader.reach(bad)
        ends = np.cumsum([span.num_chunks for span in whole.spans])
        end = int(ends[np.searchsorted(ends, bad[0], side="right")])
        end = min(end, bad[0] + max(1, self._prefills.block // size))
        stop = 1 + max(chunk for chunk in bad if chunk < end)
        tokens = range(bad[0] * size, min(stop * size, whole.num_tokens))
        return list(range(bad[0], stop)), tokens

    def _compute(self, whole: Prefix, tokens: range) -> np.ndarray:
        """KV [L, 2, n, K, D] of some tokens, from what is stored before them.

        Raises SegmentDamaged where not all of that can be read.
        """
        layout, start, stop = whole.layout, tokens.start, tokens.stop
        with self._store.reader(whole) as reader:
            earlier = EarlierKv(layout, self._codec, start, reader, None)
            known = _Known(earlier, start, layout.numpy_dtype)
            job = Job(
                self._steps(known, whole.tokens[start:stop], start),
                num_bytes=self._prefill_bytes(stop),
            )
            try:
                self._scheduler.add(job).future.result()
            finally:
                job.cancel()
        return known.fresh

    def _steps(self, known: _Known, tokens: np.ndarray, start: int) -> Generator[None, None, None]:
        """The engine thread's half: one block a step."""
        prefill = self._prefills.begin(tokens, start=start, earlier=known)
        while True:
            known.add(prefill.advance())
            if prefill.done:
                return
            yield


class _Known:
    """KV of a text up to where it has been computed: stored, then in memory; see `Earlier`."""

    def __init__(self, stored: EarlierKv, start: int, dtype: np.dtype) -> None:
        self._stored = stored
        self._start = start
        self._dtype = dtype
        self._blocks: list[np.ndarray] = []

    @property
    def fresh(self) -> np.ndarray:
        """What was computed, [L, 2, n, K, D] from token `start` on."""
        return np.concatenate(self._blocks, axis=2)

    def add(self, block: Block) -> None:
        """Take in the block that comes next."""
        self._blocks.append(block.tokens_kv(self._dtype))

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        """[layers, 2, stop - first, K, D]. Raises `SegmentDamaged` for what cannot be read."""
        parts = []
        if first < self._start:
            parts.append(self._stored.read(layers, first, min(stop, self._start)))
        if stop > self._start:
            fresh = self.fresh[layers.start : layers.stop]
            parts.append(fresh[:, :, max(0, first - self._start) : stop - self._start])
        return np.concatenate(parts, axis=2)
