"""Reads past TensorStore: the same bytes, and every fault an error of the one read."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage.place import kernel_queue
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues
from ckv_jax.storage.segment.packing import aligned


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECT)


def rows(count: int) -> np.ndarray:
    return aligned(count * FILE_ALIGN).reshape(count, FILE_ALIGN)


def test_more_reads_than_a_queue_holds(queues: KernelQueues, file: Path) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    ids = np.random.default_rng(1).permutation(len(pages))
    out = rows(len(ids))
    queues.read(opened(file), ids * FILE_ALIGN, out, slice(None)).result(timeout=5)
    assert np.array_equal(out, pages[ids])


def test_rows_that_lie_apart(queues: KernelQueues, file: Path) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out = rows(6)
    where = np.array([5, 0, 2])
    queues.read(opened(file), np.array([7, 8, 9]) * FILE_ALIGN, out, where).result(timeout=5)
    assert np.array_equal(out[where], pages[7:10])
    assert not out[[1, 3, 4]].any()


@pytest.mark.parametrize("offsets", [[0, 299, 300], [1 << 40], [FILE_ALIGN + 8]])
def test_what_cannot_be_read_in_full(queues: KernelQueues, file: Path, offsets: list[int]) -> None:
    """Past the end, and no multiple of a block."""
    places = np.array(offsets) * (FILE_ALIGN if len(offsets) == 3 else 1)
    fd = opened(file)
    read = queues.read(fd, places, rows(len(places)), slice(None))
    with pytest.raises(OSError):
        read.result(timeout=5)
    assert read.done()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    queues.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None)).result(timeout=5)


def test_the_trial_at_open_tells_what_the_disk_cannot_read(
    queues: KernelQueues, file: Path
) -> None:
    """Reads that go past the page cache are of whole blocks; the trial is such a read."""
    fd, page = os.open(file, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, FILE_ALIGN)
    try:
        os.preadv(fd, [memoryview(page)[:8]], 0)
        pytest.skip("this file system takes the page cache for what is no whole block")
    except OSError:
        assert not queues._reads(file, 8)
    finally:
        os.close(fd)


def test_a_file_that_is_not_open(queues: KernelQueues) -> None:
    fd = os.open("/", os.O_RDONLY)
    with pytest.raises(OSError):
        queues.read(fd, np.zeros(2, np.int64), rows(2), slice(None)).result(timeout=5)


@pytest.mark.parametrize("timeout", [0.0, -5.0])
def test_a_late_read_settles(queues: KernelQueues, file: Path, timeout: float) -> None:
    """Given up at once: it may land later, keeps its buffer until then, and its queue returns."""
    for _ in range(50):
        read = queues.read(opened(file), np.arange(300) * FILE_ALIGN, rows(300), slice(None))
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
    read = gone.read(opened(file), np.arange(8) * FILE_ALIGN, out, slice(None))
    alive = weakref.ref(out)
    gone.close()
    del gone, read, out
    gc.collect()
    assert alive() is not None
    (left,) = kernel_queue._IN_FLIGHT
    left.given_up = True
    while kernel_queue._IN_FLIGHT:  # the next read, of any store, sees that it has landed
        again = queues.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None))
        again.result(timeout=5)
    del left, again
    gc.collect()
    assert alive() is None


def test_rows_that_are_not_there_cost_no_queue(queues: KernelQueues, file: Path) -> None:
    fd = opened(file)
    with pytest.raises(IndexError):
        queues.read(fd, np.zeros(1, np.int64), rows(1), np.array([7]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert len(queues._idle) == 1 and not kernel_queue._IN_FLIGHT


def test_queues_outlive_their_close(file: Path, queues: KernelQueues) -> None:
    queues.close()
    for _ in range(2):
        queues.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None)).result(timeout=5)
        queues.close()
    assert not queues._idle


def test_what_one_store_gives_back_another_takes(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked for no queue and is given none back, up to the most that are kept."""
    spare: list[int] = []
    monkeypatch.setattr(kernel_queue, "_SPARE", spare)
    asked: list[int] = []
    real = KernelQueues._check

    def counted(self: KernelQueues, number: int, *arguments: object) -> int:
        asked.append(number)
        return real(self, number, *arguments)

    monkeypatch.setattr(KernelQueues, "_check", counted)
    most = kernel_queue._MOST_SPARE
    many = [KernelQueues() for _ in range(most + 1)]
    for one in many:
        one.close()
    calls = queues._setup, queues._destroy
    assert ([asked.count(call) for call in calls], len(spare)) == ([most + 1, 1], most)
    again = KernelQueues()
    again.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None)).result(timeout=5)
    again.close()
    assert ([asked.count(call) for call in calls], len(spare)) == ([most + 1, 1], most)
    monkeypatch.setattr(kernel_queue, "_MOST_SPARE", 0)
    for queue in spare:
        queues._end(queue)
    assert asked.count(queues._destroy) == most + 1


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


def test_calls_have_the_numbers_of_linux_tables() -> None:
    """io_setup, io_destroy, io_submit, io_getevents: `syscall_64.tbl`, `asm-generic/unistd.h`."""
    assert kernel_queue._CALLS == {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
