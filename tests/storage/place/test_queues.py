"""TensorStore's settings, and the kernel's queues of reads."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
from place_support import open_files

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.place import kernel_queue, place
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues
from ckv_jax.storage.segment.packing import aligned


@pytest.mark.parametrize("wish", [None, True, False])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO, 0])
def test_direct_reads_are_tried_before_they_are_promised(
    root: Path, monkeypatch: pytest.MonkeyPatch, wish: bool | None, code: int
) -> None:
    real = os.open

    def call(path: object, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT and code:
            raise OSError(code, os.strerror(code))
        return real(path, flags & ~os.O_DIRECT, *rest)  # type: ignore[arg-type]

    before = open_files(root)
    monkeypatch.setattr(os, "open", call)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if wish is False:
            assert not place._use_direct_io(root, wish)
        elif not code:
            assert place._use_direct_io(root, wish)
        elif code == errno.EIO:
            with pytest.raises(StoreUnavailable):
                place._use_direct_io(root, wish)
        elif wish:
            with pytest.raises(StoreError, match="no direct I/O here"):
                place._use_direct_io(root, wish)
        else:
            assert not place._use_direct_io(root, wish)
    assert len(told) == (wish is None and code in (errno.EINVAL, errno.ENOTSUP))
    assert open_files(root) == before


TRIES = 20


def works(queues: KernelQueues, path: Path) -> bool:
    """Whether one of several trials does, each of which waits for a busy disk a second."""
    return any(queues.works(path) for _ in range(TRIES))


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
    read = queues.read(fd, np.arange(8) * FILE_ALIGN, out, slice(None))
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
