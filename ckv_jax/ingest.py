"""Ingest: computes a text's KV once, in blocks, and streams it to the store.

The engine thread computes, a block at a time between other work; the caller's thread writes and
reports, so that a slow disk or a slow caller delays no other request. What is stored and marked as
bad is repaired in place, with little computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue

import numpy as np

from ckv_jax.config import Budget
from ckv_jax.errors import CkvError
from ckv_jax.pipeline.prefill import Block, Prefills
from ckv_jax.prefix.stored_kv import EarlierKv, read_kv
from ckv_jax.request import Completion
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.errors import SegmentDamaged, StoreError
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.writer import SegmentWriter

Progress = Callable[[int, int], None]
"""(tokens done, tokens in all); or runs, where tokens are grouped."""

_AHEAD = 2  # blocks that are computed before the first of them is written
_MOST_REPAIRED = 16  # blocks of the prefill with bad chunks; with more of them, all is stored again


class Ingest:
    """Puts texts into one store, by one engine."""

    def __init__(
        self,
        placement: Placement,
        prefills: Prefills,
        scheduler: Scheduler,
        prefill_bytes: Callable[[int], int],
    ) -> None:
        self._store = placement.store
        self._codec = placement.system.coder
        self._prefills = prefills
        self._scheduler = scheduler
        self._prefill_bytes = prefill_bytes
        self._fingerprint = placement.fingerprint
        self._layout = placement.layout
        self._prompts = ThreadPoolExecutor(1, "ckv-prompt")
        self._waiting: list[Sequence] = []

    def store(
        self,
        tokens: np.ndarray,
        progress: Progress | None = None,
        grouping: Progress | None = None,
        *,
        salt: str,
    ) -> Prefix:
        """Stores the exact KV of `tokens` int32 [T], computing only what is not stored yet.

        What is stored and marked as bad is repaired in place, as far as that is worth it.
        Raises `StoreFull` and other `CkvError`s of the store, with nothing half-written left
        behind. In the caller's thread, which waits.
        """
        longest = partial(self._longest, salt=salt)
        stored = longest(tokens)
        if stored.num_tokens < len(tokens):
            stored = self._repair(tokens, salt, progress)
        if stored.num_tokens == len(tokens):
            return stored
        size = self._layout.chunk_tokens
        whole = stored.num_tokens // size * size
        parent = longest(tokens[:whole]) if whole else None
        if parent is not None and parent.num_tokens:
            try:
                return self._store_after(parent, tokens, progress, grouping, salt=salt)
            except SegmentDamaged:
                pass  # some of what is before cannot be read: all of it is computed again
        return self._store_after(None, tokens, progress, grouping, salt=salt)

    def write(
        self, tokens: np.ndarray, kv: np.ndarray, first: int, *, provenance: str, salt: str
    ) -> Prefix:
        """Stores KV [L, 2, n, K, D] that has been computed, of `tokens[first:]`, as one prefix.

        What is before `first` has to be stored, except its partial last chunk. What has been
        stored since is not written again. `provenance` says how the KV was made, see
        `storage.prefix`.
        """
        longest = partial(self._longest, provenance=provenance, salt=salt)
        stored = longest(tokens if provenance == EXACT else tokens[:first])
        if stored.num_tokens == len(tokens):
            return stored
        size = self._layout.chunk_tokens
        whole = stored.num_tokens // size * size
        if whole > first:
            first, kv = whole, kv[:, :, whole - first :]
        parent = longest(tokens[:whole]) if whole else None
        whole = parent.num_tokens if parent is not None else 0
        if whole < first:  # the partial last chunk, or what the store has lost since
            before = longest(tokens[:first])
            if before.num_tokens < first:
                raise SegmentDamaged(f"the first {first} tokens are not stored any more")
            head = read_kv(self._store, before, first_chunk=whole // size, codec=self._codec)
            kv = np.concatenate([head, kv.view(self._layout.numpy_dtype)], axis=2)
        with self._writer(tokens, parent, provenance, salt=salt) as writer:
            writer.write(0, np.ascontiguousarray(kv).view(self._layout.numpy_dtype))
            return writer.commit()

    def append(self, answer: Completion, *, exact: bool) -> Prefix:
        """Stores a generation's tokens and KV as one prefix; see `Engine.append`."""
        if answer.kv is None:
            raise ValueError(
                "got a generation without its KV, expected one with keep_kv=True that did not end "
                "while it waited for lost KV"
            )
        tokens = np.concatenate([answer.prefix.tokens, answer.suffix, answer.token_ids])
        tokens = tokens.astype(np.int32)
        before, salt = answer.prefix.provenance, answer.prefix.salt
        first = answer.prefix.num_tokens
        whole = not first or (Budget.of(answer.budget).exact and before == EXACT)
        if exact and not whole:
            return self.store(tokens, salt=salt)
        provenance = before  # what follows approximate KV shares its provenance
        if before == EXACT and not whole:
            provenance = f"budget:{answer.budget}"
        try:
            return self.write(tokens, answer.kv, first, provenance=provenance, salt=salt)
        except SegmentDamaged:
            return self.store(tokens, salt=salt)  # what it stands on is gone: all is computed again

    def store_prompt(self, sequence: Sequence) -> None:
        """Stores all of a sequence's tokens but the last, and submits it again over them.

        For prompts too long to be computed in one piece of memory. Returns at once: one thread
        stores them, one after the other. An error becomes the sequence's own outcome. So does its
        end by the caller or its deadline, which counts before every block, of any prompt.
        """
        self._waiting.append(sequence)
        self._prompts.submit(self._store_prompt, sequence)

    def _store_prompt(self, sequence: Sequence) -> None:
        def check(*_: int) -> None:
            for other in list(self._waiting):
                other.fail_if_lapsed()
            if (lapsed := sequence.lapsed()) is not None:
                raise lapsed

        self._waiting.remove(sequence)
        if sequence.done():
            return
        try:
            check()
            tokens = sequence.tokens
            prefix = self.store(tokens[:-1], check, salt=sequence.prefix.salt)
            sequence.place(prefix, tokens[prefix.num_tokens :], 1.0)
            self._scheduler.submit([sequence])
        except (CkvError, ValueError) as error:
            sequence.fail(error)
        except BaseException as error:
            sequence.crash(error)

    def close(self, *, wait: bool) -> None:
        """Ends the thread that stores prompts. `wait`: returns once the prompts in progress have
        ended. The scheduler is closed before."""
        self._prompts.shutdown(wait=wait)

    def _longest(
        self, tokens: np.ndarray, marked: bool = False, *, provenance: str = EXACT, salt: str
    ) -> Prefix:
        return self._store.longest_prefix(
            tokens, fingerprint=self._fingerprint, layout=self._layout, salt=salt,
            provenance=provenance, marked=marked,
        )  # fmt: skip

    def _writer(
        self, tokens: np.ndarray, parent: Prefix | None, provenance: str = EXACT, *, salt: str
    ) -> SegmentWriter:
        whole = parent.num_tokens if parent is not None else 0
        return self._store.writer(
            fingerprint=self._fingerprint,
            layout=self._layout,
            tokens=tokens[whole:],
            parent=parent,
            salt=salt,
            provenance=provenance,
            codec=self._codec,
        )

    def _store_after(
        self,
        parent: Prefix | None,
        tokens: np.ndarray,
        progress: Progress | None,
        grouping: Progress | None,
        *,
        salt: str,
    ) -> Prefix:
        whole = parent.num_tokens if parent is not None else 0
        with ExitStack() as stack:
            reader = None
            if parent is not None:
                reader = stack.enter_context(self._store.reader(parent))
            writer = stack.enter_context(self._writer(tokens, parent, salt=salt))
            run = _IngestRun(EarlierKv(self._layout, self._codec, whole, reader, writer))
            rest = tokens[whole:]
            job = Job(
                run.compute(self._prefills, rest, whole),
                num_bytes=self._prefill_bytes(len(tokens)),
                ready=run.ready,
            )
            stack.callback(self._scheduler.wake)
            stack.callback(job.cancel)
            job.future.add_done_callback(lambda _: run.blocks.put(None))
            self._scheduler.add(job)
            while (block := run.blocks.get()) is not None:
                writer.write(block.first - whole, block.tokens_kv(self._layout.numpy_dtype))
                run.written = block.first + block.length
                self._scheduler.wake()
                if progress is not None:
                    progress(run.written, len(tokens))
            job.future.result()
            return writer.commit(grouping)

    # -- repair -----------------------------------------------------------------------------------

    def _repair(self, tokens: np.ndarray, salt: str, progress: Progress | None) -> Prefix:
        """What is stored of `tokens` int32 [T], once what is marked as bad is repaired.

        Probes and digests are made again from packs; packs are computed, those of one block of the
        prefill at a time, from what is stored before them. What cannot be repaired stays marked.
        """
        longest = partial(self._longest, salt=salt)
        tried: set[int] = set()  # chunks whose packs are as good as they can be
        while True:
            stored, whole = longest(tokens), longest(tokens, marked=True)
            bad = self._store.marked_chunks(whole)
            blocks = np.unique(bad * whole.layout.chunk_tokens // self._prefills.block)
            if whole.num_tokens <= stored.num_tokens or len(blocks) > _MOST_REPAIRED:
                return stored
            todo = [chunk for chunk in bad.tolist() if chunk not in tried]
            try:
                if not tried or not todo:  # what needs no computing; last, what needed packs
                    self._store.rebuild_probes(whole, codec=self._codec)
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
            except StoreError:  # such as bad packs before them, which are marked by now
                if np.array_equal(self._store.marked_chunks(longest(tokens, marked=True)), bad):
                    return stored
                continue
            tried.update(chunks)
            if progress is not None:
                progress(reach.stop, len(tokens))

    def _bad_packs(self, whole: Prefix, chunks: np.ndarray) -> list[int]:
        """Those of some chunks that have packs which cannot be read; and the first of segments
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
        """The first bad chunks that are repaired together, and the tokens to compute for that:
        about a block of the prefill, and no more than a segment has; or what groups of alike tokens
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
            known = _ComputedKv(earlier, start, layout.numpy_dtype)
            job = Job(
                self._steps(known, whole.tokens[start:stop], start),
                num_bytes=self._prefill_bytes(stop),
            )
            try:
                self._scheduler.add(job).future.result()
            finally:
                job.cancel()
        return known.fresh

    def _steps(
        self, known: _ComputedKv, tokens: np.ndarray, start: int
    ) -> Generator[None, None, None]:
        """The engine thread's half: one block a step."""
        prefill = self._prefills.begin(tokens, start=start, earlier=known)
        while True:
            known.add(prefill.advance())
            if prefill.done:
                return
            yield


class _IngestRun:
    """One ingest between the engine thread, which computes, and the caller's, which writes."""

    def __init__(self, earlier: EarlierKv) -> None:
        self.blocks: SimpleQueue[Block | None] = SimpleQueue()
        self.written = 0
        self._earlier = earlier
        self._computed = 0
        self._block = 0
        self._needs = 0

    def ready(self) -> bool:
        """Whether the next block may be computed: the disk keeps up, and has what is needed."""
        unwritten = self._computed - max(self.written, self._earlier.whole)
        return unwritten < _AHEAD * self._block + 1 and self._needs <= max(
            self.written, self._earlier.whole
        )

    def compute(
        self, prefills: Prefills, tokens: np.ndarray, start: int
    ) -> Generator[None, None, None]:
        """The engine thread's half: one block a step."""
        self._block = prefills.block
        prefill = prefills.begin(tokens, start=start, earlier=self._earlier)
        while True:
            block = prefill.advance()
            block.hidden.block_until_ready()
            self._computed, self._needs = block.first + block.length, prefill.needs
            self.blocks.put(block)
            if prefill.done:
                return
            yield


class _ComputedKv:
    """KV of a text up to where it has been computed: stored, then in memory; see `Earlier`."""

    def __init__(self, stored: EarlierKv, start: int, dtype: np.dtype) -> None:
        self._stored = stored
        self._start = start
        self._dtype = dtype
        self._blocks: list[np.ndarray] = []

    @property
    def fresh(self) -> np.ndarray:
        """Returns the computed KV, [L, 2, n, K, D], from token `start` on."""
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
