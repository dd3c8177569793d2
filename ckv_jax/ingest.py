"""Ingest: compute a text's KV once, in blocks, and stream it to the store as it comes.

The engine thread computes, a block at a time between other work; the caller's thread writes and
reports, so that neither a slow disk nor a slow caller holds anybody up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue

import numpy as np

from ckv_jax.budget import Budget
from ckv_jax.mending import Mending
from ckv_jax.pipeline.prefill import Block, Prefills
from ckv_jax.request import Completion
from ckv_jax.serving.job import Job
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.writer import SegmentWriter
from ckv_jax.storage.store import ChunkStore
from ckv_jax.stored_kv import EarlierKv, read_kv

Progress = Callable[[int, int], None]
"""(tokens done, tokens in all); or runs, where tokens are grouped."""

_AHEAD = 2  # blocks that are computed before the first of them is written


class Ingest:
    """Puts texts into one store, by one engine."""

    def __init__(
        self,
        *,
        store: ChunkStore,
        prefills: Prefills,
        scheduler: Scheduler,
        prefill_bytes: Callable[[int], int],
        fingerprint: Fingerprint,
        layout: Layout,
        codec: Codec | None,
    ) -> None:
        self._store = store
        self._codec = codec
        self._prefills = prefills
        self._scheduler = scheduler
        self._prefill_bytes = prefill_bytes
        self._fingerprint = fingerprint
        self._layout = layout
        self._mending = Mending(store, prefills, scheduler, prefill_bytes, codec)

    def store(
        self,
        tokens: np.ndarray,
        progress: Progress | None = None,
        grouping: Progress | None = None,
        *,
        salt: str,
    ) -> Prefix:
        """Stores the exact KV of `tokens` int32 [T], computing only what is not stored yet.

        What is stored and marked as bad is put right where it lies, as far as that is worth it.
        Raises `StoreFull` and other `CkvError`s of the store, with nothing half-written left
        behind. In the caller's thread, which waits.
        """
        longest = partial(self._longest, salt=salt)
        stored = longest(tokens)
        if stored.num_tokens < len(tokens):
            stored = self._mending.mend(tokens, longest, progress)
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
        longest = partial(self._longest, salt=salt)
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

    def append(self, text: Completion, *, exact: bool) -> Prefix:
        """Stores a generation's tokens and KV as one prefix; see `Engine.append`."""
        if text.kv is None:
            raise ValueError("got a generation without its KV, expected one with keep_kv=True")
        tokens = np.concatenate([text.prefix.tokens, text.suffix, text.token_ids])
        tokens = tokens.astype(np.int32)
        first, before, salt = text.prefix.num_tokens, text.prefix.provenance, text.prefix.salt
        whole = not first or (Budget.of(text.budget).exact and before == EXACT)
        if exact and not whole:
            return self.store(tokens, salt=salt)
        provenance = EXACT if whole else f"budget:{text.budget}"
        try:
            return self.write(tokens, text.kv, first, provenance=provenance, salt=salt)
        except SegmentDamaged:
            return self.store(tokens, salt=salt)  # what it stands on is gone: all is computed again

    def _longest(self, tokens: np.ndarray, marked: bool = False, *, salt: str) -> Prefix:
        return self._store.longest_prefix(
            tokens,
            fingerprint=self._fingerprint,
            layout=self._layout,
            salt=salt,
            marked=marked,
        )

    def _writer(
        self,
        tokens: np.ndarray,
        parent: Prefix | None,
        provenance: str = EXACT,
        *,
        salt: str,
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
            way = _Way(EarlierKv(self._layout, self._codec, whole, reader, writer))
            rest = tokens[whole:]
            job = Job(
                way.compute(self._prefills, rest, whole),
                num_bytes=self._prefill_bytes(len(tokens)),
                ready=way.ready,
            )
            stack.callback(self._scheduler.wake)
            stack.callback(job.cancel)
            job.future.add_done_callback(lambda _: way.blocks.put(None))
            self._scheduler.add(job)
            while (block := way.blocks.get()) is not None:
                writer.write(block.first - whole, block.tokens_kv(self._layout.numpy_dtype))
                way.written = block.first + block.length
                self._scheduler.wake()
                if progress is not None:
                    progress(way.written, len(tokens))
            job.future.result()
            return writer.commit(grouping)


class _Way:
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
