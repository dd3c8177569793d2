"""TensorStore's settings, and the kernel's queues of reads."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from place_support import open_files

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.place import kernel_queue, place
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues
from ckv_jax.storage.segment.arrays import aligned


@pytest.fixture(autouse=True)
def each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for every row, unless a test says otherwise."""
    monkeypatch.setattr(kernel_queue, "_EXTENT", 0)


def test_direct_reads_are_tried_before_they_are_promised(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place._use_direct_io(root, None) and not place._use_direct_io(root, False)

    code = [0]

    def refuse(*_: object) -> None:
        raise OSError(code[0], os.strerror(code[0]))

    monkeypatch.setattr(os, "open", refuse)
    for code[0] in (errno.EINVAL, errno.ENOTSUP):
        with pytest.warns(UserWarning, match="refuses direct I/O"):
            assert not place._use_direct_io(root, None)
        with pytest.raises(StoreError, match="no direct I/O on this"):
            place._use_direct_io(root, True)
    code[0] = errno.EIO
    for asked in (None, True):
        with pytest.raises(StoreUnavailable):
            place._use_direct_io(root, asked)


TRIES = 20


def works(queues: KernelQueues, path: Path) -> bool:
    """Whether one of several trials does, each of which waits for a busy disk a second."""
    return any(queues.works(path) for _ in range(TRIES))


def test_rows_may_be_filled_in_part(queues: KernelQueues, file: Path) -> None:
    """Sizes of their own, a file's short end, and a queue that is full of others."""
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out = aligned(3 * 2 * FILE_ALIGN).reshape(3, 2 * FILE_ALIGN)
    out[:] = 7
    sizes = np.array([1, 2, 1], np.int64) * FILE_ALIGN
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.array([5, 8, 0]) * FILE_ALIGN, out, np.arange(3), sizes=sizes)
    landed: list[int] = []
    while (some := read.landed(20.0)) is not None:
        assert some.dtype == np.int64
        landed += some.tolist()
    assert sorted(landed) == [0, 1, 2] and read.landed(0.0) is None
    assert (out[0, :FILE_ALIGN] == pages[5]).all() and (out[0, FILE_ALIGN:] == 7).all()
    assert (out[1].reshape(2, -1) == pages[8:10]).all() and (out[2, :FILE_ALIGN] == pages[0]).all()
    last = (len(pages) - 1) * FILE_ALIGN
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    queues.read(fd, np.array([last]), out[:1], np.arange(1), expect=FILE_ALIGN).result(20.0)
    assert (out[0, :FILE_ALIGN] == pages[-1]).all()
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    short = queues.read(fd, np.array([0, last]), out[:2], np.arange(2))
    with pytest.raises(OSError) as error:
        short.result(20.0)
    assert error.value.errno == errno.EIO


@pytest.mark.parametrize("most", [1, 2, 3, 32])
def test_rows_that_follow_one_another_in_the_file_are_one_request(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Wherever they go in memory, and in one order only: as they are asked for."""
    monkeypatch.setattr(kernel_queue, "_EXTENT", most * FILE_ALIGN)
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    wanted, rows = np.array([3, 4, 5, 6, 1, 0, 8, 9]), np.array([7, 0, 3, 1, 6, 2, 5, 4])
    out, handed, real = aligned(9 * FILE_ALIGN).reshape(9, FILE_ALIGN), [], queues.submit
    out[:] = 7

    def submit(queue_: int, address: int, count: int) -> int:
        handed.append(count)
        return real(queue_, address, count)

    queues.submit = submit  # type: ignore[method-assign]
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, wanted * FILE_ALIGN, out, rows)
    landed: list[int] = []
    while (some := read.landed(20.0)) is not None:
        landed += some.tolist()
    assert sorted(landed) == [*range(8)]
    assert sum(handed) == {1: 8, 2: 5, 3: 5, 32: 4}[most]
    assert (out[rows] == pages[wanted]).all() and (out[8] == 7).all()


def test_a_request_that_is_short_brings_none_of_its_rows(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_queue, "_EXTENT", 2 * FILE_ALIGN)
    pages = file.stat().st_size // FILE_ALIGN
    out = aligned(3 * FILE_ALIGN).reshape(3, FILE_ALIGN)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.array([0, pages - 1, pages]) * FILE_ALIGN, out, np.arange(3))
    landed: list[int] = []
    while (some := read.landed(20.0)) is not None:
        landed += some.tolist()
    assert landed == [0]


def test_what_a_full_queue_does_not_take_is_handed_over_later(
    queues: KernelQueues, file: Path
) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out, calls, real = aligned(8 * FILE_ALIGN).reshape(8, FILE_ALIGN), [], queues.submit

    def submit(queue_: int, address: int, count: int) -> int:
        calls.append(count)
        if len(calls) == 2:
            raise OSError(errno.EAGAIN, "the queue is full")
        return real(queue_, address, 3 if len(calls) == 1 else count)

    queues.submit = submit  # type: ignore[method-assign]
    queues.read(opened(file), np.arange(8) * FILE_ALIGN, out, np.arange(8)).result(20.0)
    assert calls[:3] == [8, 5, 5] and (out == pages[:8]).all()


@pytest.mark.parametrize(("first", "code"), [(0, errno.EAGAIN), (0, errno.EIO), (2, errno.EIO)])
def test_a_queue_that_takes_no_reads_is_an_error_of_the_read(
    queues: KernelQueues, file: Path, first: int, code: int
) -> None:
    """After those that it took have landed."""
    before, real = open_files(file), queues.submit
    late = set(kernel_queue._IN_FLIGHT)
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    left = [first]

    def submit(queue_: int, address: int, count: int) -> int:
        if left[0]:
            return real(queue_, address, left.pop(0) or count)
        raise OSError(code, os.strerror(code))

    left.append(0)
    queues.submit = submit  # type: ignore[method-assign]
    out = aligned(8 * FILE_ALIGN).reshape(8, FILE_ALIGN)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.arange(8) * FILE_ALIGN, out, np.arange(8))
    with pytest.raises(OSError) as error:
        read.result(20.0)
    assert error.value.errno == code and read.done()
    assert (out[:first] == pages[:first]).all() and open_files(file) == before
    assert late >= kernel_queue._IN_FLIGHT and len(queues._idle) == 1


# -- reads past TensorStore ----------------------------------------------------------------------


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECT)


def rows(count: int) -> np.ndarray:
    return aligned(count * FILE_ALIGN).reshape(count, FILE_ALIGN)


@pytest.mark.parametrize("timeout", [0.0, -5.0])
def test_a_late_read_settles(queues: KernelQueues, file: Path, timeout: float) -> None:
    """Given up at once: it may land later, keeps its buffer until then, and its queue returns."""
    for _ in range(50):
        read = queues.read(opened(file), np.arange(300) * FILE_ALIGN, rows(300), np.arange(300))
        with contextlib.suppress(TimeoutError):
            read.result(timeout=timeout)
        while not read.done():
            pass
    assert not kernel_queue._IN_FLIGHT and len(queues._idle) == 1


def test_a_buffer_outlives_everybody_until_its_read_has_landed(
    queues: KernelQueues, file: Path
) -> None:
    gone = KernelQueues()
    out = rows(8)
    read = gone.read(opened(file), np.arange(8) * FILE_ALIGN, out, np.arange(8))
    alive = weakref.ref(out)
    gone.close()
    del gone, read, out
    gc.collect()
    assert alive() is not None
    (left,) = kernel_queue._IN_FLIGHT
    left.given_up = True
    while kernel_queue._IN_FLIGHT:  # the next read, of any store, sees that it has landed
        again = queues.read(opened(file), np.zeros(1, np.int64), rows(1), np.arange(1))
        again.result(timeout=5)
    del left, again
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("use", ["closes", "reads"])
def test_a_copy_of_the_process_has_no_queues_of_the_first(
    queues: KernelQueues, file: Path, use: str
) -> None:
    KernelQueues().close()
    assert kernel_queue._SPARE and queues._idle
    pid = os.fork()
    if not pid:
        wrong = 1
        with contextlib.suppress(BaseException):
            clean = not kernel_queue._SPARE
            used = queues.close() is None if use == "closes" else queues.works(file)
            wrong = 0 if clean and used and KernelQueues().works(file) else 2
        os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert queues.works(file)
