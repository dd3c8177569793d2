"""The kernel's queues of reads, past TensorStore."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import open_files

from ckv_jax.storage.place import kernel_queue
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues, KernelRead
from ckv_jax.storage.segment.arrays import aligned


@pytest.fixture(autouse=True)
def each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for every row, unless a test says otherwise."""
    monkeypatch.setattr(kernel_queue, "_EXTENT", 0)


def begin(
    queues: KernelQueues, file: Path, pages: Sequence[int], out: np.ndarray, **more: Any
) -> KernelRead:
    """A read of pages of the file into the first rows of `out`."""
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    return queues.read(fd, np.array(pages) * FILE_ALIGN, out, np.arange(len(pages)), **more)


def rows(count: int) -> np.ndarray:
    return aligned(count * FILE_ALIGN).reshape(count, FILE_ALIGN)


def landed_rows(read: KernelRead) -> list[int]:
    """All that land, ascending."""
    landed: list[int] = []
    while not read.ended:
        landed += np.flatnonzero(read.landed(20.0)).tolist()
    return sorted(landed)


def test_rows_may_be_filled_in_part(queues: KernelQueues, file: Path) -> None:
    """Sizes of their own, a file's short end, and a queue that is full of others."""
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out = aligned(3 * 2 * FILE_ALIGN).reshape(3, 2 * FILE_ALIGN)
    out[:] = 7
    sizes = np.array([1, 2, 1], np.int64) * FILE_ALIGN
    read = begin(queues, file, [5, 8, 0], out, sizes=sizes)
    assert landed_rows(read) == [0, 1, 2] and not read.landed(0.0).any()
    assert (out[0, :FILE_ALIGN] == pages[5]).all() and (out[0, FILE_ALIGN:] == 7).all()
    assert (out[1].reshape(2, -1) == pages[8:10]).all() and (out[2, :FILE_ALIGN] == pages[0]).all()
    last = len(pages) - 1
    begin(queues, file, [last], out, expect=FILE_ALIGN).result(20.0)
    assert (out[0, :FILE_ALIGN] == pages[-1]).all()
    short = begin(queues, file, [0, last], out)
    with pytest.raises(OSError) as error:
        short.result(20.0)
    assert error.value.errno == errno.EIO


def test_a_request_that_is_short_brings_none_of_its_rows(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_queue, "_EXTENT", 2 * FILE_ALIGN)
    pages = file.stat().st_size // FILE_ALIGN
    out = rows(3)
    assert landed_rows(begin(queues, file, [0, pages - 1, pages], out)) == [0]


def test_neighbours_in_the_file_are_one_request_up_to_a_size(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_queue, "_EXTENT", 2 * FILE_ALIGN)
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out, counts, real = rows(5), [], queues.submit

    def submit(queue_: Any, first: int, count: int) -> int:
        counts.append(count)
        return real(queue_, first, count)

    queues.submit = submit  # type: ignore[method-assign]
    begin(queues, file, [3, 4, 5, 1, 0], out).result(20.0)
    assert counts == [4] and (out == pages[[3, 4, 5, 1, 0]]).all()


def test_what_a_full_queue_does_not_take_is_handed_over_later(
    queues: KernelQueues, file: Path
) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out, calls, real = rows(8), [], queues.submit

    def submit(queue_: Any, first: int, count: int) -> int:
        calls.append(count)
        if len(calls) == 2:
            raise OSError(errno.EAGAIN, "the queue is full")
        return real(queue_, first, 3 if len(calls) == 1 else count)

    queues.submit = submit  # type: ignore[method-assign]
    begin(queues, file, range(8), out).result(20.0)
    assert calls[:3] == [8, 5, 5] and (out == pages[:8]).all()


@pytest.mark.parametrize(("first", "code"), [(0, errno.EAGAIN), (0, errno.EIO), (2, errno.EIO)])
def test_a_queue_that_takes_no_reads_is_an_error_of_the_read(
    queues: KernelQueues, file: Path, first: int, code: int
) -> None:
    """After those that it took have landed."""
    before, real = open_files(file), queues.submit
    idle = len(kernel_queue._IDLE)
    late = set(kernel_queue._IN_FLIGHT)
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    left = [first]

    def submit(queue_: Any, at: int, count: int) -> int:
        if left[0]:
            return real(queue_, at, left.pop(0) or count)
        raise OSError(code, os.strerror(code))

    left.append(0)
    queues.submit = submit  # type: ignore[method-assign]
    out = rows(8)
    read = begin(queues, file, range(8), out)
    with pytest.raises(OSError) as error:
        read.result(20.0)
    assert error.value.errno == code and read.done()
    assert (out[:first] == pages[:first]).all() and open_files(file) == before
    assert late >= kernel_queue._IN_FLIGHT and len(kernel_queue._IDLE) >= idle


def test_a_buffer_outlives_everybody_until_its_read_has_landed(
    queues: KernelQueues, file: Path
) -> None:
    gone = KernelQueues()
    out = rows(8)
    read = begin(gone, file, range(8), out)
    alive = weakref.ref(out)
    del gone, read, out
    gc.collect()
    assert alive() is not None
    (left,) = kernel_queue._IN_FLIGHT
    left.given_up = True
    while kernel_queue._IN_FLIGHT:  # the next read, of any store, sees that it has landed
        again = begin(queues, file, [0], rows(1))
        again.result(timeout=5)
    del left, again
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_copy_of_the_process_has_no_queues_of_the_first(queues: KernelQueues, file: Path) -> None:
    assert kernel_queue._IDLE
    pid = os.fork()
    if not pid:
        wrong = 1
        with contextlib.suppress(BaseException):
            clean = not kernel_queue._IDLE
            wrong = 0 if clean and queues.works(file) and KernelQueues().works(file) else 2
        os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert queues.works(file)
