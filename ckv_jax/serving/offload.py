"""Offload: moves generated tokens from device buffers to the store, one segment at a time, where
they are selected, read and evicted like the prefix (RetroInfer, every 1,024 tokens).

A segment continues the prefix of its sequence and belongs to that sequence alone: no other has its
provenance, so that no lookup finds it, and it is removed when the sequence ends. A thread writes it
while the next tokens are generated; the sequence reads it after a fixed number of them, so that
what is attended to depends on no clock.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from uuid import uuid4

import numpy as np

from ckv_jax.decode.decoder import Decoder
from ckv_jax.decode.selection import DecodeSelections
from ckv_jax.decode.window import Window
from ckv_jax.errors import CkvError
from ckv_jax.pipeline.executor import Runtime
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.serving.sequence import OffloadedTokens, RunningSequence, Sequence, Written
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import Trace

LOCAL = 64
"""The latest tokens stay in the buffers (KVDrive §9.1)."""
BEHIND = 16
"""Tokens that are generated while a segment is written."""

_MIN_RETRY_S = 0.02
_MAX_RETRY_S = 2.0
"""Seconds between two tries: the first delay, and the largest after doubling."""

_PROVENANCE_PREFIX = "text:"  # of segments of generated tokens
_log = logging.getLogger(__name__)


def most_buffered(segment_tokens: int, chunk_tokens: int) -> int:
    """Tokens after the suffix that a sequence's buffers hold at most, where segments are made."""
    return segment_tokens + LOCAL + BEHIND + chunk_tokens


class Offload:
    """Moves generated tokens of one engine's sequences to the store. Engine thread only.

    Args:
        tokens: of a segment, whole chunks of which are stored.
    """

    def __init__(self, runtime: Runtime, selections: DecodeSelections, *, tokens: int) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._prefixes = runtime.prefixes
        self._codec = runtime.system.coder
        self._tokens = tokens
        self._selections = selections
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckv-segment")
        self._thread.submit(int)  # it starts here, where no generation fails if it cannot
        self._orphans_removed = False
        self._remover = SegmentRemover(runtime.store)

    def begin(self, sequence: Sequence, window: Window, limit: int) -> OffloadedTokens | None:
        """For a generation that begins; None: it keeps all in its buffers, since its packs do not
        stay on the device, or its prefix has approximate KV."""
        prefix, sampling = sequence.prefix, sequence.sampling
        assert sampling is not None
        if not window.held or prefix.provenance != EXACT:
            return None
        most = prefix.num_tokens + len(sequence.suffix) + sampling.max_tokens
        return OffloadedTokens(
            prefix=prefix,
            provenance=f"{_PROVENANCE_PREFIX}{uuid4().hex}",
            at=len(sequence.suffix) + self._tokens + LOCAL,
            exact=sequence.parsed_budget.exact,
            limit=limit,
            room=prefix.layout.num_chunks(most),
            end=self._end,
        )

    def due(self, running: RunningSequence) -> bool:
        """Whether `step` has something to do for a sequence, between two of its tokens."""
        return running.offloaded is not None and running.row.length >= running.offloaded.at

    def step(self, running: RunningSequence, decoder: Decoder, place: int, spare: int) -> bool:
        """Begins to write a segment, or reads the one that was begun from now on; whether it does.

        Nothing may be reading for the sequence's batch. `spare`: device slots that are free to be
        held. Raises `RecoveryNeeded`, upon which the same has to be tried again; any other fault
        of the store, or of the thread that writes, leaves the tokens in the buffers.
        """
        offloaded = running.offloaded
        assert offloaded is not None
        if offloaded.writing is None:
            self._write_next(running, offloaded, decoder, place)
            return False
        count, future = offloaded.writing
        reader, moved = None, False
        try:
            prefix, reader = future.result()
            assert running.window is not None
            more = prefix.num_chunks * prefix.layout.groups - running.window.slots_held
            if not offloaded.exact or more <= spare:
                self._move(running, offloaded, decoder, place, prefix, count)
                moved = True
        except Exception as error:
            if reader is not None and not isinstance(error, CkvError):
                raise
            _log.warning("cannot store generated tokens, they stay in memory: %s", error)
        if reader is not None:
            reader.close()
        if not moved:
            if reader is not None:
                self._remover.add(_own(prefix)[:1])
            offloaded.writing = None  # no segment this time
            offloaded.at = running.row.length + self._tokens
        return moved

    def close(self) -> None:
        """Waits for what is being written, and removes it and what else is left. All sequences
        have ended."""
        self._thread.shutdown(wait=True)
        self._remover.close()

    def _write_next(
        self, running: RunningSequence, offloaded: OffloadedTokens, decoder: Decoder, place: int
    ) -> None:
        row, sequence = running.row, running.sequence
        size = offloaded.prefix.layout.chunk_tokens
        count = (row.start + row.length - LOCAL) // size * size - row.start
        text = [sequence.prefix.tokens, sequence.suffix, np.array(sequence.token_ids, np.int32)]
        tokens = np.concatenate(text)[row.start : row.start + count].astype(np.int32)
        kv = decoder.kv(place, row.start)[:, :, :count]
        offloaded.writing = count, self._thread.submit(self._write, offloaded, tokens, kv)
        offloaded.at = row.length + BEHIND

    def _move(
        self,
        running: RunningSequence,
        offloaded: OffloadedTokens,
        decoder: Decoder,
        place: int,
        prefix: Prefix,
        count: int,
    ) -> None:
        window, old = running.window, offloaded.prefix
        assert window is not None and running.opened is not None
        opened = self._prefixes.use(prefix, offloaded.room)
        try:
            opened.hold()  # else others could remove what no other prefix needs
            if offloaded.exact:
                self._attend_all(window, opened)
            else:
                digest = self._prefixes.probes(opened, Trace())
                window.onto(opened)
                if running.selector is None:  # its whole prefix was one selection
                    running.selector = self._selections.row(offloaded.limit, digest, window)
                running.selector.digest = digest
                running.selector.age = 0  # what leaves the buffers may be selected at once
        except BaseException:
            opened.close()
            raise
        if running.sequence.keep_kv:
            offloaded.kv.append(decoder.kv(place, running.row.start)[:, :, :count])
        decoder.shift(place, count)
        running.opened.close()
        running.opened = opened
        offloaded.prefix, offloaded.writing = prefix, None
        if _own(old):
            self._prefixes.drop(old)
        offloaded.at = LOCAL + self._tokens
        if offloaded.exact:
            running.sequence.offloaded_chunks = (
                prefix.num_chunks - running.sequence.prefix.num_chunks
            )
        assert running.sequence.trace is not None
        running.sequence.trace.segments += 1

    def _attend_all(self, window: Window, opened: OpenPrefix) -> None:
        """Brings what a window lacks of a prefix onto the device, all of it to stay."""
        absent = window.absent(opened)
        with self._runtime.open_packs([opened], Trace()) as packs:
            for group in range(opened.groups):
                packs.demand(0, group, absent)
            for group in range(opened.groups):
                packs.collect(0, group, absent)
            packs.keep()
            window.onto(opened)
            for selection in range(self._runtime.plan.selections):
                window.add(selection, absent)

    def _write(self, offloaded: OffloadedTokens, tokens: np.ndarray, kv: np.ndarray) -> Written:
        """Stores `tokens` int32 [n] after the sequence's prefix. In the thread."""
        self._sweep()
        prefix = offloaded.prefix
        layout = prefix.layout
        whole = prefix.num_tokens // layout.chunk_tokens * layout.chunk_tokens
        kv = np.ascontiguousarray(kv).view(layout.numpy_dtype)
        if whole < prefix.num_tokens:  # a segment begins with a whole chunk
            chunk = whole // layout.chunk_tokens
            head = read_kv(self._store, prefix, first_chunk=chunk, codec=self._codec)
            tokens = np.concatenate([prefix.tokens[whole:], tokens])
            kv = np.concatenate([head, kv], axis=2)
        with self._store.writer(
            fingerprint=prefix.fingerprint, layout=layout, tokens=tokens,
            parent=prefix.whole_chunks(), salt=prefix.salt, provenance=offloaded.provenance,
            codec=self._codec,
        ) as writer:  # fmt: skip
            writer.write(0, kv)
            try:
                return self._held(writer.commit())
            except BaseException:  # it may be in the store all the same
                self._remover.add([writer.segment_id])
                raise

    def _held(self, written: Prefix) -> Written:
        """What has been stored, and what keeps it there; raises where another process has swept it
        before it was held."""
        reader = self._store.reader(written)
        try:
            reader.require()
        except BaseException:
            reader.close()
            raise
        return written, reader

    def _end(self, offloaded: OffloadedTokens) -> None:
        """The sequence has ended, and reads nothing any more."""
        if _own(offloaded.prefix):
            self._prefixes.drop(offloaded.prefix)
        offloaded.kv.clear()
        if offloaded.writing is None:
            self._remover.add(_own(offloaded.prefix))
        else:
            offloaded.writing[1].add_done_callback(
                lambda written: self._give_up(offloaded, written)
            )

    def _give_up(self, offloaded: OffloadedTokens, written: Future[Written]) -> None:
        """The sequence ended before it read what is written now."""
        last = offloaded.prefix
        if written.exception() is None:
            last, reader = written.result()
            reader.close()
        self._remover.add(_own(last))

    def _sweep(self) -> None:
        """Removes, once, the segments that processes which have died left behind; those that live
        hold theirs. Raises a `CkvError` where the store gives no answer, upon which the next
        segment's turn does it."""
        if self._orphans_removed or not self._store.files.holding:
            return
        for prefix in self._store.prefixes():
            remove_line(self._store, _own(prefix))
        self._orphans_removed = True


def _own(prefix: Prefix) -> list[str]:
    """A sequence's own segments, the last one first; none of any other prefix."""
    if not prefix.provenance.startswith(_PROVENANCE_PREFIX):
        return []
    first = np.cumsum([0, *(span.num_chunks for span in prefix.spans)])
    own = zip(prefix.spans, first, strict=False)
    return [span.segment_id for span, at in own if at >= prefix.exact_chunks][::-1]


def remove_line(store: ChunkStore, line: list[str]) -> bool:
    """Removes segments of which each continues the next, by id; whether all are gone.

    It ends at one that is being read, since what that one continues must stay; segments that are
    gone already are no error. Raises a `CkvError` where the store does not know.
    """
    return all(store.remove_segment(segment) for segment in line)


class SegmentRemover:
    """Removes lines of segments in a thread of its own; thread-safe.

    Where one is being read just now, or the store gives no answer, it is tried again a little
    later, for as long as it takes. `close` tries once more, and leaves the rest to the next
    sweep of the store.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._left: list[list[str]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ckv-remover", daemon=True)
        self._thread.start()

    def add(self, line: list[str]) -> None:
        """Removes segments of which each continues the next, by id. Not after `close`."""
        if not line:
            return
        with self._changed:
            self._left.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, after a last try. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        delay = _MIN_RETRY_S
        while True:
            with self._changed:
                lines, last = list(self._left), self._closed
            why = "they are being read"
            gone = []
            for line in lines:
                try:
                    if remove_line(self._store, line):
                        gone.append(line)
                except CkvError as error:
                    why = str(error)
            with self._changed:
                self._left = [line for line in self._left if line not in gone]
                if last:
                    if self._left:
                        _log.warning("cannot remove segments of ended generations: %s", why)
                    return
                delay = _MIN_RETRY_S if gone else min(2 * delay, _MAX_RETRY_S)
                known = len(self._left)
                self._changed.wait_for(
                    lambda: self._closed or len(self._left) > known,  # noqa: B023
                    timeout=delay if known else None,
                )
