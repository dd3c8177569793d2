"""A published segment, open for reading: its arrays, and the checks of what they return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from ckv_jax.storage.errors import READ_ERRORS, StoreError, StoreUnavailable
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, MEMORY_ALIGN, KernelRead
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.seal import chunks_of


class Segment:
    """Reads of one segment; counted references, thread-safe.

    Every read comes in two steps, so that many can be in flight: `begin_*` starts it, straight into
    the caller's buffer, and `*_good` says which parts of the buffer are what was written, after it
    has turned them into that: it is called once on what a read brought.
    """

    def __init__(self, manifest: Manifest, checksum: str, place: Place) -> None:
        self.manifest = manifest
        self.checksum = checksum
        self.id = manifest.segment_id
        self.users = 0
        self._files, self._context, self._queues = place.files, place.context, place.queues
        self._wait_s = place.disk_timeout.seconds
        self._layout = manifest.layout
        self._views: dict[tuple[str, int], Any] = {}
        self._hold = self._files.hold(self.id)
        try:
            self.missing = self._files.damaged(self.id, manifest.files)
            """Shard files that are not there in full; nothing is read from them."""
            self._opening = {kind: self._open(kind) for kind in manifest.arrays}
        except READ_ERRORS as e:
            self._hold.release()
            raise StoreUnavailable(f"segment {self.id}: cannot be opened: {e}") from e
        except BaseException:
            self._hold.release()
            raise

    def _open(self, kind: str) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": self._files.kvstore(self.id, kind),
            "metadata": self.manifest.arrays[kind].metadata(),
            "assume_metadata": True,  # the manifest is checked, zarr.json is for other readers
        }
        return ts.open(spec, context=self._context, read=True, write=False)

    def _view(self, kind: str, row: int) -> Any:
        """The array of one group or layer: packs [M, *stored], probe [T, K', D], digest [X]."""
        view = self._views.get((kind, row))
        if view is None:
            array = self._opened(kind)
            layout = self._layout
            if kind != "packs" or layout.codec != PLAIN:
                view = array[row]
            elif layout.kv_together:
                first = row // layout.parts * layout.pack_layers
                held = first + layout.disk_layers(row)
                view = array[first:held, ..., layout.group_heads(row), :]
                view = view.transpose([1, 0, 2, 3, 4, 5])[ts.d[1, 4].translate_to[0]]
            else:
                view = array[row // 2 : row // 2 + 1, :, row % 2 : row % 2 + 1]
                view = view.transpose([1, 0, 2, 3, 4, 5])[ts.d[1, 2].translate_to[0]]
            self._views[kind, row] = view
        return view

    def _opened(self, kind: str) -> Any:
        """The array, which is asked for again where opening it failed before."""
        try:
            return self._opening[kind].result(timeout=self._wait_s)
        except READ_ERRORS:
            self._opening[kind] = self._open(kind)
            raise

    def _begin(
        self, kind: str, row: int, target: Any, part: Callable[[Any], Any], batch: Any
    ) -> Any:
        """Start reading a part of a view into `target`; None when it cannot be there."""
        shard = row // self._layout.shard_groups if kind == "packs" else 0
        if self.manifest.arrays[kind].files[shard] in self.missing:
            return None
        try:
            return target.write(part(self._view(kind, row)), batch=batch)
        except READ_ERRORS:
            return None

    # -- packs -----------------------------------------------------------------------------------

    def begin_packs(self, group: int, chunks: np.ndarray, out: Any, batch: Any) -> Any:
        """Start reading packs into `out`, a buffer or TensorStore [n, *stored]: bit patterns. None
        when the data is known to be missing, else a future."""
        target = out if isinstance(out, ts.TensorStore) else ts.array(out)
        if self._layout.short_last:
            target = target[:, : self._layout.disk_layers(group)]
        return self._begin("packs", group, target, lambda view: view.oindex[chunks], batch)

    def begin_packs_direct(
        self, groups: np.ndarray, chunks: np.ndarray, out: np.ndarray, rows: np.ndarray
    ) -> KernelRead | None:
        """Start reading packs past TensorStore, into `rows` of C-contiguous uint8 `out` [_, bytes].

        `groups`, `chunks` int64 [n]: layer group of each, all in one shard file, and chunk. Returns
        None where that cannot be, and nothing was started.
        """
        shard, offsets = self.manifest.arrays["packs"].offsets(groups, chunks)
        sizes = None
        if self._layout.short_last:
            sizes = np.full(rows.size, self._layout.group_bytes(shard), np.int64)
        return self._begin_direct("packs", shard, offsets, out, rows, sizes)

    def _begin_direct(
        self,
        kind: str,
        shard: int,
        offsets: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray,
        sizes: np.ndarray | None = None,
    ) -> KernelRead | None:
        queues = self._queues
        if queues is None or out.shape[1] % queues.align:
            return None
        if sizes is not None and int(sizes[0]) % queues.align:
            return None
        if out.__array_interface__["data"][0] % MEMORY_ALIGN:
            return None
        name = self.manifest.arrays[kind].files[shard]
        if name in self.missing:
            return None
        try:
            fd = self._files.open_direct(self.id, name)
            return queues.read(fd, offsets, out, rows, sizes=sizes)
        except OSError:
            return None

    def packs_good(
        self, groups: np.ndarray, chunks: np.ndarray, data: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """bool [n]: whether rows `rows` of uint8 `data` [_, bytes] hold exactly these packs, of
        layer groups `groups` int [n], all of one shard file where packs have their layers only."""
        if self._layout.short_last and groups.size:
            size = self._layout.group_bytes(int(groups[0]))
            data[rows, size:] = 0  # of a pool: what lay there before
            data = data[:, :size]
        return self.manifest.seal.open("packs", groups, chunks, data, rows)

    # -- probe -----------------------------------------------------------------------------------

    def begin_part(self, kind: str, row: int, at: int, out: np.ndarray, batch: Any) -> Any:
        """Start reading a probe layer, from token `at` on, into `out` [t, K', D], or a record of a
        digest, from byte `at` on, into `out` uint8 [n]."""
        end = at + len(out)
        return self._begin(kind, row, ts.array(out), lambda view: view[at:end], batch)

    def begin_probe_direct(
        self, row: int, first: np.ndarray, sizes: np.ndarray, out: np.ndarray, rows: np.ndarray
    ) -> KernelRead | None:
        """Start reading runs of chunks of a probe layer, int64 [n] first ones, into the starts of
        `rows` of uint8 `out` [_, R], past TensorStore. `sizes` int64 [n]: the bytes of each; up to
        a block of the disk more is read. None where that cannot be, and nothing was started."""
        layout = self._layout
        chunk = layout.chunk_tokens * layout.probe_heads * layout.head_dim
        offsets = first * (chunk * layout.disk_dtype.itemsize)
        shard, start = self.manifest.arrays["probe"].offsets(np.array([row]), np.zeros(1, np.int64))
        offsets = offsets + start[0]
        whole = -(-sizes // FILE_ALIGN) * FILE_ALIGN
        if (offsets % FILE_ALIGN).any() or whole.max() > out.shape[1]:
            return None
        return self._begin_direct("probe", shard, offsets, out, rows, whole)

    def probe_good(self, row: int, data: np.ndarray, first: int = 0) -> int:
        """Leading tokens of `data` [t, K', D], from chunk `first` on, that are as written; t is
        whole chunks or all."""
        for chunks, parts in chunks_of(data, self._layout.chunk_tokens):
            rows = np.full(len(chunks), row)
            good = self.manifest.seal.open("probe", rows, first + chunks, parts)
            if not good.all():
                return int(chunks[good.argmin()]) * self._layout.chunk_tokens
        return len(data)

    # -- digest ----------------------------------------------------------------------------------

    def digest_params(self) -> np.ndarray | None:
        """float32 [R, digest_params], for a segment that continues this one; None if unread, or
        if there are none."""
        layout = self._layout
        if not layout.digest_params:
            return None
        size = layout.digest_record(len(self.manifest.tokens))[0]
        params = np.empty((len(layout.digest_layers), size), np.uint8)
        for row in range(len(params)):
            try:
                data = self.reread("digest", row, 0)
            except StoreUnavailable:
                return None
            if data is None:
                return None
            params[row] = data
        return params.view(np.float32)

    # -- assignment ------------------------------------------------------------------------------

    def assignment(self) -> np.ndarray | int:
        """uint16 [groups, T], the chunk of each token, counted in its run; or a row that is proven
        to be bad. Raises StoreUnavailable where some can neither be read nor proven bad."""
        found = np.empty((self._layout.groups, len(self.manifest.tokens)), "<u2")
        for row in range(len(found)):
            data = self.assignment_row(row)
            if data is None:
                return row
            found[row] = data
        return found

    def assignment_row(self, group: int) -> np.ndarray | None:
        """uint16 [T] of one group, or None where it is proven bad; raises as `assignment`."""
        data = self.reread("assignment", group, 0)
        return None if data is None else data.view("<u2")

    # -- proof -------------------------------------------------------------------------------------

    def whole(self, manifest: Manifest, chunk: int) -> bool:
        """Whether all of a chunk is as `manifest` says, which is this segment's, or newer."""
        wanted = [("packs", group, chunk) for group in range(self._layout.groups)]
        wanted += [("probe", row, chunk) for row in range(len(self._layout.probe_layers))]
        if chunk == 0:  # marks on digests are put there
            rows = range(len(self._layout.digest_layers))
            wanted += [("digest", row, part) for row in rows for part in range(3)]
            wanted += [("assignment", row, 0) for row in range(len(manifest.tables["assignment"]))]
        return all(self.reread(*place, manifest=manifest) is not None for place in wanted)

    def reread(
        self, kind: str, row: int, column: int, *, manifest: Manifest | None = None
    ) -> np.ndarray | None:
        """Read one piece again, past everything: its bytes, uint8 [n], or None for proof of damage.

        `kind`, `row`, `column`: its place in `Manifest.tables`. The column is a chunk, for a digest
        a part (params, scale, codes), for an assignment 0. `manifest`: whose tables count; None:
        the segment's own. Raises StoreUnavailable where it can neither be read nor proven bad.
        """
        spec = self.manifest.arrays[kind]
        shard, offset, count = self.locate(kind, row, column)
        name, size = spec.files[shard], spec.file_bytes(shard)
        if self._files.damaged(self.id, {name: size}):
            return None
        index = spec.index(shard)
        if self._files.read(self.id, name, size - len(index), len(index)) != index:
            return None
        data = self._files.read(self.id, name, offset, count)
        if data is None:
            return None
        piece = np.frombuffer(bytearray(data), np.uint8)
        seal = (manifest or self.manifest).seal
        good = seal.open(kind, np.array([row]), np.array([column]), piece[None])
        return piece if good[0] else None

    def locate(self, kind: str, row: int, column: int) -> tuple[int, int, int]:
        """(shard, offset in its file, bytes) of a checked piece."""
        spec, layout = self.manifest.arrays[kind], self._layout
        tokens = len(self.manifest.tokens)
        if kind == "packs":
            shard, offsets = spec.offsets(np.array([row]), np.array([column]))
            return shard, int(offsets[0]), layout.group_bytes(row)
        start = row * (spec.entries // spec.shape[0]) * spec.entry_bytes
        if kind == "assignment":
            return 0, start, spec.entry_bytes
        if kind == "digest":
            sizes = layout.digest_record(tokens)
            return 0, start + sum(sizes[:column]), sizes[column]
        ct = layout.chunk_tokens
        token = spec.entry_bytes // spec.inner[1]
        return 0, start + column * ct * token, min(ct, tokens - column * ct) * token

    def close(self) -> None:
        """Let other processes remove the segment; may be called twice."""
        self._hold.release()


Opened = Segment | StoreError
"""A segment that is held open, or why it could not be opened: gone, or out of reach just now."""


class OpenSegments:
    """Open segments by id and checksum; each is closed when its last user lets it go.

    Nothing is locked while the disk is asked. `manifest`: that of (id, checksum); raises
    SegmentDamaged when it is gone or another.
    """

    def __init__(
        self,
        place: Place,
        manifest: Callable[[str, str], Manifest],
        count: Callable[[str], None],
    ) -> None:
        self._place = place
        self._manifest = manifest
        self._count = count
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Segment] = {}

    def ids(self) -> set[str]:
        """Ids of the segments that are open."""
        with self._lock:
            return {id_ for id_, _ in self._open}

    def acquire_all(self, spans: Iterable[Span]) -> list[Opened]:
        """The segments of spans; for those that are gone, or cannot be opened now, the error."""
        held: list[Opened] = []
        try:
            for span in spans:
                try:
                    held.append(self.acquire(span))
                except StoreError as e:
                    if isinstance(e, StoreUnavailable):
                        self._count("unread")
                    held.append(e.with_traceback(None))  # frames would keep what they hold
        except BaseException:
            self.release(held)
            raise
        return held

    def acquire(self, span: Span) -> Segment:
        """The open segment of a span; raises SegmentDamaged, StoreUnavailable."""
        key = span.segment_id, span.checksum
        with self._lock:
            found = self._use(key)
        if found is not None:
            return found
        fresh = Segment(self._manifest(*key), span.checksum, self._place)
        try:
            self._manifest(*key)  # not replaced before it was held
        except BaseException:
            fresh.close()
            raise
        with self._lock:
            found = self._use(key)
            if found is None:
                self._open[key] = fresh
                fresh.users = 1
                return fresh
        fresh.close()  # another thread was faster
        return found

    def _use(self, key: tuple[str, str]) -> Segment | None:
        found = self._open.get(key)
        if found is not None:
            found.users += 1
        return found

    def release(self, segments: Sequence[Opened]) -> None:
        """Give up segments that were acquired."""
        unused = []
        with self._lock:
            for segment in segments:
                if isinstance(segment, StoreError):
                    continue
                segment.users -= 1
                if not segment.users:
                    del self._open[segment.id, segment.checksum]
                    unused.append(segment)
        for segment in unused:
            segment.close()
