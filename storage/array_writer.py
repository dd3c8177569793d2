"""Writing one zarr array of a segment: entries go to their final place as they come."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from ckv_jax.storage.arrays import ArraySpec
from ckv_jax.storage.workspace import write_file


class ArrayWriter:
    """The shard files of one array, open for writing; one thread at a time."""

    def __init__(self, folder: Path, spec: ArraySpec) -> None:
        self._spec = spec
        self._fds: list[int] = []
        (folder / spec.name).mkdir(mode=0o700)
        write_file(folder / spec.name / "zarr.json", json.dumps(spec.metadata()).encode())
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for shard in range(spec.shards):
            self._fds.append(os.open(folder / spec.file(shard), flags, 0o600))

    def put(self, entry: int, data: np.ndarray, offset: int = 0) -> None:
        """Write contiguous `data` at byte `offset` of an entry, counted over all shards."""
        shard, slot = divmod(entry, self._spec.shard_entries)
        _write_all(self._fds[shard], data, slot * self._spec.entry_bytes + offset)

    def get(self, entry: int, out: np.ndarray) -> None:
        """Read back what `put` wrote at an entry into contiguous `out`."""
        shard, slot = divmod(entry, self._spec.shard_entries)
        view, at = memoryview(out).cast("B"), slot * self._spec.entry_bytes
        while view:
            done = os.preadv(self._fds[shard], [view], at)
            if not done:
                raise OSError(f"{self._spec.file(shard)}: ends early")
            view, at = view[done:], at + done

    def finish(self) -> None:
        """Write the shard indexes and make the bytes durable."""
        for shard, fd in enumerate(self._fds):
            size = self._spec.file_bytes(shard)
            index = np.frombuffer(self._spec.index(shard), np.uint8)
            _write_all(fd, index, size - len(index))
        for fd in self._fds:
            os.fsync(fd)
        self.close()

    def close(self) -> None:
        """Close the files; may be called twice."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data.reshape(-1).view(np.uint8))
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
