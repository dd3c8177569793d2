"""One published segment, held open for reading: its arrays, and the checks on what they give."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from ckv_jax.storage import checks
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.storage.files import Files
from ckv_jax.storage.manifest import Manifest

READ_ERRORS = (ValueError, OSError, RuntimeError, KeyError, IndexError, NotImplementedError)
"""What TensorStore raises for damaged, short, missing or unreadable data."""


_PARAMS_S = 60.0  # for a few kilobytes a layer


class Segment:
    """Reads of one segment; counted references, thread-safe.

    Every read comes in two steps, so that many can be in flight: `begin_*` starts it, straight into
    the caller's buffer, and `*_good` says which parts of the buffer are what was written.
    """

    def __init__(self, manifest: Manifest, checksum: str, files: Files, context: Any) -> None:
        self.manifest = manifest
        self.checksum = checksum
        self.id = manifest.segment_id
        self.users = 0
        self._hold = files.hold(self.id)
        self.missing = files.damaged(self.id, manifest.files)
        """Shard files that are not there in full; nothing is read from them."""
        self._layout = manifest.layout
        self._context = context
        self._files = files
        self._seeds = {kind: checks.seed(self.id, kind) for kind in manifest.arrays}
        self._opening = {kind: self._open(kind) for kind in manifest.arrays}
        self._views: dict[tuple[str, int], Any] = {}

    def _open(self, kind: str) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": self._files.kvstore(self.id, kind),
            "metadata": self.manifest.arrays[kind].metadata(),
            "assume_metadata": True,  # the manifest is checked, zarr.json is for other readers
        }
        return ts.open(spec, context=self._context, read=True, write=False)

    def _view(self, kind: str, row: int) -> Any:
        """The array of one group or layer: packs [M, *pack], probe [T, K', D], digest [X]."""
        view = self._views.get((kind, row))
        if view is None:
            array = self._opening[kind].result()
            layout = self._layout
            if kind != "packs":
                view = array[row]
            elif layout.kv_together:
                first = row * layout.pack_layers
                view = array[first : first + layout.pack_layers].transpose([1, 0, 2, 3, 4, 5])
                view = view[ts.d[1].translate_to[0]]
            else:
                view = array[row // 2 : row // 2 + 1, :, row % 2 : row % 2 + 1]
                view = view.transpose([1, 0, 2, 3, 4, 5])[ts.d[1, 2].translate_to[0]]
            self._views[kind, row] = view
        return view

    def _present(self, kind: str, row: int) -> bool:
        spec = self.manifest.arrays[kind]
        shard = row // self._layout.shard_groups if kind == "packs" else 0
        return not self.missing or spec.file(shard) not in self.missing

    # -- packs -----------------------------------------------------------------------------------

    def begin_packs(self, group: int, chunks: np.ndarray, out: Any, batch: Any) -> Any:
        """Start reading packs into `out`, a buffer or TensorStore [n, *pack] of disk_dtype.

        Returns a future, or None when the data is known to be missing.
        """
        if not self._present("packs", group):
            return None
        target = out if isinstance(out, ts.TensorStore) else ts.array(out)
        return target.write(self._view("packs", group).oindex[chunks], batch=batch)

    def packs_good(self, group: int, chunks: np.ndarray, data: np.ndarray) -> np.ndarray:
        """bool [n]: whether `data` [n, *pack] holds exactly these packs."""
        found = checks.checksums(self._seeds["packs"], group, chunks.tolist(), data)
        good: np.ndarray = np.equal(found, self.manifest.pack_crc[group, chunks])
        return good

    # -- probe -----------------------------------------------------------------------------------

    def begin_probe(self, row: int, out: np.ndarray, batch: Any) -> Any:
        """Start reading the first tokens of a probe layer into `out` [t, K', D] of disk_dtype."""
        if not self._present("probe", row):
            return None
        return ts.array(out).write(self._view("probe", row)[: len(out)], batch=batch)

    def probe_good(self, row: int, data: np.ndarray) -> int:
        """Leading tokens of `data` [t, K', D] that are as written; t is whole chunks or all."""
        ct, expected = self._layout.chunk_tokens, self.manifest.probe_crc[row]
        seed = self._seeds["probe"]
        for chunk, start in enumerate(range(0, len(data), ct)):
            part = data[start : start + ct]
            crc = checks.checksum(seed, row, chunk, checks.as_bytes(part.reshape(1, -1))[0])
            if crc != expected[chunk]:
                return start
        return len(data)

    # -- digest ----------------------------------------------------------------------------------

    def begin_digest(self, layer: int, out: np.ndarray, batch: Any) -> Any:
        """Start reading one layer's record into `out` uint8 [X]."""
        if not self._present("digest", layer):
            return None
        return ts.array(out).write(self._view("digest", layer), batch=batch)

    def digest_good(self, layer: int, data: np.ndarray) -> bool:
        """Whether `data` uint8 [X] is the layer's record."""
        start, expected = 0, self.manifest.digest_crc[layer]
        sizes = self._layout.digest_record(len(self.manifest.tokens))
        view = checks.as_bytes(data[None])[0]
        for part, size in enumerate(sizes):
            piece = view[start : start + size]
            if checks.checksum(self._seeds["digest"], layer, part, piece) != expected[part]:
                return False
            start += size
        return True

    def digest_params(self) -> np.ndarray | None:
        """float32 [L, digest_params] of this segment, for one that continues it; None if bad."""
        layout = self._layout
        if layout.digest == "none":
            return None
        sizes = layout.digest_record(len(self.manifest.tokens))
        spec = self.manifest.arrays["digest"]
        params = np.empty((layout.num_layers, sizes[0]), np.uint8)
        deadline = Deadline(_PARAMS_S)
        try:
            store = ts.KvStore.open(
                self._files.kvstore(self.id, "digest"), context=self._context
            ).result(timeout=_PARAMS_S)
            reads = [
                deadline.watch(
                    store.read(Path(spec.file(0)).name, byte_range=slice(start, start + sizes[0]))
                )
                for start in range(0, layout.num_layers * spec.entry_bytes, spec.entry_bytes)
            ]
            for layer, read in enumerate(reads):
                if not deadline.wait(read, "reading a digest"):
                    return None
                params[layer] = np.frombuffer(read.result().value, np.uint8)
        except READ_ERRORS:
            return None
        for layer, row in enumerate(params):
            crc = checks.checksum(self._seeds["digest"], layer, 0, checks.as_bytes(row[None])[0])
            if crc != self.manifest.digest_crc[layer, 0]:
                return None
        return params.view(np.float32)

    def close(self) -> None:
        """Let other processes remove the segment; may be called twice."""
        self._hold.release()


class Deadline:
    """The time a set of reads may take together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._futures: list[Any] = []

    def watch(self, future: Any) -> Any:
        """Take a read's future (or None) into the set."""
        if future is not None:
            self._futures.append(future)
        return future

    def wait(self, future: Any, what: str) -> bool:
        """Wait for one read; False when it failed or was None.

        Raises:
          ReadTimeout: when time is up. Nothing is cancelled: a cancelled read would report itself
            done while it can still write into the buffer.
        """
        if future is None:
            return False
        try:
            future.result(timeout=max(0.0, self._end - time.monotonic()))
        except TimeoutError:
            futures = tuple(self._futures)
            raise ReadTimeout(what, self.seconds, lambda: all(f.done() for f in futures)) from None
        except READ_ERRORS:
            return False
        return True
