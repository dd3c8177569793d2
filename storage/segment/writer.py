"""Writer of a segment: streams blocks of KV to disk in the background; `commit` publishes them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed

import numpy as np

from ckv_jax.storage.codec import Codec, decoded, encoded
from ckv_jax.storage.digest import DigestWriter
from ckv_jax.storage.errors import (
    FULL,
    StoreClosed,
    StoreError,
    StoreUnavailable,
    as_store_error,
)
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.disk import Refused, write_file
from ckv_jax.storage.place.files import Workspace
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment import manifest as manifests
from ckv_jax.storage.segment.alike import read_written, regroup
from ckv_jax.storage.segment.arrays import (
    ArrayWriter,
    MakeRoom,
    aligned,
    block_keys,
    check_kv,
    on_disk,
    pack,
)
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.seal import chunks_of

_BLOCK_BYTES = 32 << 20  # of KV that are packed and handed to the disk at once
_DISK_THREADS = 4  # writes in flight
_MOMENT_S = 0.05
_BLOCKS_AHEAD = 3  # packed blocks that may wait for the disk


class SegmentWriter:
    """Writes one segment; a context manager. Leaving it without `commit` removes everything.

    Calls come from one thread at a time. Disk errors surface at the next `write` or at `commit`:
    `StoreFull` for a full disk or quota, `StoreError` for others.
    """

    def __init__(
        self,
        draft: Manifest,
        workspace: Workspace,
        place: Place,
        *,
        params: np.ndarray | None,
        codec: Codec | None,
        publish: Callable[[], Prefix],
        release: Callable[[], None],
        room: MakeRoom,
        write_s: float,
    ) -> None:
        self._draft = draft
        self._workspace = workspace
        self._publish = publish
        self._release = release
        self._room = room
        self._disk_timeout = place.disk_timeout
        self._write_s = write_s
        self._steps = 0  # of the disk
        self._stuck = False
        self._publishing = threading.Lock()  # it may go on behind a caller who gave up
        self._discarded = False
        self._written = 0
        self._closed = False
        self._codec = codec
        layout = draft.layout
        row = layout.probe_heads * layout.head_dim * layout.disk_dtype.itemsize
        self._probe_bytes = len(layout.probe_layers) * layout.chunk_tokens * row  # of one chunk
        self._chunk_bytes = layout.groups * layout.pack_bytes
        self._block_chunks = max(1, _BLOCK_BYTES // self._chunk_bytes)
        self._memory: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        for _ in range(_BLOCKS_AHEAD):
            self._memory.put(None)  # made when it is first needed
        self._blocks: list[Future[None]] = []  # sealed
        self._ends: list[int] = []  # chunk at which each of them ends
        self._jobs: list[Future[None]] = []  # written
        self._arrays: dict[str, ArrayWriter] = {}
        self._digest: DigestWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckv-write")
        self._disk = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="ckv-disk")
        self._settler = ThreadPoolExecutor(1, thread_name_prefix="ckv-settle")
        try:
            for name, spec in draft.arrays.items():
                self._arrays[name] = ArrayWriter(workspace.path, spec, place.direct, room)
            if layout.digest != "none":
                self._digest = DigestWriter(draft, self._arrays["digest"].put, params)
        except BaseException as e:
            self.close()
            if isinstance(e, OSError):
                raise self._refused(e) from e
            raise

    @property
    def segment_id(self) -> str:
        """Of the segment that `commit` publishes."""
        return self._draft.segment_id

    @property
    def layout(self) -> Layout:
        """The segment's layout."""
        return self._draft.layout

    # -- blocks ----------------------------------------------------------------------------------

    def write(self, first_token: int, kv: np.ndarray) -> None:
        """Append a block of keys and values; `kv` may be changed again when this returns.

        Args:
          first_token: first token of the block, counted within the segment: where the last block
            ended. A multiple of C, so that only the last block may end with a partial chunk.
          kv: [L, 2, t, K, D] of layout.numpy_dtype; in a reordered segment, in stored order, in
            each layer its own where the layout has such.
        """
        self._check_open()
        layout, total = self.layout, len(self._draft.tokens)
        check_kv(kv, layout)
        end = first_token + kv.shape[2]
        if first_token != self._written or first_token % layout.chunk_tokens or end > total:
            raise ValueError(
                f"first_token: got {first_token} with {kv.shape[2]} tokens, expected blocks in "
                f"order, from token {self._written} on, up to {total}, each but the last whole"
            )
        step = self._block_chunks * layout.chunk_tokens
        for start in range(0, kv.shape[2], step):
            self._append(first_token + start, kv[:, :, start : start + step])
        self._written = end

    def _append(self, first_token: int, kv: np.ndarray) -> None:
        self._raise_failed()
        layout, memory = self.layout, self._take_memory()
        if memory is None:
            chunks = min(self._block_chunks, self._draft.chunks)
            memory = aligned(chunks * (self._chunk_bytes + self._probe_bytes))
        packs = pack(kv.view(layout.disk_dtype), layout, memory)
        first_chunk = first_token // layout.chunk_tokens
        self._ends.append(first_chunk + packs.shape[1])
        self._blocks.append(
            self._thread.submit(self._store, first_chunk, packs, kv.shape[2], memory)
        )

    def _take_memory(self) -> np.ndarray | None:
        """Memory for a block, once the disk has taken one before."""
        steps = -1
        while steps != self._steps:
            steps = self._steps
            with contextlib.suppress(queue.Empty):
                return self._memory.get(timeout=self._write_s)
        raise self._late()

    def _late(self) -> StoreUnavailable:
        self._stuck = True
        return StoreUnavailable(f"the disk has taken nothing for {self._write_s:g} s")

    def _step(self) -> None:
        self._steps += 1

    def _store(self, first: int, packs: np.ndarray, tokens: int, memory: np.ndarray) -> None:
        """Seal a block, packs [groups, n, *pack], and send it to the disk piece by piece."""
        layout, draft = self.layout, self._draft
        writes: list[Future[None]] = []
        try:
            if layout.probe_layers:
                writes += self._store_probe(first, packs, tokens, memory[packs.nbytes :])
            if self._digest is not None and not layout.alike:
                self._digest.add(first * layout.chunk_tokens, packs, tokens)
            chunks = np.arange(first, first + packs.shape[1])
            for group, plain in enumerate(packs):
                data = on_disk(encoded(self._codec, plain, layout), group, layout)
                draft.seal.seal("packs", np.full(len(data), group), chunks, data)
                put, entry = self._arrays["packs"].put, group * draft.chunks + first
                writes.append(self._disk.submit(put, entry, data))
        finally:
            self._jobs.append(self._settler.submit(self._settle, writes, memory))

    def _settle(self, writes: list[Future[None]], memory: np.ndarray) -> None:
        """Give a block's memory back once it is written; raises what went wrong."""
        for _ in as_completed(writes):
            self._step()
        self._memory.put(memory)
        for write in writes:
            write.result()

    def _store_probe(
        self, first: int, packs: np.ndarray, tokens: int, memory: np.ndarray
    ) -> list[Future[None]]:
        """Send a block's probe keys to the disk, by way of `memory`; returns the writes."""
        layout, spec, writes = self.layout, self._draft.arrays["probe"], []
        entries = spec.shape[1] // spec.inner[1]  # of one layer
        for row, layer in enumerate(layout.probe_layers):
            keys = block_keys(packs, layer, layout)[:tokens, : layout.probe_heads]
            kept = memory[: keys.size * keys.itemsize].view(keys.dtype).reshape(keys.shape)
            kept[...] = keys
            memory = memory[kept.nbytes :]
            for chunks, parts in chunks_of(kept, layout.chunk_tokens):
                self._draft.seal.seal("probe", np.full(len(chunks), row), first + chunks, parts)
            offset = first * layout.chunk_tokens * kept[0].nbytes
            put = self._arrays["probe"].put
            writes.append(self._disk.submit(put, entries * row, kept, offset))
        return writes

    def read_back(self, group: int, chunk: int, out: np.ndarray, *, layer: int = 0) -> None:
        """Read packs that `write` was given, from `chunk` on, once they are on disk.

        `out` [n, *layout.stored_shape] of layout.stored_dtype: as they lie there; without a codec
        it may have fewer layers, those from place `layer` of the group on, and no others are read.
        May be called in another thread than `write`. Raises `StoreError` where they cannot be read:
        `StoreUnavailable` if the disk does not answer, `StoreClosed` if the writer is closed.
        """
        self._check_open()
        last = bisect_right(self._ends, chunk + len(out) - 1)
        if last == len(self._ends):
            raise ValueError(
                f"chunk: got {chunk} and {len(out) - 1} more, expected some that were written"
            )
        try:
            for index in range(bisect_right(self._ends, chunk), last + 1):
                self._wait(self._blocks[index])
                self._wait(self._jobs[index])
            entry = group * self._draft.chunks + chunk
            self._disk_timeout.run(
                "reading packs back", lambda: self._read(entry, out, layer), seconds=self._write_s
            )
            self._check_open()  # else the files that were read may have been others
        except CancelledError as e:
            raise StoreClosed("the writer is closed") from e
        except OSError as e:
            raise self._refused(e) from e

    def _read(self, entry: int, out: np.ndarray, layer: int) -> None:
        layout = self.layout
        if out[:1].nbytes == layout.stored_bytes:
            read_written(self._draft, self._arrays["packs"], entry, out)
        elif self._draft.seal.whole:
            packs = np.empty((len(out), *layout.stored_shape), layout.stored_dtype)
            read_written(self._draft, self._arrays["packs"], entry, packs)
            out[...] = packs[:, layer : layer + out.shape[1]]
        else:
            offset = layer * (layout.pack_bytes // layout.pack_layers)
            for at, row in enumerate(out):
                self._arrays["packs"].get(entry + at, row, offset)

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, grouping: Callable[[int, int], None] | None = None) -> Prefix:
        """Make everything durable, publish the segment, return the whole prefix with its parent.
        `grouping` gets runs of alike tokens, (grouped, in all), in the writer's thread."""
        self._check_open()
        if self._written != len(self._draft.tokens):
            raise ValueError(
                f"tokens: got KV of {self._written}, expected all {len(self._draft.tokens)}"
            )
        try:
            self._wait(self._thread.submit(self._finish, grouping))
            return self._disk_timeout.run(
                "publishing a segment", self._publish_whole, seconds=self._write_s
            )
        except OSError as e:
            raise self._refused(e) from e
        finally:
            self.close()

    def _publish_whole(self) -> Prefix:
        with self._publishing:
            if self._discarded:
                raise StoreClosed("the writer is closed")
            return self._publish()

    def _wait(self, job: Future[None]) -> None:
        steps = -1
        while steps != self._steps:
            steps = self._steps
            with contextlib.suppress(TimeoutError):
                job.exception(self._write_s)
            if job.done():
                return job.result()
        raise self._late()

    def _packs_back(self, entry: int, out: np.ndarray) -> None:
        """Read packs that were written, from `entry` on, into `out` [n, *pack] of bit patterns."""
        if self._codec is None:
            read_written(self._draft, self._arrays["packs"], entry, out)
            return
        stored = np.empty((len(out), *self.layout.stored_shape), self.layout.stored_dtype)
        read_written(self._draft, self._arrays["packs"], entry, stored)
        packs = decoded(self._codec, stored, self.layout)
        out[:] = packs.view(self.layout.disk_dtype)

    def _finish(self, grouping: Callable[[int, int], None] | None) -> None:
        def step(done: int, total: int) -> None:
            self._step()
            if grouping is not None:
                grouping(done, total)

        for job in (*self._blocks, *self._jobs):  # every block has its job by now
            job.result()
        if self.layout.alike:
            regroup(self._draft, self._arrays["packs"], self._arrays["assignment"], step)
            self._add_grouped()
        if self._digest is not None:
            self._digest.finish(self._packs_back, self._step)
        for array in self._arrays.values():
            array.finish(self._step)
        self._write_file("zarr.json", manifests.ZARR_GROUP)
        self._write_file(manifests.FILE, self._draft.encode()[0])

    def _write_file(self, name: str, data: bytes) -> None:
        path, began = self._workspace.path / name, time.monotonic()
        try:
            write_file(path, data)
        except OSError as e:
            if e.errno not in FULL or not self._room(len(data), began):
                raise
            path.unlink(missing_ok=True)
            write_file(path, data)

    def _add_grouped(self) -> None:
        """The digest takes in packs as they lie on disk once their tokens are grouped."""
        layout, draft, size = self.layout, self._draft, self.layout.chunk_tokens
        for first in range(0, draft.chunks if self._digest is not None else 0, self._block_chunks):
            count = min(self._block_chunks, draft.chunks - first)
            packs = np.empty((layout.groups, count, *layout.pack_shape), layout.disk_dtype)
            for group, out in enumerate(packs):
                read_written(draft, self._arrays["packs"], group * draft.chunks + first, out)
            self._step()
            tokens = min(count * size, len(draft.tokens) - first * size)
            assert self._digest is not None
            self._digest.add(first * size, packs, tokens)

    def _raise_failed(self) -> None:
        for job in (*self._blocks, *self._jobs):
            if job.done() and (error := job.exception()) is not None:
                raise self._refused(error) if isinstance(error, OSError) else error

    def _refused(self, error: OSError) -> StoreError:
        return as_store_error(self._workspace.path.parent, error)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the writer is closed")

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove everything that was not committed; may be called twice. At a disk that does not
        answer, that goes on behind the caller's back."""
        if self._closed:
            return
        self._closed = True
        stuck = self._stuck or self._publishing.locked()
        seconds = _MOMENT_S if stuck else self._write_s
        try:
            self._disk_timeout.run("closing a writer", self._clean, seconds=seconds)
        except Refused:  # it has not begun: a thread of its own waits for the disk
            try:
                threading.Thread(target=self._clean, name="ckv-clean", daemon=True).start()
            except RuntimeError:  # the system gives no more threads
                if not stuck:
                    with contextlib.suppress(StoreError, OSError):
                        self._clean()
        except StoreUnavailable:
            pass

    def _clean(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True)
        self._settler.shutdown(wait=True)
        for array in self._arrays.values():
            array.close()
        with self._publishing:  # what is deleted is not published
            self._discarded = True
            self._workspace.discard()
        self._release()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
