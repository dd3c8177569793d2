"""Long texts: what was generated leaves its device buffers for the store, a segment at a time, and
is chosen, read and evicted like the prefix before it (RetroInfer, every 1,024 tokens).

A segment continues the prefix that the text stands on. It is the text's alone: its provenance is
nobody else's, so that no lookup finds it, however it was computed, and it is removed when the text
ends. It is written in a thread of its own while the next tokens are generated; the text moves onto
it after a fixed number of them, so that what is attended to depends on no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from uuid import uuid4

import numpy as np

from ckv_jax.budget import Budget
from ckv_jax.decode.decoder import Decoder
from ckv_jax.decode.selection import RowSelector
from ckv_jax.decode.window import Window
from ckv_jax.errors import CkvError
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.serving.going import Going, Tail, Written
from ckv_jax.serving.leftovers import Leftovers, remove_line
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.stored_kv import read_kv
from ckv_jax.trace import Trace

LOCAL = 64
"""The latest tokens stay in the buffers (KVDrive §9.1)."""
BEHIND = 16
"""Tokens that are generated while a segment is written."""

_OWN = "text:"  # what the provenance of a text's segments begins with
_log = logging.getLogger(__name__)

SelectorOf = Callable[[int, Digest, Window], RowSelector]
"""(limit, digest, window) -> what selects for a generation from its next token on."""


def most_buffered(segment_tokens: int, chunk_tokens: int) -> int:
    """Tokens after the suffix that a text's buffers hold at most, where segments are made."""
    return segment_tokens + LOCAL + BEHIND + chunk_tokens


class Segments:
    """Moves texts of one engine onto what they generated. Engine thread only.

    Args:
        tokens: of a segment, whole chunks of which are stored.
        open_packs: the packs of some prefixes, for one use.
        selector: see `SelectorOf`.
    """

    def __init__(
        self,
        store: ChunkStore,
        prefixes: OpenPrefixes,
        plan: Plan,
        codec: Codec | None,
        *,
        tokens: int,
        open_packs: Callable[[list[Source], Trace], Packs],
        selector: SelectorOf,
    ) -> None:
        self._store = store
        self._prefixes = prefixes
        self._plan = plan
        self._codec = codec
        self._tokens = tokens
        self._open_packs = open_packs
        self._selector = selector
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckv-segment")
        self._swept = False
        self._leftovers = Leftovers(store)

    def tail(self, sequence: Sequence, window: Window, limit: int) -> Tail | None:
        """For a text that begins; None: it keeps all in its buffers, as one does whose packs do not
        stay on the device, or that stands on approximate KV."""
        prefix, sampling = sequence.prefix, sequence.sampling
        assert sampling is not None
        if not window.held or prefix.provenance != EXACT:
            return None
        most = prefix.num_tokens + len(sequence.suffix) + sampling.max_tokens
        return Tail(
            prefix=prefix,
            provenance=f"{_OWN}{uuid4().hex}",
            at=len(sequence.suffix) + self._tokens + LOCAL,
            exact=Budget.of(sequence.budget).exact,
            limit=limit,
            room=prefix.layout.num_chunks(most),
            end=self._end,
        )

    def due(self, going: Going) -> bool:
        """Whether `step` has something to do for a text, between two of its tokens."""
        return going.tail is not None and going.row.length >= going.tail.at

    def step(self, going: Going, decoder: Decoder, place: int, spare: int) -> bool:
        """Begins to write a segment, or moves onto the one that was begun; whether it moved.

        Nothing may be reading for the text's batch. `spare`: device slots that are free to be
        held. Raises `RecoveryNeeded`, upon which the same has to be tried again; any other fault
        of the store leaves the text where it is.
        """
        tail = going.tail
        assert tail is not None
        if tail.writing is None:
            self._begin(going, tail, decoder, place)
            return False
        count, future = tail.writing
        reader, moved = None, False
        try:
            prefix, reader = future.result()
            if not tail.exact or self._more(going, prefix) <= spare:
                self._move(going, tail, decoder, place, prefix, count)
                moved = True
        except CkvError as error:
            _log.warning("a text keeps what it generated in memory: %s", error)
        if reader is not None:
            reader.close()
        if not moved:
            if reader is not None:
                self._leftovers.add(_own(prefix)[:1])
            self._later(going, tail)
        return moved

    def close(self) -> None:
        """Waits for what is being written, and removes it and what else is left. All texts have
        ended."""
        self._thread.shutdown(wait=True)
        self._leftovers.close()

    def _begin(self, going: Going, tail: Tail, decoder: Decoder, place: int) -> None:
        row, sequence = going.row, going.sequence
        size = tail.prefix.layout.chunk_tokens
        count = (row.start + row.length - LOCAL) // size * size - row.start
        text = [sequence.prefix.tokens, sequence.suffix, np.array(sequence.token_ids, np.int32)]
        tokens = np.concatenate(text)[row.start : row.start + count].astype(np.int32)
        kv = decoder.kv(place, row.start)[:, :, :count]
        tail.writing = count, self._thread.submit(self._write, tail, tokens, kv)
        tail.at = row.length + BEHIND

    def _later(self, going: Going, tail: Tail) -> None:
        """No segment this time."""
        tail.writing = None
        tail.at = going.row.length + self._tokens

    def _more(self, going: Going, prefix: Prefix) -> int:
        """Device slots that a text which attends to everything takes in addition."""
        assert going.window is not None
        return prefix.num_chunks * prefix.layout.groups - going.window.slots_held

    def _move(
        self, going: Going, tail: Tail, decoder: Decoder, place: int, prefix: Prefix, count: int
    ) -> None:
        window, old = going.window, tail.prefix
        assert window is not None and going.opened is not None
        opened = self._prefixes.use(prefix, tail.room)
        try:
            if tail.exact:
                self._attend_all(window, opened)
            else:
                digest = self._prefixes.probes(opened, Trace())
                window.onto(opened)
                if going.selector is None:  # its whole prefix was one selection
                    going.selector = self._selector(tail.limit, digest, window)
                going.selector.digest = digest
        except BaseException:
            opened.close()
            raise
        if going.sequence.keep_kv:
            tail.kv.append(decoder.kv(place, going.row.start)[:, :, :count])
        decoder.shift(place, count)
        going.opened.close()
        going.opened = opened
        if tail.segments:
            self._prefixes.drop(old)
        tail.segments.append(prefix)
        tail.prefix, tail.writing = prefix, None
        tail.at = LOCAL + self._tokens
        if tail.exact:
            going.sequence.grown = prefix.num_chunks - going.sequence.prefix.num_chunks
        going.sequence.note_segment()

    def _attend_all(self, window: Window, opened: OpenPrefix) -> None:
        """Brings what a window lacks of a prefix onto the device, all of it to stay."""
        absent = window.absent(opened)
        choices = range(self._plan.choices)
        with self._open_packs([opened], Trace()) as packs:
            groups = [group for choice in choices for group in self._plan.groups(choice)]
            for group in groups:
                packs.demand(0, group, absent)
            for group in groups:
                packs.collect(0, group, absent)
            packs.keep()
            window.onto(opened)
            for choice in choices:
                window.add(choice, absent)

    def _write(self, tail: Tail, tokens: np.ndarray, kv: np.ndarray) -> Written:
        """Stores `tokens` int32 [n] after what the text stands on. In the thread."""
        self._sweep()
        prefix = tail.prefix
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
            parent=prefix.whole_chunks(), salt=prefix.salt, provenance=tail.provenance,
            codec=self._codec,
        ) as writer:  # fmt: skip
            writer.write(0, kv)
            try:
                return self._held(writer.commit())
            except BaseException:  # it may lie in the store all the same
                self._leftovers.add([writer.segment_id])
                raise

    def _held(self, written: Prefix) -> Written:
        """What has been stored, and what keeps it there; raises where somebody has swept it before
        it was held."""
        reader = self._store.reader(written)
        try:
            reader.require()
        except BaseException:
            reader.close()
            raise
        return written, reader

    def _end(self, tail: Tail) -> None:
        """The text has ended, and reads nothing any more."""
        if tail.ended:
            return
        tail.ended = True
        if tail.segments:
            self._prefixes.drop(tail.prefix)
        tail.kv.clear()
        if tail.writing is None:
            self._leftovers.add(_own(tail.prefix))
        else:
            tail.writing[1].add_done_callback(lambda written: self._give_up(tail, written))

    def _give_up(self, tail: Tail, written: Future[Written]) -> None:
        """The text ended before it moved onto what is written now."""
        last = tail.prefix
        if written.exception() is None:
            last, reader = written.result()
            reader.close()
        self._leftovers.add(_own(last))

    def _sweep(self) -> None:
        """Removes, once, what texts of processes that have died left behind; those that live hold
        what is theirs. Raises a `CkvError` where the store gives no answer, upon which the next
        segment's turn does it."""
        if self._swept or not self._store.files.holding:
            return
        for prefix in self._store.prefixes():
            remove_line(self._store, _own(prefix))
        self._swept = True


def _own(prefix: Prefix) -> list[str]:
    """A text's segments, the last one first; none of a prefix that is not a text's."""
    if not prefix.provenance.startswith(_OWN):
        return []
    first = np.cumsum([0, *(span.num_chunks for span in prefix.spans)])
    own = zip(prefix.spans, first, strict=False)
    return [span.segment_id for span, at in own if at >= prefix.exact_chunks][::-1]
