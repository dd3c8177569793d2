"""What reads of one call may take: how long each wait is, what ends it, what is told of it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from ckv_jax.storage.errors import ReadTimeout, StoreUnavailable
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.segment.deadline import Deadline, Gate


class Slow:
    """A gate and a read that come too late, and note how long they were waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.asked = 0

    def enter(self, num_bytes: int, timeout: float) -> bool:
        self.waits.append(timeout)
        return False

    def result(self, timeout: float) -> None:
        self.waits.append(timeout)
        raise TimeoutError

    def landed(self, timeout: float) -> np.ndarray:
        self.waits.append(timeout)
        raise TimeoutError

    def done(self) -> bool:
        self.asked += 1
        return False


def landed(error: Exception | None = None) -> Future[None]:
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def test_a_store_has_forty_mebibytes_in_flight() -> None:
    gate = Gate()
    assert gate.enter(30 << 20, 0) and gate.enter(10 << 20, 0) and not gate.enter(1, 0)


@pytest.mark.parametrize("seconds", [0, 500])
def test_every_wait_takes_what_is_left_of_one_deadline(seconds: int) -> None:
    slow: Any = Slow()
    deadline = Deadline(seconds, slow)
    assert max(seconds / 2, 0.0009) < deadline.left() <= max(seconds, 0.001)
    for wait in (
        lambda: deadline.admit(1, "this"),
        lambda: deadline.wait(slow, "this"),
        lambda: deadline.wait_some(slow, "this"),
    ):
        with pytest.raises(ReadTimeout, match=f"this did not return within {seconds} s"):
            wait()
    assert len(slow.waits) == 3 and max(slow.waits) <= seconds
    if seconds == 0:  # none is negative, which would be an error of TensorStore's
        assert slow.waits[:2] == [0, 0]
    else:
        assert min(slow.waits) > seconds / 2


def test_every_read_is_told_that_it_is_late() -> None:
    reads: list[Any] = [Slow(), Slow()]
    deadline = Deadline(0, Gate())
    for read in reads:
        deadline.follow(read)
    with pytest.raises(ReadTimeout) as late:
        deadline.wait(reads[0], "reading")
    assert [read.asked for read in reads] == [1, 1] and not late.value.settled()


def test_a_read_that_failed_is_no_error() -> None:
    deadline = Deadline(5, Gate())
    assert deadline.wait(landed(), "reading")
    assert not deadline.wait(landed(ValueError("damaged")), "reading")
    with pytest.raises(MemoryError):
        deadline.wait(landed(MemoryError()), "reading")


@pytest.mark.parametrize("error", [None, ReadTimeout("late", 5, bool), MemoryError()], ids=str)
def test_only_an_error_that_leaves_the_buffer_free_waits_for_reads(error: Exception | None) -> None:
    """Its caller takes the buffer as free, unless he is told that reads are late."""
    waited: list[str] = []

    class Read:
        def __init__(self, name: str) -> None:
            self.name = name

        def result(self, timeout: float) -> None:
            waited.append(self.name)

    def read() -> None:
        with Deadline(5, Gate()) as deadline:
            deadline.follow(Read("first"))
            deadline.follow(Read("second"))
            if error is not None:
                raise error

    if error is None:
        read()
    else:
        with pytest.raises(type(error)):
            read()
    assert waited == (["first", "second"] if isinstance(error, MemoryError) else [])


# -- starting reads ------------------------------------------------------------------------------


def test_what_starts_reads_in_time_gives_what_it_gave() -> None:
    deadline, patience = Deadline(5, Gate()), Patience(5)
    assert deadline.start(patience, "starting", lambda: 7) == 7

    def broken() -> None:
        raise StoreUnavailable("no descriptors")

    with pytest.raises(StoreUnavailable, match="no descriptors"):
        deadline.start(patience, "starting", broken)
    patience.close()


def test_what_starts_reads_too_late_has_settled_when_it_is_over() -> None:
    deadline, patience, go_on = Deadline(0, Gate()), Patience(5), threading.Event()
    over = threading.Event()

    def hangs() -> None:
        assert go_on.wait(20)
        deadline.follow(read)
        over.set()

    read: Future[None] = Future()
    with pytest.raises(ReadTimeout, match="starting did not return within 0 s") as late:
        deadline.start(patience, "starting", hangs)
    assert not late.value.settled()
    go_on.set()
    assert over.wait(20) and not late.value.settled()  # it has started a read
    read.set_result(None)
    until = time.monotonic() + 20
    while not late.value.settled():
        assert time.monotonic() < until
        time.sleep(0.001)
    patience.close()


def test_what_was_never_started_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ReadTimeout, match="starting did not return within 5 s") as late:
        Deadline(5, Gate()).start(Patience(5), "starting", lambda: 7)
    assert late.value.settled()
