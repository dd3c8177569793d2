"""Reads of packs and probes of a prefix: several in flight, each checked on arrival, within a
deadline and a limit on the bytes in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import tensorstore as ts

from ckv_jax.storage.errors import (
    READ_ERRORS,
    ReadTimeout,
    SegmentDamaged,
    SegmentForeign,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.place.disk import DiskTimeout, Refused, here
from ckv_jax.storage.place.kernel_queue import KernelRead
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.segment import Opened, Segment

T = TypeVar("T")

MAX_IN_FLIGHT = 40 << 20
"""Bytes in flight in one store: what TensorStore may hold beside the callers' buffers."""
# A large read goes in pieces, the next ones in flight while one is checked.
_PIECE_BYTES = 8 << 20
_PIECES = 2

Run = tuple[Span, Opened, int, int]
"""A span, its segment, its first and its end token in the prefix."""
_Part = tuple[Opened, np.ndarray, np.ndarray]
"""A segment, rows of a piece, and their chunks within it."""


class Gate:
    """Lets reads start while the bytes in flight stay within a bound; thread-safe."""

    def __init__(self, max_bytes: int = MAX_IN_FLIGHT) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self.bytes = 0
        """Bytes in flight now."""

    def enter(self, num_bytes: int, timeout: float) -> bool:
        """Wait until `num_bytes` may be read, at the latest when nothing else is; False if late."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: not self.bytes or self.bytes + num_bytes <= self._max_bytes, timeout
            )
            self.bytes += num_bytes if free else 0
            return free

    def leave(self, num_bytes: int) -> None:
        """These bytes have arrived, or never will."""
        with self._changed:
            self.bytes -= num_bytes
            self._changed.notify_all()


class Deadline:
    """The time that the reads of one call may take together; used by one thread.

    A context manager: what leaves it by an error other than ReadTimeout waits until nothing is in
    flight any more, since the caller then takes the buffer as free. Raises ReadTimeout
    instead when time is up.
    """

    def __init__(self, seconds: float, gate: Gate) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._gate = gate
        self.futures: list[Any] = []
        """Reads that were started: by `watch`, or by a caller whose memory alone they hold."""
        self._starting: list[threading.Event] = []  # set when what starts reads is over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, ReadTimeout):
            for future in self.futures:
                self.wait(future, "waiting for reads after an error")

    def left(self) -> float:
        """Seconds that are left, and a moment more."""
        return max(0.001, self._end - time.monotonic())

    def admit(self, num_bytes: int, what: str) -> None:
        """Wait for the gate; raises ReadTimeout. What is admitted must be given to `watch`."""
        if not self._gate.enter(num_bytes, max(0.0, self._end - time.monotonic())):
            raise self._late(what)

    def start(self, disk_timeout: DiskTimeout, what: str, work: Callable[[], T]) -> T:
        """Run `work`, which starts reads and adds them to `futures`: opening a file may take for
        ever. Raises ReadTimeout when time is up; `work` may still start reads then."""
        if here():
            return work()
        over = threading.Event()

        def run() -> T:
            try:
                return work()
            finally:
                over.set()

        self._starting.append(over)
        try:
            return disk_timeout.run(what, run, seconds=self.left())
        except Refused:
            over.set()
            raise self._late(what) from None
        except StoreUnavailable:
            if over.is_set():
                raise
            raise self._late(what) from None

    def watch(self, futures: list[Any], num_bytes: int) -> None:
        """Adds reads that were admitted together; an entry of None is no read. The last read to
        land gives the admission back."""
        begun = [f for f in futures if f is not None]
        self.futures += begun
        gate, lock, left = self._gate, threading.Lock(), len(begun)
        if not begun:
            gate.leave(num_bytes)

        def landed(_: Any) -> None:  # called from TensorStore's threads
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                gate.leave(num_bytes)

        for future in begun:
            future.add_done_callback(landed)

    def wait(self, future: Any, what: str) -> bool:
        """Wait for one read; False when it failed or is None.

        A read that failed has stopped writing into its buffer: TensorStore reports an error only
        when nothing of the read is left in flight.

        Raises:
          ReadTimeout: when time is up. Nothing is cancelled: a cancelled read would report itself
            done while it can still write into the buffer.
        """
        if future is None:
            return False
        try:
            future.result(timeout=max(0.0, self._end - time.monotonic()))
        except TimeoutError:
            raise self._late(what) from None
        except READ_ERRORS:
            return False
        return True

    def wait_some(self, read: KernelRead, what: str) -> np.ndarray:
        """What landed of a direct read that has not ended, see `KernelRead.landed`; raises as
        `wait`."""
        try:
            landed = read.landed(timeout=self._end - time.monotonic())
        except TimeoutError:
            raise self._late(what) from None
        return np.zeros(0, np.int64) if landed is None else landed

    def _late(self, what: str) -> ReadTimeout:
        futures, starting = self.futures, self._starting

        def settled() -> bool:
            over = all(s.is_set() for s in starting)
            # Asks each: that marks the read as late.
            return all([f.done() for f in tuple(futures)]) and over

        settled()
        return ReadTimeout(what, self._seconds, settled)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The spans of a prefix with their segments, or why one could not be opened."""

    prefix: Prefix
    segments: Sequence[Opened]
    starts: np.ndarray
    """int64 [spans + 1]: the first chunk of each span in the prefix, and the end of the last."""

    @classmethod
    def of(cls, prefix: Prefix, segments: Sequence[Opened]) -> Self:
        """`segments`: one for each span."""
        return cls(prefix, segments, np.cumsum([0, *(s.num_chunks for s in prefix.spans)]))

    def split(self, chunks: np.ndarray, keys: np.ndarray) -> list[_Part]:
        """Parts of `chunks` int [n], each of one span and of equal `keys` int [n]."""
        spans, segments = self.prefix.spans, self.segments
        if len(spans) == 1 and (keys == keys[0]).all():
            return [(segments[0], np.arange(len(chunks)), chunks + spans[0].first_chunk)]
        which = np.searchsorted(self.starts, chunks, side="right") - 1
        both = keys * len(spans) + which
        parts: list[_Part] = []
        for one in np.unique(both).tolist():
            rows, i = np.flatnonzero(both == one), one % len(spans)
            local = chunks[rows] - self.starts[i] + spans[i].first_chunk
            parts.append((segments[i], rows, local))
        return parts

    def locate(self, chunk: int) -> tuple[Opened, int]:
        """The segment of a chunk, and the chunk within it."""
        i = int(np.searchsorted(self.starts, chunk, side="right")) - 1
        return self.segments[i], chunk - int(self.starts[i]) + self.prefix.spans[i].first_chunk

    def of_tokens(self) -> list[Run]:
        """(span, segment, first token, end token) of every span, in tokens of the prefix."""
        size, total = self.prefix.layout.chunk_tokens, self.prefix.num_tokens
        bounds = np.minimum(self.starts * size, total).tolist()
        pairs = zip(self.prefix.spans, self.segments, bounds, bounds[1:], strict=False)
        return list(pairs)


def rows_of(data: np.ndarray, rows: np.ndarray) -> Any:
    """Rows of `data` to read into: a view where they lie together, else a TensorStore view."""
    if (np.diff(rows) == 1).all():
        return data[rows[0] : rows[-1] + 1]
    return ts.array(data).oindex[rows]


Report = Callable[[Segment | None, int, str, bool], None]
"""Receives a chunk that was not read: segment (None: it could not be opened), chunk within it,
reason, and whether it is proven to be bad, or gone."""


def is_gone(error: StoreError) -> bool:
    """Whether a segment could not be opened as it is gone, and not because of the disk."""
    return isinstance(error, SegmentDamaged | SegmentForeign)


@dataclass(frozen=True, slots=True)
class Proof:
    """Looks at pieces that could not be read, and reports those that stay bad."""

    tell: Report
    disk_timeout: DiskTimeout

    def prove(
        self,
        segment: Opened,
        kind: str,
        row: int,
        column: int,
        chunk: int,
        what: str,
        deadline: Deadline,
        out: np.ndarray | None = None,
    ) -> bool:
        """Look at a piece that was not good twice; report it, or put its bytes into uint8 `out`.

        Only what its own bytes prove bad is reported as bad: the reads may have failed for other
        reasons. Returns whether the piece turned out to be good.
        """
        if isinstance(segment, StoreError):
            self.tell(None, chunk, f"{what}: {segment}", is_gone(segment))
            return False
        try:
            data = self.disk_timeout.run(
                what, lambda: segment.reread(kind, row, column), seconds=deadline.left()
            )
        except StoreUnavailable as e:
            self.tell(segment, chunk, f"{what}: {e}", False)
            return False
        if data is None:
            self.tell(segment, chunk, f"{what}: differs from what was written", True)
            return False
        if out is not None:
            out[:] = data
        return True


_Read = tuple[Segment, np.ndarray, np.ndarray, Any]
"""A `_Part`, and a future."""


@dataclass(slots=True, eq=False)
class PackRead:
    """One read of packs of a prefix's segments: those of `chunks` int [n] of layer groups `groups`
    [n], into rows `places` [n] of `data` [_, *pack]. Used by one thread."""

    runs: Runs
    proof: Proof
    groups: np.ndarray
    chunks: np.ndarray
    data: np.ndarray
    places: np.ndarray
    deadline: Deadline
    good: np.ndarray = field(init=False)

    def run(self) -> np.ndarray:
        """Read them all; bool [n]: False where a pack is bad or missing, which is reported. Such
        rows are zero."""
        self.good = np.zeros(len(self.chunks), bool)
        size = max(1, _PIECE_BYTES // self.runs.prefix.layout.stored_bytes)
        begun: list[tuple[slice, list[_Read]]] = []
        for start in range(0, len(self.chunks), size):
            piece = slice(start, start + size)
            begun.append((piece, self._begin(piece)))
            if len(begun) > _PIECES:
                self._finish(*begun.pop(0))
        for piece, reads in begun:
            self._finish(piece, reads)
        if not self.good.all():
            self._read_again()
        return self.good

    def _begin(self, piece: slice) -> list[_Read]:
        """Start reading the chunks of a piece: directly, or through TensorStore."""
        chunks, places, groups = self.chunks[piece], self.places[piece], self.groups[piece]
        shards = groups // self.runs.prefix.layout.shard_groups
        parts = self.runs.split(chunks, shards)
        begun: list[_Read] = []
        through: list[_Read] = []

        def start() -> None:
            for segment, rows, local in parts:
                if isinstance(segment, StoreError):
                    continue
                direct = segment.begin_packs_direct(groups[rows], local, self.data, places[rows])
                (through if direct is None else begun).append((segment, rows, local, direct))
                if direct is not None:
                    self.deadline.futures.append(direct)

        self.deadline.start(self.proof.disk_timeout, f"starting to read {len(chunks)} packs", start)
        if through:
            begun += self._begin_batch(through, places, groups)
        return begun

    def _begin_batch(
        self, parts: list[_Read], places: np.ndarray, groups: np.ndarray
    ) -> list[_Read]:
        """Start what `parts` asks for as one batch of TensorStore's, of one layer group a read."""
        reads: list[_Read] = []
        size = sum(len(local) for _, _, local, _ in parts) * self.data[:1].nbytes
        self.deadline.admit(size, "waiting to read packs")
        with ts.Batch() as batch:
            for segment, rows, local, _ in parts:
                for group in np.unique(groups[rows]).tolist():
                    mine = groups[rows] == group
                    target = rows_of(self.data, places[rows[mine]])
                    future = segment.begin_packs(group, local[mine], target, batch)
                    reads.append((segment, rows[mine], local[mine], future))
        self.deadline.watch([read[3] for read in reads], size)
        return reads

    def _finish(self, piece: slice, reads: list[_Read]) -> None:
        """Wait for the reads of a piece, and note which of its packs are good."""
        good, data, places = self.good, self.data, self.places[piece]
        groups = self.groups[piece]
        for segment, rows, local, future in reads:
            what = f"reading {len(local)} packs"
            if isinstance(future, KernelRead):  # some are checked while others arrive
                at, ids, of = places[rows], piece.start + rows, groups[rows]
                while not future.ended:
                    some = self.deadline.wait_some(future, what)
                    good[ids[some]] = segment.packs_good(of[some], local[some], data, at[some])
            elif self.deadline.wait(future, what):
                good[piece][rows] = segment.packs_good(groups[rows], local, data, places[rows])

    def _read_again(self) -> None:
        """Try the packs that are not good one by one; report and zero what stays bad."""
        good, data = self.good, self.data
        again = []
        for at in np.flatnonzero(~good).tolist():
            segment, local = self.runs.locate(int(self.chunks[at]))
            ids, row, group = np.array([local]), self.places[at : at + 1], int(self.groups[at])
            part = data[row[0] : row[0] + 1]
            self.deadline.admit(part.nbytes, "waiting to read a pack again")
            future = None
            if isinstance(segment, Segment):
                future = segment.begin_packs(group, ids, part, None)
            self.deadline.watch([future], part.nbytes)
            again.append((at, segment, ids, row, future))
        for at, segment, ids, row, future in again:
            groups = self.groups[at : at + 1]
            arrived = self.deadline.wait(future, "reading a pack again")
            if arrived and isinstance(segment, Segment):
                good[at] = segment.packs_good(groups, ids, data, row)[0]
            if not good[at]:
                part = data[row[0] : row[0] + 1].reshape(-1).view(np.uint8)
                part[:] = 0
                group, chunk = int(groups[0]), int(ids[0])
                part = part[: self.runs.prefix.layout.group_bytes(group)]
                good[at] = self.proof.prove(
                    segment, "packs", group, chunk, chunk, f"group {group}", self.deadline, part
                )


def read_probe_pages(
    segment: Segment,
    row: int,
    first: np.ndarray,
    tokens: np.ndarray,
    data: np.ndarray,
    rows: np.ndarray,
    deadline: Deadline,
    disk_timeout: DiskTimeout,
) -> np.ndarray:
    """Read runs of `tokens` int [n] tokens, from chunks `first` [n] of a probe layer on, into the
    starts of `rows` [n] of uint8 `data` [_, R]; int64 [n], how many leading tokens are good."""
    layout = segment.manifest.layout
    heads, dim, kind = layout.probe_heads, layout.head_dim, layout.disk_dtype
    sizes = tokens * (heads * dim * kind.itemsize)
    parts = [
        data[at, :size].view(kind).reshape(-1, heads, dim)
        for at, size in zip(rows.tolist(), sizes.tolist(), strict=True)
    ]
    good = np.zeros(len(rows), np.int64)

    def check(page: int) -> None:
        good[page] = segment.probe_good(row, parts[page], int(first[page]))

    def begin() -> KernelRead | None:
        direct = segment.begin_probe_direct(row, first, sizes, data, rows)
        if direct is not None:
            deadline.futures.append(direct)
        return direct

    direct = deadline.start(disk_timeout, f"starting to read {len(rows)} pages of a probe", begin)
    if direct is not None:
        while not direct.ended:
            for page in deadline.wait_some(direct, "reading a probe").tolist():
                check(page)
    left = np.flatnonzero(good < tokens).tolist()
    if left:
        size = int(sizes[left].sum())
        deadline.admit(size, "waiting to read a probe")
        with ts.Batch() as batch:
            begun = [
                segment.begin_part(
                    "probe", row, int(first[i]) * layout.chunk_tokens, parts[i], batch
                )
                for i in left
            ]
        deadline.watch(begun, size)
        for page, future in zip(left, begun, strict=True):
            if deadline.wait(future, "reading a probe"):
                check(page)
            else:
                good[page] = 0
    return good
