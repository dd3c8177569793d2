"""Reading a prefix: packs, probes and digests straight into the caller's buffers, all checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import tensorstore as ts

from ckv_jax.storage.digest.data import DigestData
from ckv_jax.storage.digest.reader import read_digest
from ckv_jax.storage.errors import ReadTimeout, SegmentDamaged, StoreClosed, StoreUnavailable
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.place.kernel_queue import KernelRead, fits
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.deadline import Deadline, Gate
from ckv_jax.storage.segment.runs import Runs, rows_of
from ckv_jax.storage.segment.segment import Segment

# A large read goes in pieces, the next ones in flight while one is checked.
_PIECE_BYTES = 8 << 20
_PIECES = 2

_Read = tuple[Segment | None, Any, np.ndarray, Any]  # segment, rows of the piece, chunks, future
Report = Callable[[Segment | None, int, str, bool], None]
"""Told of a chunk that was not read: segment (None: it is gone), chunk within it, reason, and
whether it is proven to be bad."""


class PrefixReader:
    """Reads one prefix; its segments stay on disk until `close()`. Thread-safe, a context manager.

    Chunk ids are global: [0, prefix.num_chunks) over all spans.
    """

    def __init__(
        self,
        prefix: Prefix,
        segments: list[Segment | None],
        *,
        deadline_s: float,
        gate: Gate,
        report: Report,
        count: Callable[[str], None],
        patience: Patience,
        release: Callable[[list[Segment | None]], None],
    ) -> None:
        self.prefix = prefix
        self._runs = Runs(prefix, segments)
        self._deadline_s = deadline_s
        self._gate = gate
        self._report = report
        self._release = release
        self._count = count
        self._patience = patience
        self._lock = threading.Lock()
        self._closed = False

    # -- packs -----------------------------------------------------------------------------------

    def read_packs(
        self,
        group: int,
        chunks: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
        deadline_s: float | None = None,
    ) -> np.ndarray:
        """Read the packs of `chunks` int [n] of one layer group into `out`.

        Args:
          group: layer group.
          chunks: global chunk ids, in any order.
          out: [n, *layout.stored_shape] of layout.stored_dtype, C-contiguous; filled in place with
            packs as they lie on disk. A partial last chunk is zero past its tokens.
          rows: distinct int [n], the rows of an `out` of any length that the packs go to; None:
            the first n, in order. Other rows are left alone.
          deadline_s: seconds for the whole call; default: the reader's.

        Returns:
          bool [n]: False where the pack is bad or missing; such rows of `out` are zero.

        Raises:
          ReadTimeout: the reads may still write into `out` until the error's `settled()`.
        """
        layout = self.prefix.layout
        chunks = np.asarray(chunks)
        size = len(chunks) if rows is None else len(out)
        self._check(out, (size, *layout.stored_shape), layout.stored_dtype)
        layout.group_layers(group)
        if len(chunks) == 0:
            return np.zeros(0, bool)
        if chunks.min() < 0 or chunks.max() >= self.prefix.num_chunks:
            raise ValueError(
                f"chunks: got ids in [{chunks.min()}, {chunks.max()}], "
                f"expected [0, {self.prefix.num_chunks})"
            )
        data = out.view(layout.disk_dtype) if layout.codec == PLAIN else out
        places = np.arange(len(chunks)) if rows is None else rows
        good = np.zeros(len(chunks), bool)
        size = max(1, _PIECE_BYTES // layout.stored_bytes)
        begun: list[tuple[slice, list[_Read]]] = []
        with self._deadline(deadline_s) as deadline:
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
                direct = segment and segment.begin_packs_direct(group, local, data, places[rows])
                deadline.follow(direct)
                reads.append((segment, rows, local, direct))
            return reads

        if fits(data):
            begun = deadline.start(self._patience, f"starting to read {len(chunks)} packs", start)
        else:
            begun = [(*part, None) for part in parts]
        reads = [read for read in begun if read[0] is None or read[3] is not None]
        through = [read for read in begun if read[0] is not None and read[3] is None]
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
                future = segment and segment.begin_packs(group, local, target, batch)
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
            if segment and isinstance(future, KernelRead):  # some are checked while others arrive
                at, ids = places[piece][rows], np.arange(len(good))[piece][rows]
                while (some := deadline.wait_some(future, what)) is not None:
                    good[ids[some]] = segment.packs_good(group, local[some], data, at[some])
            elif segment and deadline.wait(future, what):
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
            future = segment and segment.begin_packs(group, ids, part, None)
            deadline.watch([future], part.nbytes)
            again.append((at, segment, ids, row, future))
        for at, segment, ids, row, future in again:
            arrived = deadline.wait(future, "reading a pack again")
            good[at] = segment and arrived and segment.packs_good(group, ids, data, row)[0]
            if not good[at]:
                part = data[row[0] : row[0] + 1].reshape(-1).view(np.uint8)
                part[:] = 0
                where = segment, "packs", group, int(ids[0])
                good[at] = self._prove(*where, int(ids[0]), f"group {group}", deadline, part)

    def _prove(
        self,
        segment: Segment | None,
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
        if segment is None:
            self._report(None, chunk, f"{what}: gone", False)
            return False
        try:
            data = self._patience.run(
                what, lambda: segment.reread(kind, row, column), seconds=deadline.left()
            )
        except StoreUnavailable as e:
            self._report(segment, chunk, f"{what}: {e}", False)
            return False
        if data is None:
            self._report(segment, chunk, f"{what}: not as it was written", True)
            return False
        if out is not None:
            out[:] = np.frombuffer(data, np.uint8)
        return True

    # -- probe -----------------------------------------------------------------------------------

    def read_probe(self, layer: int, out: np.ndarray, *, deadline_s: float | None = None) -> int:
        """Read the probe keys of `layer` into `out` [T, K', D] of layout.numpy_dtype.

        K' is all KV heads for "keys" and the first three for "heads". Returns how many leading
        tokens are good; the rest of `out` is zero. Raises as `read_packs`.
        """
        layout = self.prefix.layout
        if layer not in layout.probe_layers:
            raise ValueError(f"layer: got {layer}, expected one of {layout.probe_layers}")
        row = layout.probe_layers.index(layer)
        shape = (self.prefix.num_tokens, layout.probe_heads, layout.head_dim)
        self._check(out, shape, layout.numpy_dtype)
        data = out.view(layout.disk_dtype)
        with self._deadline(deadline_s) as deadline:
            for span, segment, start, end in self._runs.of_tokens():
                # A span that starts inside its segment is read, and checked, from the start.
                skip = span.first_chunk * layout.chunk_tokens
                shape = (skip + end - start, *data.shape[1:])
                part = np.empty(shape, data.dtype) if skip else data[start:end]
                whole = self._read_probe_part(segment, row, part, deadline) if segment else 0
                good = max(0, whole - skip)
                if skip:
                    data[start : start + good] = part[skip : skip + good]
                if whole < len(part):
                    data[start + good :] = 0
                    chunk, what = whole // layout.chunk_tokens, f"probe of layer {layer}"
                    self._prove(segment, "probe", row, chunk, chunk, what, deadline)
                    return start + good
        return self.prefix.num_tokens

    def _read_probe_part(
        self, segment: Segment, row: int, part: np.ndarray, deadline: Deadline
    ) -> int:
        """Read the first tokens of a segment's probe layer into `part`; how many are good."""
        block = segment.manifest.arrays["probe"].inner[1]
        step = max(1, _PIECE_BYTES // (block * part[0].nbytes)) * block
        begun: list[tuple[int, Any]] = []
        for at in range(0, len(part), step):
            begin = partial(
                self._begin_probe_direct, segment, row, at, part[at : at + step], deadline
            )
            direct = deadline.start(self._patience, "starting to read a probe", begin)
            through = None if direct else self._begin_probe(segment, row, part, at, step, deadline)
            begun.append((at, direct or through))
        arrived = len(part)
        for at, future in begun:  # all of them: none may write when this returns
            good = deadline.wait(future, "reading a probe")
            if not good and isinstance(future, KernelRead):
                again = self._begin_probe(segment, row, part, at, step, deadline)
                good = deadline.wait(again, "reading a probe again")
            arrived = arrived if good else min(arrived, at)
        return segment.probe_good(row, part[:arrived])

    @staticmethod
    def _begin_probe_direct(
        segment: Segment, row: int, at: int, out: np.ndarray, deadline: Deadline
    ) -> KernelRead | None:
        direct = segment.begin_probe_direct(row, at, out)
        deadline.follow(direct)
        return direct

    def _begin_probe(
        self, segment: Segment, row: int, part: np.ndarray, at: int, step: int, deadline: Deadline
    ) -> Any:
        piece = part[at : at + step]
        deadline.admit(piece.nbytes, "waiting to read a probe")
        future = segment.begin_probe(row, at, piece, None)
        deadline.watch([future], piece.nbytes)
        return future

    # -- digest and mapping ----------------------------------------------------------------------

    def read_digest(self, *, deadline_s: float | None = None) -> DigestData | None:
        """The compressed keys of all layers and tokens.

        None when the layout has none, or any of it is bad, missing, or did not come in time.
        """
        self._open()
        if self.prefix.layout.digest == "none" or not self.prefix.spans:
            return None
        deadline = self._deadline(deadline_s)

        def prove(segment: Segment | None, row: int, part: int) -> bool:
            return self._prove(segment, "digest", row, part, 0, "digest", deadline)

        try:
            found = read_digest(self.prefix, self._runs.of_tokens(), deadline, prove)
        except ReadTimeout:  # what is late writes into memory that nobody else has
            found = None
        if found is None:
            self._count("lost_digests")
        elif found.mixed:
            self._count("mixed_digests")
        return found

    @property
    def order(self) -> np.ndarray:
        """int32 [T]: the prefix position of each token as stored; not the identity if reordered.

        Raises SegmentDamaged where that is lost with its segment: look the prefix up again.
        """
        self._open()
        order = np.arange(self.prefix.num_tokens, dtype=np.int32)
        for span, segment, start, end in self._runs.of_tokens():
            if segment is None and self.prefix.layout.reordered:
                raise SegmentDamaged(f"segment {span.segment_id}: gone, and its order with it")
            if segment and segment.manifest.order is not None:
                order[start:end] = start + segment.manifest.order
        return order

    # -- life ------------------------------------------------------------------------------------

    def _deadline(self, seconds: float | None) -> Deadline:
        return Deadline(self._deadline_s if seconds is None else seconds, self._gate)

    def _open(self) -> None:
        if self._closed:
            raise StoreClosed("the reader is closed")

    def _check(self, out: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._open()
        if out.shape != shape or out.dtype != dtype:
            raise ValueError(f"out: got {out.dtype} {out.shape}, expected {dtype} {shape}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out: expected a C-contiguous, writable array")

    def close(self) -> None:
        """Let the segments go; may be called twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._release(self._runs.segments)

    def __enter__(self) -> PrefixReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
