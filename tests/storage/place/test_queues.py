"""TensorStore's settings, and the kernel's queues of reads."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts
from place_support import open_files

from ckv_jax.storage import StoreConfig, StoreError, StoreUnavailable
from ckv_jax.storage.place import kernel_queue, place
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues, fits
from ckv_jax.storage.segment.packing import aligned


@pytest.mark.parametrize("direct", [True, False])
def test_tensorstore_is_told_how_many_reads_and_past_what(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, threads in ((1, 2), (5, 5), (64, 8), (None, 2)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        spec = place._context(StoreConfig(io_concurrency=7), direct=direct).spec.to_json()
        assert spec["data_copy_concurrency"] == {"limit": threads}
    for name in ("file_io", "s3_request", "gcs_request"):
        assert spec[f"{name}_concurrency"] == {"limit": 7}
    mode = spec["file_io_mode"]
    assert (mode.get("mode", "default") if isinstance(mode, dict) else mode) == (
        "direct" if direct else "default"
    )
    assert spec["cache_pool"] in ({"total_bytes_limit": 0}, {})


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


def reads_past_the_cache(path: Path) -> bool:
    """By system calls of our own: whether the kernel has queues, and reads this file directly."""
    calls = {"x86_64": (206, 207), "aarch64": (0, 1)}.get(platform.machine())
    if calls is None or not hasattr(os, "O_DIRECT"):
        return False
    made, call = ctypes.c_ulong(0), ctypes.CDLL(None).syscall
    if call(ctypes.c_long(calls[0]), ctypes.c_long(kernel_queue._DEPTH), ctypes.byref(made)):
        return False
    call(ctypes.c_long(calls[1]), made)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, FILE_ALIGN)], 0) == FILE_ALIGN
    except OSError:
        return False
    finally:
        os.close(fd)


TRIES = 20


def works(queues: KernelQueues, path: Path) -> bool:
    """Whether one of several trials does, each of which waits for a busy disk a second."""
    return any(queues.works(path) for _ in range(TRIES))


def test_where_the_kernel_has_queues_they_are_used(file: Path, root: Path) -> None:
    """Else all that tests them is passed over, and nobody knows."""
    if not reads_past_the_cache(file):
        pytest.skip("no asynchronous direct reads here")
    before, late = open_files(file), set(kernel_queue._IN_FLIGHT)
    queues = KernelQueues()
    assert works(queues, file) and queues.align in (512, FILE_ALIGN)
    assert late >= kernel_queue._IN_FLIGHT and len(queues._idle) == 1
    assert open_files(file) == before
    queues.close()
    tries = (place._queues(root) for _ in range(TRIES))  # a marker is shorter than a block
    found = next(found for found in tries if found is not None)
    found.close()


def test_a_folder_that_tensorstore_cannot_open_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        place._wake(Path("a\0b"), ts.Context(), 5.0)


def test_queues_that_read_nothing_right_are_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelQueues, "works", lambda *_: False)
    assert place._queues(root) is None

    def fails(*_: object) -> bool:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(KernelQueues, "works", fails)
    assert place._queues(root) is None
    monkeypatch.setattr(kernel_queue, "_CALLS", {})
    assert place._queues(root) is None


def test_the_kernel_s_own_error_is_told(queues: KernelQueues) -> None:
    with pytest.raises(OSError, match="Invalid argument") as error:
        queues.submit(0, 0, 1)
    assert error.value.errno == errno.EINVAL


def test_what_fits_a_direct_read() -> None:
    whole = aligned(4 * FILE_ALIGN).reshape(4, FILE_ALIGN)
    assert fits(whole) and fits(whole, FILE_ALIGN)
    half = aligned(4 * 512).reshape(4, 512)
    assert fits(half) and not fits(half, FILE_ALIGN)
    assert not fits(aligned(4 * 520).reshape(4, 520))
    assert not fits(aligned(4 * 512 + 8)[8:].reshape(4, 512))


def test_rows_may_be_filled_in_part(queues: KernelQueues, file: Path) -> None:
    """Sizes of their own, a file's short end, and a queue that is full of others."""
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out = aligned(3 * 2 * FILE_ALIGN).reshape(3, 2 * FILE_ALIGN)
    out[:] = 7
    sizes = np.array([1, 2, 1], np.int64) * FILE_ALIGN
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.array([5, 8, 0]) * FILE_ALIGN, out, slice(None), sizes=sizes)
    landed: list[int] = []
    while (some := read.landed(20.0)) is not None:
        assert some.dtype == np.int64
        landed += some.tolist()
    assert sorted(landed) == [0, 1, 2] and read.landed(0.0) is None
    assert (out[0, :FILE_ALIGN] == pages[5]).all() and (out[0, FILE_ALIGN:] == 7).all()
    assert (out[1].reshape(2, -1) == pages[8:10]).all() and (out[2, :FILE_ALIGN] == pages[0]).all()
    last = (len(pages) - 1) * FILE_ALIGN
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    queues.read(fd, np.array([last]), out[:1], slice(None), expect=FILE_ALIGN).result(20.0)
    assert (out[0, :FILE_ALIGN] == pages[-1]).all()
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    short = queues.read(fd, np.array([0, last]), out[:2], slice(None))
    with pytest.raises(OSError) as error:
        short.result(20.0)
    assert error.value.errno == errno.EIO


def test_a_quarter_of_a_queue_is_waited_for(queues: KernelQueues, file: Path) -> None:
    """Not one at a time, which costs a call each, nor all, which are then checked too late."""
    asked: list[int] = []
    real = queues.events

    def events(queue_: int, least: int, out: np.ndarray, seconds: float) -> int:
        asked.append(least)
        return real(queue_, least, out, seconds)

    queues.events = events  # type: ignore[method-assign]
    out = aligned(64 * FILE_ALIGN).reshape(64, FILE_ALIGN)
    for count, least in ((64, 16), (8, 4), (3, 3)):
        asked.clear()
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        offsets = np.arange(count) * FILE_ALIGN
        queues.read(fd, offsets, out[:count], slice(None)).result(20.0)
        assert asked[0] == least and sum(asked) <= count


def test_a_trial_that_reads_too_little_is_none(
    queues: KernelQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    assert works(queues, tmp_path / "short")
    before, late = open_files(tmp_path), set(kernel_queue._IN_FLIGHT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _: SimpleNamespace(st_size=FILE_ALIGN))
        found = queues.works(tmp_path / "short")
    assert not found and open_files(tmp_path) == before and late >= kernel_queue._IN_FLIGHT


def test_a_trial_that_cannot_start_is_none(
    queues: KernelQueues, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: KernelQueues) -> int:
        raise OSError(errno.EAGAIN, "no more queues")

    before, idle = open_files(file), queues._idle
    monkeypatch.setattr(KernelQueues, "_new", refuse)
    queues._idle = []
    assert not queues.works(file)
    queues._idle = idle
    assert open_files(file) == before


def test_a_read_that_is_given_up_is_forgotten_once_it_has_landed(
    queues: KernelQueues, file: Path
) -> None:
    """As soon as another starts, whoever starts it."""
    out, real = aligned(2 * FILE_ALIGN).reshape(2, FILE_ALIGN), queues.events
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.zeros(1, np.int64), out[:1], slice(None))
    queues.events = lambda *_: 0  # type: ignore[method-assign]  # nothing has landed yet
    assert not read.given_up and not read.done()
    with pytest.raises(TimeoutError):
        read.result(0.0)
    queues.events = real  # type: ignore[method-assign]
    end = time.monotonic() + 20
    while read in kernel_queue._IN_FLIGHT and time.monotonic() < end:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        queues.read(fd, np.zeros(1, np.int64), out[1:], slice(None)).result(20.0)
    assert read not in kernel_queue._IN_FLIGHT and read.done()


def test_what_a_full_queue_does_not_take_is_handed_over_as_others_land(
    queues: KernelQueues, file: Path
) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out, calls, real = aligned(8 * FILE_ALIGN).reshape(8, FILE_ALIGN), [], queues.submit

    def submit(queue_: int, address: int, count: int) -> int:
        calls.append(count)
        if len(calls) == 1:
            return real(queue_, address, 3)
        if len(calls) == 2:
            raise OSError(errno.EAGAIN, "the queue is full")
        return real(queue_, address, count)

    queues.submit = submit  # type: ignore[method-assign]
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    read = queues.read(fd, np.arange(8) * FILE_ALIGN, out, slice(None))
    assert calls == [8, 5]  # and no more before some have landed
    read.result(20.0)
    assert calls[2] == 5 and (out == pages[:8]).all()


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
