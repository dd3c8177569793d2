"""Reads of packs of one layer group: in pieces, several in flight, each checked as it arrives."""

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


class PackReads:
    """Reads packs of a prefix's segments; thread-safe."""

    def __init__(self, runs: Runs, proof: Proof, patience: Patience) -> None:
        self._runs = runs
        self._proof = proof
        self._patience = patience

    def read(
        self,
        group: int,
        chunks: np.ndarray,
        data: np.ndarray,
        places: np.ndarray,
        deadline: Deadline,
    ) -> np.ndarray:
        """Read the packs of `chunks` int [n] into rows `places` [n] of `data` [_, *pack].

        Returns bool [n]: False where a pack is bad or missing, which is reported; such rows are
        zero.
        """
        good = np.zeros(len(chunks), bool)
        size = max(1, _PIECE_BYTES // self._runs.prefix.layout.stored_bytes)
        begun: list[tuple[slice, list[_Read]]] = []
        for start in range(0, len(chunks), size):
            piece = slice(start, start + size)
            reads = self._begin(group, chunks[piece], data, places[piece], deadline)
            begun.append((piece, reads))
            if len(begun) > _PIECES:
                self._finish(group, *begun.pop(0), data, places, good, deadline)
        for piece, reads in begun:
            self._finish(group, piece, reads, data, places, good, deadline)
        if not good.all():
            self._read_again(group, chunks, data, places, good, deadline)
        return good

    def _begin(
        self,
        group: int,
        chunks: np.ndarray,
        data: np.ndarray,
        places: np.ndarray,
        deadline: Deadline,
    ) -> list[_Read]:
        """Start reading `chunks` into rows `places` of `data`: directly, or through TensorStore."""
        parts = self._runs.split(chunks)

        def start() -> list[_Read]:
            reads: list[_Read] = []
            for segment, rows, local in parts:
                direct = None
                if isinstance(segment, Segment):
                    direct = segment.begin_packs_direct(group, local, data, places[rows])
                deadline.follow(direct)
                reads.append((segment, rows, local, direct))
            return reads

        if fits(data):
            begun = deadline.start(self._patience, f"starting to read {len(chunks)} packs", start)
        else:
            begun = [(*part, None) for part in parts]
        through = [r for r in begun if isinstance(r[0], Segment) and r[3] is None]
        reads = [r for r in begun if isinstance(r[0], StoreError) or r[3] is not None]
        if through:
            reads += self._begin_batch(group, through, data, places, deadline)
        return reads

    def _begin_batch(
        self,
        group: int,
        parts: list[_Read],
        data: np.ndarray,
        places: np.ndarray,
        deadline: Deadline,
    ) -> list[_Read]:
        """Start what `parts` asks for as one batch of TensorStore's."""
        reads: list[_Read] = []
        size = sum(len(local) for _, _, local, _ in parts) * data[:1].nbytes
        deadline.admit(size, "waiting to read packs")
        with ts.Batch() as batch:
            for segment, rows, local, _ in parts:
                target = rows_of(data, places[rows])
                assert isinstance(segment, Segment)
                future = segment.begin_packs(group, local, target, batch)
                reads.append((segment, rows, local, future))
        deadline.watch([read[3] for read in reads], size)
        return reads

    def _finish(
        self,
        group: int,
        piece: slice,
        reads: list[_Read],
        data: np.ndarray,
        places: np.ndarray,
        good: np.ndarray,
        deadline: Deadline,
    ) -> None:
        """Wait for a batch, and note which of its packs are good."""
        for segment, rows, local, future in reads:
            what = f"reading {len(local)} packs"
            if isinstance(segment, StoreError):
                continue
            if isinstance(future, KernelRead):  # some are checked while others arrive
                at, ids = places[piece][rows], np.arange(len(good))[piece][rows]
                while (some := deadline.wait_some(future, what)) is not None:
                    good[ids[some]] = segment.packs_good(group, local[some], data, at[some])
            elif deadline.wait(future, what):
                good[piece][rows] = segment.packs_good(group, local, data, places[piece][rows])

    def _read_again(
        self,
        group: int,
        chunks: np.ndarray,
        data: np.ndarray,
        places: np.ndarray,
        good: np.ndarray,
        deadline: Deadline,
    ) -> None:
        """Try the packs that are not `good` one by one; report and zero what stays bad."""
        again = []
        for at in np.flatnonzero(~good).tolist():
            segment, local = self._runs.locate(int(chunks[at]))
            ids, row = np.array([local]), places[at : at + 1]
            part = data[row[0] : row[0] + 1]
            deadline.admit(part.nbytes, "waiting to read a pack again")
            future = None
            if isinstance(segment, Segment):
                future = segment.begin_packs(group, ids, part, None)
            deadline.watch([future], part.nbytes)
            again.append((at, segment, ids, row, future))
        for at, segment, ids, row, future in again:
            arrived = deadline.wait(future, "reading a pack again")
            if arrived and isinstance(segment, Segment):
                good[at] = segment.packs_good(group, ids, data, row)[0]
            if not good[at]:
                part = data[row[0] : row[0] + 1].reshape(-1).view(np.uint8)
                part[:] = 0
                where = segment, "packs", group, int(ids[0])
                good[at] = self._proof.prove(*where, int(ids[0]), f"group {group}", deadline, part)
