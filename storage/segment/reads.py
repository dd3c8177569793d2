"""Reads of packs and probes of a prefix: in pieces, several in flight, each checked on arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import tensorstore as ts

from ckv_jax.storage.errors import (
    SegmentDamaged,
    SegmentForeign,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.place.disk_timeout import DiskTimeout
from ckv_jax.storage.place.kernel_queue import KernelRead, fits
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.deadline import Deadline
from ckv_jax.storage.segment.segment import Opened, Segment

# A large read goes in pieces, the next ones in flight while one is checked.
_PIECE_BYTES = 8 << 20
_PIECES = 2

Run = tuple[Span, Opened, int, int]
"""A span, its segment, its first and its end token in the prefix."""


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

    def split(self, chunks: np.ndarray) -> list[tuple[Opened, Any, np.ndarray]]:
        """(segment, rows, chunks within it) of every span that `chunks` touch."""
        spans, segments = self.prefix.spans, self.segments
        if len(spans) == 1:
            return [(segments[0], slice(None), chunks + spans[0].first_chunk)]
        which = np.searchsorted(self.starts, chunks, side="right") - 1
        parts: list[tuple[Opened, Any, np.ndarray]] = []
        for i in np.unique(which):
            rows = np.flatnonzero(which == i)
            local = chunks[rows] - self.starts[i] + spans[i].first_chunk
            run = rows[-1] - rows[0] == len(rows) - 1
            parts.append((segments[i], slice(rows[0], rows[-1] + 1) if run else rows, local))
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
"""Told of a chunk that was not read: segment (None: it could not be opened), chunk within it,
reason, and whether it is proven to be bad, or gone."""


def is_gone(error: StoreError) -> bool:
    """Whether a segment could not be opened as it is gone, and not because of the disk."""
    return isinstance(error, SegmentDamaged | SegmentForeign)


class Proof:
    """Looks at pieces that could not be read, and tells of those that stay bad."""

    def __init__(self, tell: Report, disk_timeout: DiskTimeout) -> None:
        self._tell = tell
        self._disk_timeout = disk_timeout

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
            self._tell(None, chunk, f"{what}: {segment}", is_gone(segment))
            return False
        try:
            data = self._disk_timeout.run(
                what, lambda: segment.reread(kind, row, column), seconds=deadline.left()
            )
        except StoreUnavailable as e:
            self._tell(segment, chunk, f"{what}: {e}", False)
            return False
        if data is None:
            self._tell(segment, chunk, f"{what}: not as it was written", True)
            return False
        if out is not None:
            out[:] = np.frombuffer(data, np.uint8)
        return True


_Part = tuple[Opened, np.ndarray, np.ndarray]
"""A segment, rows of a piece, and their chunks within it."""
_Read = tuple[Opened, np.ndarray, np.ndarray, Any]
"""The same, and a future."""


class PackRead:
    """One read of packs of a prefix's segments. Used by one thread."""

    def __init__(
        self,
        runs: Runs,
        proof: Proof,
        disk_timeout: DiskTimeout,
        groups: np.ndarray,
        chunks: np.ndarray,
        data: np.ndarray,
        places: np.ndarray,
        deadline: Deadline,
    ) -> None:
        """Packs of `chunks` int [n] of layer groups `groups` [n], to be read into rows `places` [n]
        of `data` [_, *pack]."""
        self._runs = runs
        self._proof = proof
        self._disk_timeout = disk_timeout
        self._groups = groups
        self._chunks = chunks
        self._data = data
        self._places = places
        self._deadline = deadline
        self._good = np.zeros(len(chunks), bool)

    def run(self) -> np.ndarray:
        """Read them all.

        Returns bool [n]: False where a pack is bad or missing, which is reported; such rows are
        zero.
        """
        size = max(1, _PIECE_BYTES // self._runs.prefix.layout.stored_bytes)
        begun: list[tuple[slice, list[_Read]]] = []
        for start in range(0, len(self._chunks), size):
            piece = slice(start, start + size)
            begun.append((piece, self._begin(piece)))
            if len(begun) > _PIECES:
                self._finish(*begun.pop(0))
        for piece, reads in begun:
            self._finish(piece, reads)
        if not self._good.all():
            self._read_again()
        return self._good

    def _begin(self, piece: slice) -> list[_Read]:
        """Start reading the chunks of a piece: directly, or through TensorStore."""
        chunks, places, groups = self._chunks[piece], self._places[piece], self._groups[piece]
        shards = groups // self._runs.prefix.layout.shard_groups
        parts = self._split(chunks, shards)

        begun: list[_Read] = []
        through: list[_Read] = []

        def start() -> None:
            for segment, rows, local in parts:
                direct = None
                if isinstance(segment, Segment):
                    direct = segment.begin_packs_direct(
                        groups[rows], local, self._data, places[rows]
                    )
                    self._deadline.follow(direct)
                    (through if direct is None else begun).append((segment, rows, local, direct))

        if fits(self._data):
            self._deadline.start(self._disk_timeout, f"starting to read {len(chunks)} packs", start)
        else:
            through = [(*part, None) for part in parts if isinstance(part[0], Segment)]
        if through:
            begun += self._begin_batch(through, places, groups)
        return begun

    def _split(self, chunks: np.ndarray, keys: np.ndarray) -> list[_Part]:
        """Parts of equal `keys` int [n] and one segment each."""
        parts: list[_Part] = []
        if (keys == keys[0]).all():
            every = np.arange(len(chunks))
            for segment, rows, local in self._runs.split(chunks):
                parts.append((segment, every[rows], local))
            return parts
        for key in np.unique(keys):
            mine = np.flatnonzero(keys == key)
            for segment, rows, local in self._runs.split(chunks[mine]):
                parts.append((segment, mine[rows], local))
        return parts

    def _begin_batch(
        self, parts: list[_Read], places: np.ndarray, groups: np.ndarray
    ) -> list[_Read]:
        """Start what `parts` asks for as one batch of TensorStore's, of one layer group a read."""
        reads: list[_Read] = []
        size = sum(len(local) for _, _, local, _ in parts) * self._data[:1].nbytes
        self._deadline.admit(size, "waiting to read packs")
        with ts.Batch() as batch:
            for segment, rows, local, _ in parts:
                assert isinstance(segment, Segment)
                for group in np.unique(groups[rows]).tolist():
                    mine = groups[rows] == group
                    target = rows_of(self._data, places[rows[mine]])
                    future = segment.begin_packs(group, local[mine], target, batch)
                    reads.append((segment, rows[mine], local[mine], future))
        self._deadline.watch([read[3] for read in reads], size)
        return reads

    def _finish(self, piece: slice, reads: list[_Read]) -> None:
        """Wait for the reads of a piece, and note which of its packs are good."""
        good, data, places = self._good, self._data, self._places[piece]
        groups = self._groups[piece]
        for segment, rows, local, future in reads:
            what = f"reading {len(local)} packs"
            assert isinstance(segment, Segment)
            if isinstance(future, KernelRead):  # some are checked while others arrive
                at, ids, of = places[rows], np.arange(len(good))[piece][rows], groups[rows]
                while not future.ended:
                    some = self._deadline.wait_some(future, what)
                    good[ids[some]] = segment.packs_good(of[some], local[some], data, at[some])
            elif self._deadline.wait(future, what):
                good[piece][rows] = segment.packs_good(groups[rows], local, data, places[rows])

    def _read_again(self) -> None:
        """Try the packs that are not good one by one; report and zero what stays bad."""
        good, data = self._good, self._data
        again = []
        for at in np.flatnonzero(~good).tolist():
            segment, local = self._runs.locate(int(self._chunks[at]))
            ids, row, group = np.array([local]), self._places[at : at + 1], int(self._groups[at])
            part = data[row[0] : row[0] + 1]
            self._deadline.admit(part.nbytes, "waiting to read a pack again")
            future = None
            if isinstance(segment, Segment):
                future = segment.begin_packs(group, ids, part, None)
            self._deadline.watch([future], part.nbytes)
            again.append((at, segment, ids, row, future))
        for at, segment, ids, row, future in again:
            groups = self._groups[at : at + 1]
            arrived = self._deadline.wait(future, "reading a pack again")
            if arrived and isinstance(segment, Segment):
                good[at] = segment.packs_good(groups, ids, data, row)[0]
            if not good[at]:
                part = data[row[0] : row[0] + 1].reshape(-1).view(np.uint8)
                part[:] = 0
                group, chunk = int(groups[0]), int(ids[0])
                good[at] = self._proof.prove(
                    segment, "packs", group, chunk, chunk, f"group {group}", self._deadline, part
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
        deadline.follow(direct)
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
                segment.begin_probe(row, int(first[i]) * layout.chunk_tokens, parts[i], batch)
                for i in left
            ]
        deadline.watch(begun, size)
        for page, future in zip(left, begun, strict=True):
            if deadline.wait(future, "reading a probe"):
                check(page)
            else:
                good[page] = 0
    return good
