"""Waits for a disk: threads that may be left behind, and what becomes of late results."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from ckv_jax.storage import StoreUnavailable
from ckv_jax.storage.place import patience
from ckv_jax.storage.place.patience import Patience, Refused, may_be_left_behind, progress


def rested(waiting: Patience, threads: int) -> None:
    """Waits until so many threads of it wait for work: a caller goes on a little before."""
    end = time.monotonic() + 20
    while len(waiting._idle) < threads and time.monotonic() < end:
        time.sleep(0.001)
    assert len(waiting._idle) == threads


def test_work_is_done_on_a_thread_of_its_own_that_is_used_again() -> None:
    waiting = Patience(5.0)
    first = waiting.run("work", threading.current_thread)
    assert first is not threading.current_thread() and first.daemon
    rested(waiting, 1)
    assert waiting.run("work", threading.current_thread) is first
    rested(waiting, 1)
    inner = waiting.run("out", lambda: waiting.run("in", threading.current_thread))
    assert inner is first  # part of other such work
    rested(waiting, 1)
    waiting.close()
    first.join(20)
    assert not first.is_alive()
    assert waiting.run("work", lambda: 3) == 3  # new work may still come
    waiting.close()


def test_who_may_be_left_behind_needs_no_other_thread() -> None:
    waiting, found = Patience(5.0), []

    def work() -> None:
        may_be_left_behind()
        found.append(waiting.run("work", threading.current_thread))
        progress()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [thread]


def test_a_wait_may_have_a_limit_of_its_own() -> None:
    waiting, go = Patience(60.0), threading.Event()
    with pytest.raises(StoreUnavailable, match=r"slow: the disk has not answered for 0.05 s"):
        waiting.run("slow", lambda: go.wait(20), seconds=0.05)
    go.set()


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_result_that_came_too_late_is_given_away(fails: bool) -> None:
    waiting, late, go = Patience(0.05), [], threading.Event()

    def work() -> int:
        go.wait(20)
        if fails:
            raise KeyError("late")
        return 7

    with pytest.raises(StoreUnavailable):
        waiting.run("work", work, late=late.append)
    with pytest.raises(StoreUnavailable):
        waiting.run("work", work)  # which nobody wants
    assert waiting._stuck == 2
    go.set()
    rested(waiting, 2)
    assert waiting._stuck == 0
    assert late == ([] if fails else [7])
    assert waiting.run("work", lambda: 5, seconds=20, late=late.append) == 5
    assert 5 not in late
    waiting.close()


def test_no_more_threads_are_given_to_a_disk_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "_MOST_STUCK", 1)
    waiting, go = Patience(0.05), threading.Event()
    with pytest.raises(StoreUnavailable, match="stuck: the disk has not answered"):
        waiting.run("stuck", lambda: go.wait(20))
    with pytest.raises(Refused, match="none of 1 requests"):
        waiting.run("more", lambda: 1)
    go.set()


def test_a_thread_that_waits_for_work_keeps_no_result() -> None:
    waiting = Patience(20.0)
    gone = weakref.ref(waiting.run("work", threading.Event))
    rested(waiting, 1)
    gc.collect()
    assert gone() is None
    waiting.close()


def test_a_job_that_nobody_waits_for_says_so() -> None:
    job = patience._Job(lambda: 3, None)
    assert not job.run() and job.result == 3 and job.done.is_set()
    assert not job.leave()
    left = patience._Job(lambda: 3, None)
    assert left.leave() and left.run() and not left.done.is_set()
