"""Reader of a prefix: reads packs, probes and digests into the caller's buffers and checks them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ckv_jax.storage.digest import DigestData, read_digest
from ckv_jax.storage.errors import (
    ReadTimeout,
    SegmentDamaged,
    StoreClosed,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.layout import order_of
from ckv_jax.storage.prefix import Prefix, ProbePages
from ckv_jax.storage.segment import reads
from ckv_jax.storage.segment.reads import Deadline, Gate, PackRead, Proof, Runs, is_gone
from ckv_jax.storage.segment.segment import Opened, Segment


class PrefixReader:
    """Reads one prefix; its segments stay on disk until `close()`. Thread-safe, a context manager.

    Chunk ids are global: [0, prefix.num_chunks) over all spans. Segments that are given as a
    function are opened, and stay, from the first read on.
    """

    def __init__(
        self,
        prefix: Prefix,
        segments: Sequence[Opened] | Callable[[], Sequence[Opened]],
        *,
        deadline_s: float,
        gate: Gate,
        proof: Proof,
        count: Callable[[str], None],
        release: Callable[[Sequence[Opened]], None],
    ) -> None:
        self.prefix = prefix
        self._segments = segments
        self._found = None if callable(segments) else Runs.of(prefix, segments)
        self._proof = proof
        self._deadline_s = deadline_s
        self._gate = gate
        self._release = release
        self._count = count
        self._lock = threading.Lock()
        self._closed = False

    @property
    def _runs(self) -> Runs:
        found = self._found
        if found is None:
            assert callable(self._segments)
            found = Runs.of(self.prefix, self._segments())  # without the lock: it may take for ever
            with self._lock:
                if self._found is None and not self._closed:
                    self._found = found
                    return found
            self._release(found.segments)  # another thread was faster, or none waits for it
            self._open()
            return self._runs
        return found

    # -- packs -----------------------------------------------------------------------------------

    def read_packs(
        self,
        group: int | np.ndarray,
        chunks: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read the packs of `chunks` int [n] into `out`.

        Args:
          group: layer group of all, or int [n], of each.
          chunks: global chunk ids, in any order.
          out: [n, *layout.stored_shape] of layout.stored_dtype, C-contiguous; filled in place with
            packs as they lie on disk. A partial last chunk is zero past its tokens.
          rows: distinct int [n], the rows of an `out` of any length that the packs go to; None:
            the first n, in order. Other rows are left alone.

        Returns:
          bool [n]: False where the pack is bad or missing; such rows of `out` are zero.

        Raises:
          ReadTimeout: the reads may still write into `out` until the error's `settled()`.
        """
        layout, dtype = self.prefix.layout, self.prefix.layout.stored_dtype
        shape = (chunks.size if rows is None else out.shape[0], *layout.stored_shape)
        self._check(out)
        if out.shape != shape or out.dtype != dtype:
            raise ValueError(f"out: got {out.dtype} {out.shape}, expected {dtype} {shape}")
        if not chunks.size:
            return np.zeros(0, bool)
        groups, total = chunks * 0 + group, self.prefix.num_chunks
        outside = (groups < 0) | (groups >= layout.groups) | (chunks < 0) | (chunks >= total)
        if np.logical_or.reduce(outside):
            raise ValueError(
                f"packs: got group ids in [{groups.min()}, {groups.max()}] and chunk ids in "
                f"[{chunks.min()}, {chunks.max()}], expected [0, {layout.groups}) and [0, {total})"
            )
        places = np.arange(chunks.size) if rows is None else rows
        data = out.reshape(out.shape[0], -1).view(np.uint8)
        deadline, runs = Deadline(self._deadline_s, self._gate), self._found or self._runs
        return PackRead(runs, self._proof, groups, chunks, data, places, deadline).run()

    # -- probe -----------------------------------------------------------------------------------

    def read_probe_pages(
        self,
        layer: int,
        pages: ProbePages,
        ids: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read pages `ids` int [n] of the prefix's probe into rows of `out`, as `read_packs` does.

        A row holds the page's tokens [t, K', D], and zeros after them; K' is all KV heads for
        "keys", the first `probe_width` for "heads".

        Args:
          out: C-contiguous, of any dtype, each row with room for a page of `pages.most` chunks.

        Returns:
          bool [n]: False where some of a page is bad or missing; such rows of `out` are zero.
        """
        layout = self.prefix.layout
        places = np.arange(len(ids)) if rows is None else np.asarray(rows)
        self._check(out)
        if len(ids) == 0:
            return np.zeros(0, bool)
        data = out.view(np.uint8).reshape(len(out), -1)
        if layer not in layout.probe_layers:
            raise ValueError(f"layer: got {layer}, expected one of {layout.probe_layers}")
        least = pages.most * layout.chunk_tokens * pages.token_bytes
        if data.shape[1] < least:
            raise ValueError(f"out: got rows of {data.shape[1]} bytes, expected at least {least}")
        row = layout.probe_layers.index(layer)
        segments, tokens = self._runs.segments, pages.tokens[ids]
        whole = np.zeros(len(ids), np.int64)
        deadline = self._deadline()
        try:
            for span in np.unique(pages.span[ids]).tolist():
                mine = np.flatnonzero(pages.span[ids] == span)
                segment = segments[span]
                if isinstance(segment, Segment):
                    whole[mine] = reads.read_probe_pages(
                        segment, row, pages.first[ids[mine]], tokens[mine], data, places[mine],
                        deadline, self._proof.disk_timeout,
                    )  # fmt: skip
            good: np.ndarray = whole == tokens
            with self._proof.together() as proof:
                for at in np.flatnonzero(~good).tolist():
                    page = int(ids[at])
                    chunk = int(pages.first[page] + whole[at] // layout.chunk_tokens)
                    segment, what = segments[int(pages.span[page])], f"probe of layer {layer}"
                    proof.prove(segment, "probe", row, chunk, chunk, what, deadline)
        except BaseException as error:
            deadline.settle(error)
            raise
        for at, size in zip(
            places.tolist(), np.where(good, tokens * pages.token_bytes, 0), strict=True
        ):
            data[at, size:] = 0
        return good

    # -- digest and mapping ----------------------------------------------------------------------

    def read_digest(self) -> DigestData | None:
        """The compressed keys of all layers and tokens; None when the layout has none, or any of it
        is bad, missing, or did not come in time."""
        self._open()
        if self.prefix.layout.digest == "none" or not self.prefix.spans:
            return None
        deadline = self._deadline()

        def prove(segment: Opened, row: int, part: int) -> bool:
            return self._proof.prove(segment, "digest", row, part, 0, "digest", deadline)

        try:
            found = read_digest(self.prefix, self._runs.of_tokens(), deadline, prove)
        except ReadTimeout:  # what is late writes into memory of its own
            found = None
        if found is None:
            self._count("lost_digests")
        elif found.mixed:
            self._count("mixed_digests")
        return found

    @property
    def order(self) -> np.ndarray:
        """int32 [L, T]: the prefix position of each token as stored, in each layer; not the
        identity if reordered. Of alike tokens [groups, T], in each layer group.

        Raises SegmentDamaged where that is lost, and its segment with it: look the prefix up again;
        and StoreUnavailable where it cannot be read just now.
        """
        self._open()
        layout = self.prefix.layout
        shape = (layout.groups if layout.alike else layout.num_layers, self.prefix.num_tokens)
        order = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        if not (layout.reordered or layout.alike):
            return order
        for span, segment, start, end in self._runs.of_tokens():
            if isinstance(segment, StoreError):
                if is_gone(segment):
                    raise SegmentDamaged(f"segment {span.segment_id}: gone, and its order with it")
                said = f"segment {span.segment_id}: its order cannot be read: {segment}"
                raise StoreUnavailable(said)
            if layout.alike:
                order[:, start:end] = start + self._grouped(segment)[:, : end - start]
            elif segment.manifest.order is not None:
                order[:, start:end] = start + segment.manifest.order
        return order

    def _grouped(self, segment: Segment) -> np.ndarray:
        """The order of a segment of alike tokens, int32 [groups, T]."""
        found = self._proof.disk_timeout.run(
            "reading an assignment", segment.assignment, seconds=self._deadline_s
        )
        if found is None:
            self._proof.report(segment, [(0, "assignment: differs from what was written")], True)
            raise SegmentDamaged(f"segment {segment.id}: its assignment of tokens is damaged")
        return order_of(found, self.prefix.layout.chunk_tokens)

    # -- life ------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """Open the segments now, where they are to be opened by the first read; False where one may
        be there, and cannot be opened."""
        return not any(isinstance(one, StoreUnavailable) for one in self._runs.segments)

    @property
    def incomplete(self) -> bool:
        """Whether a segment was gone, or could not be opened."""
        found = self._found
        return found is not None and any(isinstance(one, StoreError) for one in found.segments)

    def require(self) -> None:
        """Raise the error of a segment that was gone, or could not be opened, if there is one."""
        for segment in self._runs.segments:
            if isinstance(segment, StoreError):
                raise segment

    def _deadline(self) -> Deadline:
        return Deadline(self._deadline_s, self._gate)

    def _open(self) -> None:
        if self._closed:
            raise StoreClosed("the reader is closed")

    def _check(self, out: np.ndarray) -> None:
        if self._closed:
            self._open()
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out: expected a C-contiguous, writable array")

    def close(self) -> None:
        """Let the segments go; may be called twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._found is not None:
            self._release(self._found.segments)

    def __enter__(self) -> PrefixReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
