"""Writing a segment: blocks of KV stream to disk behind the caller's back, `commit` publishes."""

from __future__ import annotations

import errno
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from ckv_jax.storage import checks
from ckv_jax.storage import manifest as manifests
from ckv_jax.storage.array_writer import ArrayWriter
from ckv_jax.storage.digest_writer import DigestWriter
from ckv_jax.storage.errors import StoreClosed, StoreError, StoreFull
from ckv_jax.storage.files import Workspace
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.manifest import Manifest
from ckv_jax.storage.packing import aligned, block_keys, pack
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.workspace import write_file

_BLOCK_BYTES = 32 << 20  # of KV that are packed and handed to the disk at once
_DISK_THREADS = 4  # writes in flight
_BLOCKS_AHEAD = 2  # packed blocks that may wait for the disk


class SegmentWriter:
    """Writes one segment; a context manager. Leaving it without `commit` removes everything.

    Calls come from one thread at a time. Disk errors surface at the next `write` or at `commit`:
    `StoreFull` for a full disk or quota, `StoreError` for others.
    """

    def __init__(
        self,
        draft: Manifest,
        workspace: Workspace,
        *,
        direct: bool,
        params: np.ndarray | None,
        publish: Callable[[Manifest, str, Workspace], Prefix],
        release: Callable[[], None],
    ) -> None:
        self._draft = draft
        self._workspace = workspace
        self._publish = publish
        self._release = release
        self._written = 0
        self._closed = False
        self._step = max(1, _BLOCK_BYTES // (draft.layout.groups * draft.layout.pack_bytes))
        self._memory: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        for _ in range(_BLOCKS_AHEAD):
            self._memory.put(None)  # made when it is first needed
        self._jobs: list[Future[None]] = []
        self._arrays: dict[str, ArrayWriter] = {}
        self._seeds = {kind: checks.seed(draft.segment_id, kind) for kind in draft.arrays}
        self._digest: DigestWriter | None = None
        size = draft.layout.probe_heads * draft.layout.head_dim * draft.layout.disk_dtype.itemsize
        self._scratch = aligned(self._step * draft.layout.chunk_tokens * size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckv-write")
        self._disk = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="ckv-disk")
        try:
            for name, spec in draft.arrays.items():
                self._arrays[name] = ArrayWriter(workspace.path, spec, direct=direct)
            if draft.layout.digest != "none":
                self._digest = DigestWriter(draft, self._arrays["digest"], params)
        except OSError as e:
            self.close()
            raise as_store_error(e) from e

    @property
    def layout(self) -> Layout:
        """The segment's layout."""
        return self._draft.layout

    @property
    def fingerprint(self) -> Fingerprint:
        """Whose KV this is."""
        return self._draft.fingerprint

    # -- blocks ----------------------------------------------------------------------------------

    def write(self, first_token: int, kv: np.ndarray) -> None:
        """Append a block of keys and values; `kv` may be changed again when this returns.

        Args:
          first_token: first token of the block, counted within the segment: where the last block
            ended. A multiple of C, so that only the last block may end with a partial chunk.
          kv: [L, 2, t, K, D] of layout.numpy_dtype; in a reordered segment, in stored order.
        """
        self._check_open()
        layout, total = self.layout, len(self._draft.tokens)
        heads = (layout.num_kv_heads, layout.head_dim)
        if kv.ndim != 5 or kv.dtype != layout.numpy_dtype or 0 in kv.shape:
            raise ValueError(f"kv: got {kv.dtype} {kv.shape}, expected {layout.numpy_dtype} 5-D")
        if kv.shape[:2] != (layout.num_layers, 2) or kv.shape[3:] != heads:
            want = (layout.num_layers, 2, "t", *heads)
            raise ValueError(f"kv: got shape {kv.shape}, expected {want}")
        end = first_token + kv.shape[2]
        if first_token != self._written or first_token % layout.chunk_tokens or end > total:
            raise ValueError(
                f"first_token: got {first_token} with {kv.shape[2]} tokens, expected blocks in "
                f"order, from token {self._written} on, up to {total}, each but the last whole"
            )
        step = self._step * layout.chunk_tokens
        for start in range(0, kv.shape[2], step):
            self._append(first_token + start, kv[:, :, start : start + step])
        self._written = end

    def _append(self, first_token: int, kv: np.ndarray) -> None:
        self._raise_failed()
        layout, memory = self.layout, self._memory.get()
        if memory is None:
            chunks = min(self._step, self._draft.chunks)
            memory = aligned(chunks * layout.groups * layout.pack_bytes)
        packs = pack(kv.view(layout.disk_dtype), layout, memory)
        first_chunk = first_token // layout.chunk_tokens
        job = self._thread.submit(self._store, first_chunk, packs, kv.shape[2])
        job.add_done_callback(lambda _: self._memory.put(memory))
        self._jobs.append(job)

    def _store(self, first: int, packs: np.ndarray, tokens: int) -> None:
        """Write a block's packs [groups, n, *pack], its probe keys and its digest."""
        layout, draft = self.layout, self._draft
        columns = range(first, first + packs.shape[1])
        array = self._arrays["packs"]
        puts = [
            self._disk.submit(array.put, group * draft.chunks + first, data)
            for group, data in enumerate(packs)
        ]
        for group, data in enumerate(packs):  # while the disk is busy
            crcs = checks.checksums(self._seeds["packs"], group, columns, data)
            draft.pack_crc[group, columns.start : columns.stop] = crcs
        for row, layer in enumerate(layout.probe_layers):
            self._store_probe(row, block_keys(packs, layer, layout)[:tokens], columns)
        if self._digest is not None:
            self._digest.add(first * layout.chunk_tokens, packs, tokens)
        for put in puts:
            put.result()

    def _store_probe(self, row: int, keys: np.ndarray, chunks: range) -> None:
        """Write a block of keys [t, K, D] of one probe layer."""
        spec, size = self._draft.arrays["probe"], self.layout.chunk_tokens
        keys = keys[:, : self.layout.probe_heads]
        memory = self._scratch[: keys.size * keys.itemsize].view(keys.dtype).reshape(keys.shape)
        memory[...] = keys
        first_entry = spec.shape[1] // spec.inner[1] * row
        self._arrays["probe"].put(first_entry, memory, chunks.start * size * memory[0].nbytes)
        for i, chunk in enumerate(chunks):
            part = checks.as_bytes(memory[i * size : (i + 1) * size].reshape(1, -1))[0]
            crc = checks.checksum(self._seeds["probe"], row, chunk, part)
            self._draft.probe_crc[row, chunk] = crc

    # -- commit ----------------------------------------------------------------------------------

    def commit(self) -> Prefix:
        """Make everything durable, publish the segment, return the whole prefix with its parent."""
        self._check_open()
        if self._written != len(self._draft.tokens):
            raise ValueError(
                f"tokens: got KV of {self._written}, expected all {len(self._draft.tokens)}"
            )
        try:
            self._thread.submit(self._finish).result()
            return self._publish(self._draft, self._checksum, self._workspace)
        except OSError as e:
            raise as_store_error(e) from e
        finally:
            self.close()

    def _finish(self) -> None:
        self._raise_failed()
        if self._digest is not None:
            self._digest.finish(self._arrays["packs"])
        for array in self._arrays.values():
            array.finish()
        write_file(self._workspace.path / "zarr.json", manifests.GROUP)
        data, self._checksum = self._draft.encode()
        write_file(self._workspace.path / manifests.FILE, data)

    def _raise_failed(self) -> None:
        for job in self._jobs:
            if job.done() and (error := job.exception()) is not None:
                if isinstance(error, OSError):
                    raise as_store_error(error) from error
                raise error
        self._jobs = [job for job in self._jobs if not job.done()]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the writer is closed")

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove everything that was not committed; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True, cancel_futures=True)
        for array in self._arrays.values():
            array.close()
        self._workspace.discard()
        self._release()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_store_error(error: OSError) -> StoreError:
    """`StoreFull` for a full disk or quota, `StoreError` for any other fault of the disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no room on the disk: {error}")
    return StoreError(f"the disk refused a write: {error}")


def draft_manifest(
    *,
    layout: Layout,
    fingerprint: Fingerprint,
    salt: str,
    tokens: np.ndarray,
    start: bytes,
    parent: str | None,
    first_chunk: int,
    order: np.ndarray | None,
) -> Manifest:
    """A manifest whose checksums are still to be filled in."""
    chunks = layout.num_chunks(len(tokens))
    return Manifest(
        layout=layout,
        fingerprint=fingerprint,
        salt=salt,
        tokens=tokens,
        start=start,
        parent=parent,
        first_chunk=first_chunk,
        order=order,
        pack_crc=np.zeros((layout.groups, chunks), np.uint32),
        probe_crc=np.zeros((len(layout.probe_layers), chunks), np.uint32),
        digest_crc=np.zeros((layout.num_layers * (layout.digest != "none"), 3), np.uint32),
        created=time.time(),
    )
