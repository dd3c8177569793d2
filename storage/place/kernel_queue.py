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
_CALLS = {  # io_setup, io_destroy, io_submit, io_getevents
    "x86_64": (206, 207, 209, 208),
    "aarch64": (0, 1, 2, 4),
}
_PREADV = 7
_EXTENT = 128 << 10  # bytes that one request reads at most, of several rows
_REQUEST = np.dtype(
    [
        ("index", "<u8"), ("key", "<u4"), ("flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"),
        ("file", "<u4"), ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("rest", "<u8", 2),
    ]
)  # fmt: skip
_VECTOR = np.dtype([("base", "<u8"), ("bytes", "<u8")])
_LIMIT = ctypes.c_int64 * 2
"""Seconds and nanoseconds."""
_EVENT = np.dtype([("index", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])


_IN_FLIGHT: set[KernelRead] = set()
"""Reads that the kernel may still write for: they outlive their caller and their store."""

_SPARE: list[int] = []
"""Queues of closed stores, with nothing in flight, for those that are opened next: the kernel waits
for every processor before it takes a queue back, which is 40 ms with two of them at work."""
_MOST_SPARE = 8
# Queues belong to the memory of one process, and what they read is written there.
os.register_at_fork(after_in_child=_SPARE.clear)
os.register_at_fork(after_in_child=_IN_FLIGHT.clear)


class KernelQueues:
    """Queues of the kernel, one for each call that reads at a time; thread-safe.

    A read in flight is kept alive, with the buffer it writes into, until it has landed. If no
    caller waits for it any more, that is seen when the next one starts.
    """

    def __init__(self) -> None:
        """Raises OSError where the system has no such queues."""
        numbers = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None:
            raise OSError(errno.ENOSYS, "no asynchronous reads on this system")
        self._setup, self._destroy, self._submit, self._events = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self.align = FILE_ALIGN
        """Alignment of offsets and sizes of reads; smaller once `works` has found so."""
        self._idle = [self._new()]

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
        try:
            read = KernelRead(self, fd, offsets, out, rows, sizes, expect)
            for old in list(_IN_FLIGHT):
                if old.given_up:
                    old.done()
            with self._lock:
                if self._process != os.getpid():
                    self._forget_inherited()
                queue = self._idle.pop() if self._idle else None
            if queue is None:
                queue = self._new()
        except BaseException:
            close_descriptor(fd)
            raise
        _IN_FLIGHT.add(read)
        read.start(queue)
        return read

    # -- for KernelRead: system calls, which let other threads run --------------------------------

    def submit(self, queue: int, address: int, count: int) -> int:
        """Hand `count` requests over, by pointers at `address`; how many were taken."""
        found = int(
            self._call(
                ctypes.c_long(self._submit),
                ctypes.c_ulong(queue),
                ctypes.c_long(count),
                ctypes.c_void_p(address),
            )
        )
        if found < 0:
            raise _failure()
        return found

    def events(self, queue: int, least: int, most: int, into: int, seconds: float) -> int:
        """Wait for `least` events or until time is up, which it may be already; how many, `most` at
        most, were written to address `into`."""
        end = time.monotonic() + seconds
        found = -1
        while found < 0:
            left = max(0.0, end - time.monotonic())
            limit = _LIMIT(int(left), int(left % 1 * 1e9))
            found = int(
                self._call(
                    ctypes.c_long(self._events),
                    ctypes.c_ulong(queue),
                    ctypes.c_long(least),
                    ctypes.c_long(most),
                    ctypes.c_void_p(into),
                    ctypes.byref(limit),
                )
            )
            if found < 0 and ctypes.get_errno() != errno.EINTR:
                raise _failure()
        return found

    def landed(self, read: KernelRead, queue: int) -> None:
        """Take the queue of a read back that has nothing in flight any more."""
        _IN_FLIGHT.discard(read)
        with self._lock:
            if not self._closed:
                self._idle.append(queue)
                return
        self._end(queue)

    def _forget_inherited(self) -> None:
        """In a copy of the process: idle queues are those of the first. Called with the lock."""
        self._process, self._idle = os.getpid(), []

    def _new(self) -> int:
        with contextlib.suppress(IndexError):
            return _SPARE.pop()
        queue = ctypes.c_ulong(0)
        if self._call(ctypes.c_long(self._setup), ctypes.c_long(_DEPTH), ctypes.byref(queue)) < 0:
            raise _failure()
        return queue.value

    def _end(self, queue: int) -> None:
        if len(_SPARE) < _MOST_SPARE:
            _SPARE.append(queue)
            return
        self._call(ctypes.c_long(self._destroy), ctypes.c_ulong(queue))

    def close(self) -> None:
        """Give idle queues back, to the process or the kernel; reads in flight go on, and new ones
        are possible."""
        with self._lock:
            if self._process != os.getpid():
                self._forget_inherited()
            idle, self._idle, self._closed = self._idle, [], True
        for queue in idle:
            self._end(queue)


class KernelRead:
    """Reads of one file that were started together; waited for like TensorStore's future.

    Rows that follow one another in the file are one request, wherever they go in memory (extents,
    KVDrive §7.2).
    """

    def __init__(
        self,
        queues: KernelQueues,
        fd: int,
        offsets: np.ndarray,
        out: np.ndarray,
        rows: np.ndarray,
        sizes: np.ndarray | None,
        expect: int | None,
    ) -> None:
        count, size = len(offsets), out[0].nbytes
        self._queues, self._fd, self._out = queues, fd, out
        self._lock = threading.Lock()
        self._flying = 0
        self.given_up = False
        """Whether no caller waits for it any more."""
        self._error: OSError | None = None
        self.ended = False
        """Whether nothing of it is, or will be, in flight."""
        row = np.full(count, size, np.int64) if sizes is None else sizes
        starts, self._rows = _extents(offsets, row, max(1, _EXTENT // size))
        """The first row of each request, and how many it has."""
        self._expect = np.add.reduceat(row, starts) if expect is None else expect * self._rows
        # All that the kernel is shown, in one block of memory: requests, pointers, vectors, events.
        self._left = self._count = total = len(starts)  # requests: not handed over yet, and in all
        vectors_at = total * (_REQUEST.itemsize + 8)
        events_at = vectors_at + count * _VECTOR.itemsize
        self._block = block = np.zeros(events_at + min(total, _DEPTH) * _EVENT.itemsize, np.uint8)
        base, every = block.__array_interface__["data"][0], np.arange(total)
        self._events, self._events_at = block[events_at:].view(_EVENT), base + events_at
        self._pointers_at = base + total * _REQUEST.itemsize
        block[total * _REQUEST.itemsize : vectors_at].view(np.int64)[:] = (
            base + every * _REQUEST.itemsize
        )
        vectors = block[vectors_at:events_at].view(_VECTOR)
        begin = out.__array_interface__["data"][0]  # `ctypes.data` makes an object first
        vectors["base"] = begin + np.multiply(rows, size, dtype=np.int64)
        vectors["bytes"] = row
        requests = block[: total * _REQUEST.itemsize].view(_REQUEST)
        requests["index"] = every
        requests["file"] = fd
        requests["opcode"] = _PREADV
        requests["buffer"] = base + vectors_at + starts * _VECTOR.itemsize
        requests["bytes"] = self._rows
        requests["offset"] = offsets[starts]

    def start(self, queue: int) -> None:
        """Hand over as many requests as the queue takes."""
        with self._lock:
            self._queue = queue
            self._hand_over()

    def landed(self, timeout: float) -> np.ndarray | None:
        """Wait for a quarter of the reads: int64, those that landed in full since the last call.
        A `timeout` that is not positive takes what is there.

        Returns None when all have, or never will. Raises TimeoutError when nothing landed in time,
        or the kernel does not say what has: what is in flight may still write into the buffer.
        """
        with self._lock:
            if self.ended:
                return None
            try:
                landed = self._reap(min(self._flying, max(4, len(self._events) // 4)), timeout)
            except OSError as e:  # it is not known what has landed: nothing says that all has
                raise TimeoutError from e
            if landed is None:
                raise TimeoutError
            return landed

    def result(self, timeout: float) -> None:
        """Wait until all has landed.

        Raises:
          TimeoutError: some is still in flight, and may write into the buffer.
          OSError: some of it could not be read in full; nothing is in flight.
        """
        end = time.monotonic() + timeout
        while self.landed(end - time.monotonic()) is not None:
            pass
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether nothing is in flight any more; only asked of reads that are given up."""
        with self._lock:
            self.given_up = True
            if not self.ended:
                self._left = 0
                with contextlib.suppress(OSError):  # as much as nothing has landed
                    self._reap(0, 0.0)
            return self.ended

    def _reap(self, least: int, seconds: float) -> np.ndarray | None:
        """Wait for `least` events, hand over as many requests, and return, int64, which landed in
        full; None: nothing came."""
        most = len(self._events)
        found = self._queues.events(self._queue, least, most, self._events_at, seconds)
        self._flying -= found
        events = self._events[:found]
        index = events["index"].astype(np.int64)
        whole = events["result"] == self._expect[index]
        if not whole.all():
            self._fail(-int(events["result"].min()))
        self._hand_over()
        if not found:
            return None
        landed = np.zeros(self._count, bool)
        landed[index[whole]] = True
        [rows] = landed.repeat(self._rows).nonzero()
        return rows

    def _hand_over(self) -> None:
        while self._left and self._flying < _DEPTH:
            count = min(self._left, _DEPTH - self._flying)
            at = self._pointers_at + 8 * (self._count - self._left)
            try:
                taken = self._queues.submit(self._queue, at, count)
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EINTR) or not self._flying:
                    self._fail(e.errno or errno.EIO)
                break
            self._left -= taken
            self._flying += taken
        if not self._left and not self._flying:
            self.ended = True
            close_descriptor(self._fd)
            self._queues.landed(self, self._queue)

    def _fail(self, code: int) -> None:
        """Read no more; `code` is not positive where a read was short."""
        code = code if code > 0 else errno.EIO
        self._error = OSError(code, os.strerror(code))
        self._left = 0


def _failure() -> OSError:
    """Of the latest system call."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _extents(offsets: np.ndarray, sizes: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The first row and the count of rows, int64 [m] each, of each request for rows at `offsets`
    [n] of `sizes` [n]: a row that begins where the one before ends is read with it, up to `most`
    rows together."""
    apart = np.empty(len(offsets) + 1, bool)
    apart[0] = apart[-1] = True
    apart[1:-1] = offsets[1:] != offsets[:-1] + sizes[:-1]
    [edges] = apart.nonzero()
    starts, lengths = edges[:-1], edges[1:] - edges[:-1]
    if lengths.max(initial=0) > most:
        since = np.arange(len(offsets)) - starts.repeat(lengths)
        apart[:-1] = since % most == 0
        [edges] = apart.nonzero()
        starts, lengths = edges[:-1], edges[1:] - edges[:-1]
    return starts, lengths
