"""A read of packs of one layer group: in pieces, several in flight, each checked as it arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.place.kernel_queue import KernelRead, fits
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.segment.deadline import Deadline
from ckv_jax.storage.segment.open_segments import Opened
from ckv_jax.storage.segment.proof import Proof
from ckv_jax.storage.segment.runs import Runs, rows_of
from ckv_jax.storage.segment.segment import Segment

# A large read goes in pieces, the next ones in flight while one is checked.
_PIECE_BYTES = 8 << 20
_PIECES = 2

_Read = tuple[Opened, Any, np.ndarray, Any]  # segment, rows of the piece, chunks, future


class PackRead:
    """One read of packs of a prefix's segments. Used by one thread."""

    def __init__(
        self,
        runs: Runs,
        proof: Proof,
        patience: Patience,
        group: int,
        chunks: np.ndarray,
        data: np.ndarray,
        places: np.ndarray,
        deadline: Deadline,
    ) -> None:
        """Packs of `chunks` int [n] of layer group `group`, to be read into rows `places` [n] of
        `data` [_, *pack]."""
        self._runs = runs
        self._proof = proof
        self._patience = patience
        self._group = group
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
        chunks, places = self._chunks[piece], self._places[piece]
        parts = self._runs.split(chunks)

        def start() -> list[_Read]:
            reads: list[_Read] = []
            for segment, rows, local in parts:
                direct = None
                if isinstance(segment, Segment):
                    direct = segment.begin_packs_direct(
                        self._group, local, self._data, places[rows]
                    )
                self._deadline.follow(direct)
                reads.append((segment, rows, local, direct))
            return reads

        if fits(self._data):
            what = f"starting to read {len(chunks)} packs"
            begun = self._deadline.start(self._patience, what, start)
        else:
            begun = [(*part, None) for part in parts]
        through = [r for r in begun if isinstance(r[0], Segment) and r[3] is None]
        reads = [r for r in begun if isinstance(r[0], StoreError) or r[3] is not None]
        if through:
            reads += self._begin_batch(through, places)
        return reads

    def _begin_batch(self, parts: list[_Read], places: np.ndarray) -> list[_Read]:
        """Start what `parts` asks for as one batch of TensorStore's."""
        reads: list[_Read] = []
        size = sum(len(local) for _, _, local, _ in parts) * self._data[:1].nbytes
        self._deadline.admit(size, "waiting to read packs")
        with ts.Batch() as batch:
            for segment, rows, local, _ in parts:
                target = rows_of(self._data, places[rows])
                assert isinstance(segment, Segment)
                future = segment.begin_packs(self._group, local, target, batch)
                reads.append((segment, rows, local, future))
        self._deadline.watch([read[3] for read in reads], size)
        return reads

    def _finish(self, piece: slice, reads: list[_Read]) -> None:
        """Wait for the reads of a piece, and note which of its packs are good."""
        good, data, places = self._good, self._data, self._places[piece]
        for segment, rows, local, future in reads:
            what = f"reading {len(local)} packs"
            if isinstance(segment, StoreError):
                continue
            if isinstance(future, KernelRead):  # some are checked while others arrive
                at, ids = places[rows], np.arange(len(good))[piece][rows]
                while (some := self._deadline.wait_some(future, what)) is not None:
                    good[ids[some]] = segment.packs_good(self._group, local[some], data, at[some])
            elif self._deadline.wait(future, what):
                good[piece][rows] = segment.packs_good(self._group, local, data, places[rows])

    def _read_again(self) -> None:
        """Try the packs that are not good one by one; report and zero what stays bad."""
        group, good, data = self._group, self._good, self._data
        again = []
        for at in np.flatnonzero(~good).tolist():
            segment, local = self._runs.locate(int(self._chunks[at]))
            ids, row = np.array([local]), self._places[at : at + 1]
            part = data[row[0] : row[0] + 1]
            self._deadline.admit(part.nbytes, "waiting to read a pack again")
            future = None
            if isinstance(segment, Segment):
                future = segment.begin_packs(group, ids, part, None)
            self._deadline.watch([future], part.nbytes)
            again.append((at, segment, ids, row, future))
        for at, segment, ids, row, future in again:
            arrived = self._deadline.wait(future, "reading a pack again")
            if arrived and isinstance(segment, Segment):
                good[at] = segment.packs_good(group, ids, data, row)[0]
            if not good[at]:
                part = data[row[0] : row[0] + 1].reshape(-1).view(np.uint8)
                part[:] = 0
                what, chunk = f"group {group}", int(ids[0])
                good[at] = self._proof.prove(
                    segment, "packs", group, chunk, chunk, what, self._deadline, part
                )
