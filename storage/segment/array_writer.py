"""Writing one zarr array of a segment: entries go to their final place as they come."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.storage.descriptors import let_go
from ckv_jax.storage.place.workspace import write_file
from ckv_jax.storage.segment.arrays import ArraySpec

_PAGE = mmap.PAGESIZE


class ArrayWriter:
    """The shard files of one array, open for writing; entries may be put by several threads.

    With `direct`, entries of whole pages that lie at the start of a page of memory go past the page
    cache; everything else goes through it.
    """

    def __init__(self, folder: Path, spec: ArraySpec, *, direct: bool) -> None:
        self._spec = spec
        self._direct: list[int] = []
        self._refused = False
        self._fds: list[int] = []
        (folder / spec.name).mkdir(mode=0o700)
        write_file(folder / spec.name / "zarr.json", spec.encoded())
        try:
            self._open(folder, direct=direct and spec.entry_bytes % _PAGE == 0)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, *, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        past = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        for shard in range(self._spec.shards):
            path = folder / self._spec.file(shard)
            self._fds.append(os.open(path, flags, 0o600))
            if direct:
                self._direct.append(os.open(path, past))

    def put(self, entry: int, data: np.ndarray, offset: int = 0) -> None:
        """Write contiguous `data` at byte `offset` of an entry, counted over all shards."""
        shard, slot = divmod(entry, self._spec.shard_entries)
        start = slot * self._spec.entry_bytes + offset
        whole = not (start % _PAGE or data.nbytes % _PAGE or data.ctypes.data % _PAGE)
        if self._direct and whole and not self._refused:
            try:
                _write_all(self._direct[shard], data, start)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._refused = True  # other alignment than a page's: through the page cache
        _write_all(self._fds[shard], data, start)

    def get(self, entry: int, out: np.ndarray, offset: int = 0) -> None:
        """Read back what `put` wrote from byte `offset` of an entry on, into contiguous `out`."""
        shard, slot = divmod(entry, self._spec.shard_entries)
        view, at = memoryview(as_buffer(out)), slot * self._spec.entry_bytes + offset
        while view:
            done = os.preadv(self._fds[shard], [view], at)
            if not done:
                raise OSError(f"{self._spec.file(shard)}: ends early")
            view, at = view[done:], at + done

    def finish(self, step: Callable[[], None]) -> None:
        """Write the shard indexes and make the bytes durable; `step` is told of each file."""
        for shard, fd in enumerate(self._fds):
            size = self._spec.file_bytes(shard)
            index = np.frombuffer(self._spec.index(shard), np.uint8)
            _write_all(fd, index, size - len(index))
        for fd in self._fds:
            os.fsync(fd)
            step()
        self.close()

    def close(self) -> None:
        """Close the files; may be called twice."""
        fds, self._fds, self._direct = self._fds + self._direct, [], []
        for fd in fds:
            with contextlib.suppress(OSError):  # the descriptor is gone all the same
                let_go(fd)


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(as_buffer(data))
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def as_buffer(data: np.ndarray) -> Any:
    """The bytes of `data`, contiguous, as something that has a buffer."""
    return data.reshape(-1).view(np.uint8)
