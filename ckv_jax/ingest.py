"""Ingest: compute a text's KV once, in blocks, and stream it to the store as it comes.

The engine thread computes, a block at a time between other work; the caller's thread writes and
reports, so that neither a slow disk nor a slow caller holds anybody up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from queue import SimpleQueue

import numpy as np

from ckv_jax.errors import CkvError
from ckv_jax.pipeline.prefill import Block, Prefills
from ckv_jax.request import Completion
from ckv_jax.serving.job import Job
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.storage.codec import Codec, check_codec, decoded
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.writer import SegmentWriter
from ckv_jax.storage.store import ChunkStore

Progress = Callable[[int, int], None]
"""(tokens done, tokens in all)."""

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
        salt: str,
    ) -> None:
        self._store = store
        self._codec = codec
        self._prefills = prefills
        self._scheduler = scheduler
        self._prefill_bytes = prefill_bytes
        self._fingerprint = fingerprint
        self._layout = layout
        self._salt = salt

    def store(self, tokens: np.ndarray, progress: Progress | None = None) -> Prefix:
        """Stores the exact KV of `tokens` int32 [T], computing only what is not stored yet.

        Raises `StoreFull` and other `CkvError`s of the store, with nothing half-written left
        behind. In the caller's thread, which waits.
        """
        stored = self._longest(tokens)
        if stored.num_tokens == len(tokens):
            return stored
        size = self._layout.chunk_tokens
        whole = stored.num_tokens // size * size
        parent = self._longest(tokens[:whole]) if whole else None
        if parent is not None and parent.num_tokens:
            try:
                return self._store_after(parent, tokens, progress)
            except SegmentDamaged:
                pass  # some of what is before cannot be read: all of it is computed again
        return self._store_after(None, tokens, progress)

    def write(self, tokens: np.ndarray, kv: np.ndarray, first: int, *, provenance: str) -> Prefix:
        """Stores KV [L, 2, n, K, D] that has been computed, of `tokens[first:]`, as one prefix.

        What is before `first` has to be stored, but for its partial last chunk. `provenance` says
        how the KV was made, see `storage.prefix`.
        """
        stored = self._longest(tokens[:first])
        size = self._layout.chunk_tokens
        whole = min(stored.num_tokens, first) // size * size
        parent = self._longest(tokens[:whole]) if whole else None
        whole = parent.num_tokens if parent is not None else 0
        if whole < first:  # the partial last chunk, or what the store has lost since
            before = self._longest(tokens[:first])
            if before.num_tokens < first:
                raise SegmentDamaged(f"the first {first} tokens are not stored any more")
            head = read_kv(self._store, before, first_chunk=whole // size, codec=self._codec)
            kv = np.concatenate([head, kv.view(self._layout.numpy_dtype)], axis=2)
        with self._writer(tokens, parent, provenance) as writer:
            writer.write(0, np.ascontiguousarray(kv).view(self._layout.numpy_dtype))
            return writer.commit()

    def append(self, text: Completion, *, exact: bool) -> Prefix:
        """Stores a generation's tokens and KV as one prefix; see `Engine.append`."""
        if text.kv is None:
            raise ValueError("got a generation without its KV, expected one with keep_kv=True")
        tokens = np.concatenate([text.prefix.tokens, text.suffix, text.token_ids])
        tokens = tokens.astype(np.int32)
        first, before = text.prefix.num_tokens, text.prefix.provenance
        whole = not first or (text.budget == 1.0 and before == "exact")
        if exact and not whole:
            return self.store(tokens)
        provenance = "exact" if whole else f"budget:{text.budget:g}"
        try:
            return self.write(tokens, text.kv, first, provenance=provenance)
        except SegmentDamaged:
            return self.store(tokens)  # what it stands on is gone: all is computed again

    def _longest(self, tokens: np.ndarray) -> Prefix:
        return self._store.longest_prefix(
            tokens, fingerprint=self._fingerprint, layout=self._layout, salt=self._salt
        )

    def _writer(
        self, tokens: np.ndarray, parent: Prefix | None, provenance: str = "exact"
    ) -> SegmentWriter:
        whole = parent.num_tokens if parent is not None else 0
        return self._store.writer(
            fingerprint=self._fingerprint,
            layout=self._layout,
            tokens=tokens[whole:],
            parent=parent,
            salt=self._salt,
            provenance=provenance,
            codec=self._codec,
        )

    def _store_after(
        self, parent: Prefix | None, tokens: np.ndarray, progress: Progress | None
    ) -> Prefix:
        whole = parent.num_tokens if parent is not None else 0
        with ExitStack() as stack:
            reader = None
            if parent is not None:
                reader = stack.enter_context(self._store.reader(parent))
            writer = stack.enter_context(self._writer(tokens, parent))
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
            return writer.commit()


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


class EarlierKv:
    """KV of a text that is being ingested, as far as it is on disk; see `prefill.Earlier`.

    Args:
        whole: tokens of the stored prefix that it goes on from; `reader` has those.
        writer: has the others.
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec | None,
        whole: int,
        reader: PrefixReader | None,
        writer: SegmentWriter,
    ) -> None:
        self.whole = whole
        self._layout = layout
        self._codec = codec
        self._reader = reader
        self._writer = writer

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        """[layers, 2, stop - first, K, D]. Raises `SegmentDamaged` for what cannot be read.

        Of what this ingest has written, no more is read than is asked for.
        """
        size = self._layout.chunk_tokens
        chunks = np.arange(first // size, -(-stop // size))
        kv = _kv_of(self._layout, layers, chunks, self._packs)
        skip = first - int(chunks[0]) * size
        return kv[:, :, skip : skip + stop - first]

    def _packs(self, group: int, chunks: np.ndarray, places: slice) -> np.ndarray:
        layout, whole = self._layout, self.whole // self._layout.chunk_tokens
        old = int(np.searchsorted(chunks, whole))
        parts = []
        if old:
            assert self._reader is not None
            parts.append(_read(self._reader, group, chunks[:old], self._codec)[:, places])
        if old < len(chunks):
            shape, part = (len(chunks) - old, *layout.stored_shape), slice(None)
            if self._codec is None:
                shape = (shape[0], places.stop - places.start, *layout.stored_shape[1:])
            else:
                part = places
            stored = np.empty(shape, layout.stored_dtype)
            self._writer.read_back(group, int(chunks[old]) - whole, stored, layer=places.start)
            parts.append(decoded(self._codec, stored, layout)[:, part])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_kv(
    store: ChunkStore, prefix: Prefix, *, first_chunk: int = 0, codec: Codec | None = None
) -> np.ndarray:
    """Keys and values [L, 2, T, K, D] of a stored prefix, T from the first token of `first_chunk`.

    `codec` is the one that its layout names. Raises `SegmentDamaged` for what cannot be read.
    """
    check_codec(codec, prefix.layout)
    layout = prefix.layout
    chunks = np.arange(first_chunk, prefix.num_chunks)
    with store.reader(prefix) as reader:

        def read(group: int, chunks: np.ndarray, places: slice) -> np.ndarray:
            return _read(reader, group, chunks, codec)[:, places]

        kv = _kv_of(layout, range(layout.num_layers), chunks, read)
    return kv[:, :, : prefix.num_tokens - first_chunk * layout.chunk_tokens]


def _read(reader: PrefixReader, group: int, chunks: np.ndarray, codec: Codec | None) -> np.ndarray:
    """Packs [n, *pack_shape] of a stored prefix."""
    layout = reader.prefix.layout
    stored = np.empty((len(chunks), *layout.stored_shape), layout.stored_dtype)
    try:
        ok = reader.read_packs(group, chunks, stored)
    except CkvError as error:
        raise SegmentDamaged(f"the packs of group {group} cannot be read: {error}") from error
    if not ok.all():
        raise SegmentDamaged(f"{int((~ok).sum())} packs of group {group} cannot be read")
    return decoded(codec, stored, layout)


def _kv_of(
    layout: Layout,
    layers: range,
    chunks: np.ndarray,
    read: Callable[[int, np.ndarray, slice], np.ndarray],
) -> np.ndarray:
    """[layers, 2, chunks x C, K, D], from layers `places` of packs, `read(group, chunks, places)`
    [n, places, 2, C, K, D]."""
    size, heads, dim = layout.chunk_tokens, layout.num_kv_heads, layout.head_dim
    out = np.empty((len(layers), 2, len(chunks), size, heads, dim), layout.numpy_dtype)
    for group in range(layout.groups):
        held = layout.group_layers(group)
        first, stop = max(held.start, layers.start), min(held.stop, layers.stop)
        if first >= stop:
            continue
        packs = read(group, chunks, slice(first - held.start, stop - held.start))
        # [M, layers, 2, C, K, D] -> [layers, 2, M, C, K, D]
        rows = packs.transpose(1, 2, 0, 3, 4, 5)
        kinds = slice(None) if layout.kv_together else slice(group % 2, group % 2 + 1)
        out[first - layers.start : stop - layers.start, kinds] = rows
    return out.reshape(len(layers), 2, -1, heads, dim)
