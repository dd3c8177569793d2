"""Reads of packs and probes of a prefix: several in flight, each checked on arrival, within a
deadline and a limit on the bytes in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from ckv_jax.storage.layout import PLAIN
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

TokenRun = tuple[Span, Opened, int, int]
"""A span, its segment, its first and its end token in the prefix."""
_Part = tuple[Opened, np.ndarray, np.ndarray]
"""A segment, which of the packs that are asked for, and their chunks within it."""


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
    """The time that the reads of one call may take together; used by one thread."""

    def __init__(self, seconds: float, gate: Gate) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._gate = gate
        self.futures: list[Any] = []
        """Reads that were started: by `watch`, or by a caller whose memory alone they hold."""
        self._starting: list[threading.Event] = []  # set when what starts reads is over

    def settle(self, error: BaseException) -> None:
        """The reads end with an error: wait until nothing is in flight any more, since the caller
        takes the buffer as free but after a ReadTimeout. Raises that when time is up."""
        for future in () if isinstance(error, ReadTimeout) else self.futures:
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
        if here.job:
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
        """What landed of a direct read, see `KernelRead.landed`; raises as `wait`."""
        left = self._end - time.monotonic()
        try:
            landed = read.landed(left if left > 0 else 0.0)
        except TimeoutError:
            raise self._late(what) from None
        if left <= 0 and not read.ended and not landed.any():
            raise self._late(what)
        return landed

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
    shifts: np.ndarray
    """int64 [spans]: what a chunk of each has less within the prefix than within the segment."""

    @classmethod
    def of(cls, prefix: Prefix, segments: Sequence[Opened]) -> Self:
        """`segments`: one for each span."""
        starts = np.cumsum([0, *(s.num_chunks for s in prefix.spans)])
        firsts = np.array([s.first_chunk for s in prefix.spans], np.int64)
        return cls(prefix, segments, starts, firsts - starts[:-1])

    def split(self, ids: np.ndarray, chunks: np.ndarray, keys: np.ndarray) -> list[_Part]:
        """Parts of `ids` int [n], whose `chunks` [n] are of one span each and `keys` [n] equal."""
        which = self.starts.searchsorted(chunks, "right") - 1
        local, both = chunks + self.shifts[which], keys * self.starts.size + which
        if np.logical_and.reduce(both == both[0]):
            return [(self.segments[which[0]], ids, local)]
        parts: list[_Part] = []
        for one in np.unique(both).tolist():
            mine = both == one
            parts.append((self.segments[one % self.starts.size], ids[mine], local[mine]))
        return parts

    def of_tokens(self) -> list[TokenRun]:
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


Report = Callable[[Segment | None, list[tuple[int, str]], bool], None]
"""Receives chunks that were not read: segment (None: it could not be opened), each chunk within it
with the reason, and whether they are proven to be bad, or gone."""


def is_gone(error: StoreError) -> bool:
    """Whether a segment could not be opened as it is gone, and not because of the disk."""
    return isinstance(error, SegmentDamaged | SegmentForeign)


@dataclass(frozen=True, slots=True)
class Proof:
    """Looks at pieces that could not be read, and reports those that stay bad."""

    report: Report
    disk_timeout: DiskTimeout

    @contextmanager
    def together(self) -> Iterator[Proof]:
        """A proof that reports at its end, what it found of a segment at once."""
        found: dict[tuple[Segment | None, bool], list[tuple[int, str]]] = {}

        def collect(segment: Segment | None, chunks: list[tuple[int, str]], proof: bool) -> None:
            found.setdefault((segment, proof), []).extend(chunks)

        try:
            yield replace(self, report=collect)
        finally:
            for (segment, proof), chunks in found.items():
                self.report(segment, chunks, proof)

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
            self.report(None, [(chunk, f"{what}: {segment}")], is_gone(segment))
            return False
        try:
            data = self.disk_timeout.run(
                what, lambda: segment.reread(kind, row, column), seconds=deadline.left()
            )
        except StoreUnavailable as e:
            self.report(segment, [(chunk, f"{what}: {e}")], False)
            return False
        if data is None:
            self.report(segment, [(chunk, f"{what}: differs from what was written")], True)
            return False
        if out is not None:
            out[:] = data
        return True


_Read = tuple[Segment, np.ndarray, np.ndarray, Any]
"""A `_Part`, and a future."""


@dataclass(slots=True, eq=False)
class PackRead:
    """One read of packs of a prefix's segments: those of `chunks` int [n] of layer groups `groups`
    [n], into rows `places` [n] of uint8 `data` [_, bytes]. Used by one thread."""

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
        ids = np.arange(self.chunks.size)
        self.good = np.zeros(ids.size, bool)
        size = _PIECE_BYTES // self.runs.prefix.layout.stored_bytes or 1
        begun: list[list[_Read]] = []
        try:
            for start in range(0, ids.size, size):
                begun.append(self._begin(ids[start : start + size]))
                if start >= _PIECES * size:
                    self._finish(begun.pop(0))
            for reads in begun:
                self._finish(reads)
            if not np.logical_and.reduce(self.good):
                with self.proof.together() as proof:
                    self._read_again(proof)
        except BaseException as error:
            self.deadline.settle(error)
            raise
        return self.good

    @property
    def _packs(self) -> np.ndarray:
        """The rows as TensorStore has them: [_, *stored] of the dtype on disk."""
        layout = self.runs.prefix.layout
        kind = layout.disk_dtype if layout.codec == PLAIN else np.uint8
        return self.data.view(kind).reshape(-1, *layout.stored_shape)

    def _begin(self, ids: np.ndarray) -> list[_Read]:
        """Start reading the packs `ids`: directly, or through TensorStore."""
        shards = self.groups[ids] // self.runs.prefix.layout.shard_groups
        parts = self.runs.split(ids, self.chunks[ids], shards)
        begun: list[_Read] = []
        through: list[_Read] = []

        def start() -> None:
            for segment, mine, local in parts:
                if isinstance(segment, StoreError):
                    continue
                groups, places = self.groups[mine], self.places[mine]
                direct = segment.begin_packs_direct(groups, local, self.data, places)
                (through if direct is None else begun).append((segment, mine, local, direct))
                if direct is not None:
                    self.deadline.futures.append(direct)

        self.deadline.start(self.proof.disk_timeout, f"starting to read {ids.size} packs", start)
        if through:
            begun += self._begin_batch(through)
        return begun

    def _begin_batch(self, parts: list[_Read]) -> list[_Read]:
        """Start what `parts` asks for as one batch of TensorStore's, of one layer group a read."""
        reads: list[_Read] = []
        packs = self._packs
        size = sum(len(local) for _, _, local, _ in parts) * packs[0].nbytes
        self.deadline.admit(size, "waiting to read packs")
        with ts.Batch() as batch:
            for segment, ids, local, _ in parts:
                groups = self.groups[ids]
                for group in np.unique(groups).tolist():
                    mine = groups == group
                    target = rows_of(packs, self.places[ids[mine]])
                    future = segment.begin_packs(group, local[mine], target, batch)
                    reads.append((segment, ids[mine], local[mine], future))
        self.deadline.watch([read[3] for read in reads], size)
        return reads

    def _finish(self, reads: list[_Read]) -> None:
        """Wait for these reads, and note which packs are good."""
        good, data = self.good, self.data
        for segment, ids, local, future in reads:
            what, groups, places = f"reading {ids.size} packs", self.groups[ids], self.places[ids]
            if isinstance(future, KernelRead):  # some are checked while others arrive
                while not future.ended:
                    some = self.deadline.wait_some(future, what)
                    found = segment.packs_good(groups[some], local[some], data, places[some])
                    good[ids[some]] = found
            elif self.deadline.wait(future, what):
                good[ids] = segment.packs_good(groups, local, data, places)

    def _read_again(self, proof: Proof) -> None:
        """Try the packs that are not good one by one; report and zero what stays bad."""
        good, data, packs = self.good, self.data, self._packs
        again = []
        for at in np.flatnonzero(~good).tolist():
            ids, row = np.array([at]), int(self.places[at])
            [(segment, _, local)] = self.runs.split(ids, self.chunks[ids], ids)
            part = packs[row : row + 1]
            self.deadline.admit(part.nbytes, "waiting to read a pack again")
            future = None
            if isinstance(segment, Segment):
                future = segment.begin_packs(int(self.groups[at]), local, part, None)
            self.deadline.watch([future], part.nbytes)
            again.append((at, row, segment, local, future))
        for at, row, segment, local, future in again:
            ids, group, chunk = np.array([at]), int(self.groups[at]), int(local[0])
            arrived = self.deadline.wait(future, "reading a pack again")
            if arrived and isinstance(segment, Segment):
                groups, places = self.groups[ids], self.places[ids]
                good[at] = segment.packs_good(groups, local, data, places)[0]
            if not good[at]:
                data[row] = 0
                part = data[row, : self.runs.prefix.layout.group_bytes(group)]
                good[at] = proof.prove(
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
            for page in np.flatnonzero(deadline.wait_some(direct, "reading a probe")).tolist():
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
