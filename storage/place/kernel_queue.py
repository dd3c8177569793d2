"""Linux's native asynchronous reads (AIO): direct I/O from a file into memory, many per call.

What a read costs decides what it may serve, and a buffer between file and caller, with a thread to
fill it and one to empty it, costs several times the transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
import threading
import time

import numpy as np

from ckv_jax.storage.place.disk import close_descriptor

FILE_ALIGN = 4096
"""Alignment of offsets and sizes of direct reads, valid for any disk."""
MEMORY_ALIGN = 512
"""Alignment of buffer addresses, tested at open."""

_DEPTH = 64  # reads in flight in one queue
_CALLS = {  # io_setup, io_submit, io_getevents
    "x86_64": (206, 209, 208),
    "aarch64": (0, 2, 4),
}
_PREADV = 7
_EXTENT = 128 << 10  # bytes that one request reads at most, of several rows
_REQUEST = np.dtype(
    [
        ("index", "<i8"), ("key", "<u4"), ("flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"),
        ("file", "<u4"), ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("rest", "<u8", 2),
    ]
)  # fmt: skip
_VECTOR = np.dtype([("base", "<u8"), ("bytes", "<u8")])
_LIMIT = ctypes.c_int64 * 2
"""Seconds and nanoseconds."""
_EVENT = np.dtype([("index", "<i8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])


class _Queue:
    """A queue of the kernel, and the memory that shows it the requests of one read at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.events = np.zeros(_DEPTH, _EVENT)
        self.events_at = _address(self.events)
        self.make_room(_DEPTH)

    def make_room(self, rows: int) -> None:
        """Allocates memory for a read of `rows` rows. An error leaves the queue as it was."""
        requests, vectors, every = (
            np.zeros(rows, _REQUEST),
            np.zeros(rows, _VECTOR),
            np.arange(rows),
        )
        requests["index"], requests["opcode"] = every, _PREADV
        pointers = _address(requests) + every * _REQUEST.itemsize
        at = _address(vectors), _address(pointers)
        self.rows, self.requests, self.vectors, self._pointers = rows, requests, vectors, pointers
        self.vectors_at, self.pointers_at = at


_IN_FLIGHT: set[KernelRead] = set()
"""Reads that the kernel may still write for: they outlive their caller and their store."""

_IDLE: list[_Queue] = []
"""Queues with nothing in flight, for any store. None is given back: the kernel waits for every
processor before it takes one, which is 40 ms with two of them at work."""
# Queues belong to the memory of one process, and what they read is written there.
os.register_at_fork(after_in_child=_IDLE.clear)
os.register_at_fork(after_in_child=_IN_FLIGHT.clear)


class KernelQueues:
    """Reads by queues of the kernel, one for each read at a time; thread-safe.

    A read in flight is kept alive, with the buffer it writes into, until it has landed. If no
    caller waits for it any more, that is seen when the next one starts.
    """

    def __init__(self) -> None:
        """Raises OSError where the system has no such queues."""
        numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None:
            raise OSError(errno.ENOSYS, "no asynchronous reads on this system")
        self._setup, self._submit, self._events = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self.align = FILE_ALIGN
        """Alignment of offsets and sizes of reads; smaller once `works` has found so."""
        _IDLE.append(self._take())

    def works(self, path: str | os.PathLike[str]) -> bool:
        """Whether a real file can be read so, into memory that is aligned no better than needed."""
        for align in (MEMORY_ALIGN, FILE_ALIGN):
            if self._reads(path, align):
                self.align = align
                return True
        return False

    def _reads(self, path: str | os.PathLike[str], align: int) -> bool:
        page = np.empty(3 * FILE_ALIGN, np.uint8)
        skip = -page.ctypes.data % FILE_ALIGN + MEMORY_ALIGN
        size = min(os.stat(path).st_size, align)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            out, first = page[skip : skip + align].reshape(1, -1), np.zeros(1, np.int64)
            read = self.read(fd, first, out, first, expect=size)
        except OSError:
            return False
        try:
            read.result(timeout=1.0)
        except OSError:
            read.done()  # a late one is given up
            return False
        return True

    def read(
        self,
        fd: int,
        offsets: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray,
        *,
        sizes: np.ndarray | None = None,
        expect: int | None = None,
    ) -> KernelRead:
        """Start reading a row of `out` [m, ...] at each of `offsets` int64 [n].

        Args:
          fd: a file open for direct reads; closed when the read has landed, or cannot start.
          offsets: where in the file, multiples of `align`.
          out: C-contiguous at a multiple of `MEMORY_ALIGN`; bytes of a row: a multiple of `align`.
          rows: int [n], which rows of `out` are filled.
          sizes: int64 [n], bytes of each read, from the start of its row on; default: a row's.
          expect: bytes that each read gives; default: its size.

        Raises:
          OSError: nothing was started.
        """
        for old in list(_IN_FLIGHT):
            if old.given_up:
                old.done()
        queue = None
        try:
            queue = self._take()
            read = KernelRead(self, queue, fd, offsets, out, rows, sizes, expect)
        except BaseException:
            close_descriptor(fd)
            if queue is not None:
                _IDLE.append(queue)
            raise
        _IN_FLIGHT.add(read)
        read.hand_over()
        return read

    def _take(self) -> _Queue:
        try:
            return _IDLE.pop()
        except IndexError:
            number = ctypes.c_ulong(0)
        if self._call(ctypes.c_long(self._setup), ctypes.c_long(_DEPTH), ctypes.byref(number)) < 0:
            raise _failure()
        return _Queue(number.value)

    # -- for KernelRead: system calls, which let other threads run --------------------------------

    def submit(self, queue: _Queue, first: int, count: int) -> int:
        """Hand `count` requests over, from the `first` of the queue's on; how many were taken."""
        found = int(
            self._call(
                ctypes.c_long(self._submit),
                ctypes.c_ulong(queue.number),
                ctypes.c_long(count),
                ctypes.c_void_p(queue.pointers_at + 8 * first),
            )
        )
        if found < 0:
            raise _failure()
        return found

    def events(self, queue: _Queue, least: int, seconds: float) -> int:
        """Wait for `least` events, until time is up or a signal comes; how many are in the queue's
        memory now."""
        found = int(
            self._call(
                ctypes.c_long(self._events),
                ctypes.c_ulong(queue.number),
                ctypes.c_long(least),
                ctypes.c_long(_DEPTH),
                ctypes.c_void_p(queue.events_at),
                _LIMIT(int(seconds), int(seconds % 1 * 1e9)),
            )
        )
        if found >= 0:
            return found
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()
        return 0


class KernelRead:
    """Reads of one file that were started together; waited for like TensorStore's future.

    Rows that follow one another in the file are one request, wherever they go in memory (extents,
    KVDrive §7.2).
    """

    def __init__(
        self,
        queues: KernelQueues,
        queue: _Queue,
        fd: int,
        offsets: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray,
        sizes: np.ndarray | None,
        expect: int | None,
    ) -> None:
        self._queues, self._queue, self._fd, self._out = queues, queue, fd, out
        self._lock = threading.Lock()
        self._flying = 0
        self.given_up = False
        """Whether no caller waits for it any more."""
        self._error: OSError | None = None
        self.ended = False
        """Whether nothing of it is, or will be, in flight."""
        count, size = offsets.size, out[0].nbytes
        ends = offsets + (size if sizes is None else sizes)
        edges = _extents(offsets, ends, _EXTENT // size or 1)
        starts, self._rows = edges[:-1], edges[1:] - edges[:-1]
        """The first row of each request, and how many it has."""
        whole = ends[edges[1:] - 1] - offsets[starts]
        self._expect = whole if expect is None else expect * self._rows
        self._left = self._count = starts.size  # requests: not handed over yet, and in all
        self._some = max(4, self._count // 4)
        if count > queue.rows:
            queue.make_room(count)
        vectors, requests = queue.vectors[:count], queue.requests[: self._count]
        begin = out.__array_interface__["data"][0]
        vectors["base"] = begin + np.multiply(rows, size, dtype=np.int64)
        vectors["bytes"] = ends - offsets
        requests["file"] = fd
        requests["buffer"] = queue.vectors_at + starts * _VECTOR.itemsize
        requests["bytes"] = self._rows
        requests["offset"] = offsets[starts]

    def landed(self, seconds: float) -> np.ndarray:
        """Wait for a quarter of the requests, until time is up or a signal comes, and hand over as
        many: bool [n], the reads that landed in full since the last call.

        Raises TimeoutError where the kernel does not say what has landed: what is in flight may
        still write into the buffer.
        """
        with self._lock:
            landed = np.zeros(self._count, bool)
            if not self.ended:
                least = min(self._flying, self._some, _DEPTH // 4)
                try:
                    found = self._queues.events(self._queue, least, seconds)
                except OSError as e:  # nothing says that all has
                    raise TimeoutError from e
                self._flying -= found
                events = self._queue.events[:found]
                whole = events["result"] == self._expect[events["index"]]
                if not np.logical_and.reduce(whole):
                    self._fail(-int(events["result"].min()))
                landed[events["index"][whole]] = True
                self.hand_over()  # from here on the queue may be another read's
            return landed.repeat(self._rows)

    def result(self, timeout: float) -> None:
        """Wait until all has landed.

        Raises:
          TimeoutError: some is still in flight, and may write into the buffer.
          OSError: some of it could not be read in full; nothing is in flight.
        """
        end = time.monotonic() + timeout
        while not self.ended:
            left = end - time.monotonic()
            if not self.landed(max(0.0, left)).any() and left <= 0 and not self.ended:
                raise TimeoutError
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether nothing is in flight any more; only asked of reads that are given up."""
        with self._lock:
            self.given_up, self._left = True, 0
        with contextlib.suppress(TimeoutError):  # as much as nothing has landed
            self.landed(0.0)
        return self.ended

    def hand_over(self) -> None:
        """Hand over as many requests as the queue takes."""
        while self._left and self._flying < _DEPTH:
            count = min(self._left, _DEPTH - self._flying)
            try:
                taken = self._queues.submit(self._queue, self._count - self._left, count)
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EINTR) or not self._flying:
                    self._fail(e.errno or errno.EIO)
                break
            self._left -= taken
            self._flying += taken
        if not self._left and not self._flying:
            self.ended = True
            close_descriptor(self._fd)
            _IN_FLIGHT.discard(self)
            _IDLE.append(self._queue)

    def _fail(self, code: int) -> None:
        """Read no more; `code` is not positive where a read was short."""
        code = code if code > 0 else errno.EIO
        self._error = OSError(code, os.strerror(code))
        self._left = 0


def _failure() -> OSError:
    """Of the latest system call."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])  # `ctypes.data` makes an object first


def _extents(offsets: np.ndarray, ends: np.ndarray, most: int) -> np.ndarray:
    """The edges int64 [m + 1] of requests for rows that lie at `offsets` to `ends` [n] of a file:
    a row that begins where the one before ends is read with it, up to `most` rows together."""
    apart = np.empty(offsets.size + 1, bool)
    apart[0] = apart[-1] = True
    apart[1:-1] = offsets[1:] != ends[:-1]
    [edges] = apart.nonzero()
    lengths = edges[1:] - edges[:-1]
    if np.maximum.reduce(lengths) > most:
        since = np.arange(offsets.size) - edges[:-1].repeat(lengths)
        apart[:-1] = since % most == 0
        [edges] = apart.nonzero()
    return edges
