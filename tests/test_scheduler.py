"""Who runs when: the queue by itself, with a runner that only takes notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from ckv_jax.cache.tiers import PoolExhausted
from ckv_jax.errors import Cancelled, DeadlineExceeded, EngineClosed
from ckv_jax.request import Request, Result
from ckv_jax.serving.fair_lock import FairLock
from ckv_jax.serving.handle import Handle
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.storage.errors import StoreError
from ckv_jax.trace import Trace

SECONDS = 20.0


class Work:
    """Runs for some steps and holds its handles until then."""

    def __init__(self, handles: Sequence[Handle], steps: int) -> None:
        self.handles = list(handles)
        self.steps = steps
        self.closed = False

    def step(self) -> bool:
        self.steps -= 1
        if self.steps:
            return True
        for handle in self.handles:
            handle.finish(Result(request=handle.request, trace=Trace()))
        return False

    def close(self) -> None:
        self.closed = True


class Notes:
    """Writes down each batch's ids. A request's id is its prefix's letter and a number."""

    def __init__(self) -> None:
        self.batches: list[str] = []
        self.work: list[Work] = []
        self.gate = threading.Event()
        self.faults: dict[str, Exception] = {}
        self.steps: dict[str, int] = {}
        self.cost = 1

    def together(self, handle: Handle) -> object:
        return handle.request.prefix

    def bytes_needed(self, batch: Sequence[Handle]) -> int:
        return self.cost * len(batch)

    def shorten(self, handle: Handle) -> bool:
        self.faults.pop(str(handle.request.id), None)
        return handle.request.prefix != "gone"

    def start(self, batch: Sequence[Handle]) -> Work | None:
        assert self.gate.wait(SECONDS)
        ids = [str(handle.request.id) for handle in batch]
        self.batches.append(" ".join(ids))
        for name in ids:
            if name in self.faults:
                raise self.faults[name]
        if ids[0] in self.steps:
            self.work.append(Work(batch, self.steps[ids[0]]))
            return self.work[-1]
        for handle in batch:
            handle.finish(Result(request=handle.request, trace=Trace()))
        return None


class Desk:
    """A scheduler whose thread is held up in a first batch until `run`."""

    def __init__(self, *, max_batch: int = 8, max_bytes: int = 100) -> None:
        self.notes = Notes()
        self.scheduler = Scheduler(
            self.notes, lock=FairLock(), max_batch=max_batch, max_bytes=max_bytes
        )
        self.handles: dict[str, Handle] = {}
        self.ask("-")
        while self.scheduler.waiting:
            time.sleep(0.001)

    def ask(self, names: str, *, deadline_s: float | None = None) -> None:
        new = [
            Handle(Request(prefix=name[0], suffix=[0], id=name, deadline_s=deadline_s))
            for name in names.split()
        ]
        self.handles |= {str(handle.request.id): handle for handle in new}
        self.scheduler.submit(new)

    def run(self) -> list[str]:
        """Lets the thread go; the batches, once every request has its outcome."""
        self.notes.gate.set()
        for handle in self.handles.values():
            handle.result(SECONDS)
        self.scheduler.close()
        return self.notes.batches[1:]

    def error(self, name: str) -> Exception | None:
        outcome = self.handles[name].result(SECONDS)
        return outcome.error


def test_requests_over_one_prefix_run_together_first_come_first_served() -> None:
    desk = Desk()
    desk.ask("a1 b1 a2")
    desk.ask("c1 b2 a3")
    assert desk.run() == ["a1 a2 a3", "b1 b2", "c1"]


def test_a_popular_prefix_starves_nobody() -> None:
    desk = Desk(max_batch=2)
    desk.ask("a1 a2 a3 b1 a4 a5 a6")
    assert desk.run() == ["a1 a2", "a3 a4", "b1", "a5 a6"]


def test_the_byte_budget_bounds_a_batch() -> None:
    desk = Desk(max_bytes=3)
    desk.ask("a1 a2 a3 a4 a5")
    assert desk.run() == ["a1 a2 a3", "a4 a5"]


def test_a_request_larger_than_the_budget_runs_alone() -> None:
    desk = Desk(max_bytes=3)
    desk.notes.cost = 5
    desk.ask("a1 a2")
    assert desk.run() == ["a1", "a2"]


def test_what_does_not_fit_waits_for_what_runs_and_is_not_overtaken() -> None:
    desk = Desk(max_bytes=2)
    desk.notes.steps = {"a1": 5}
    desk.ask("a1 a2")
    desk.ask("b1 b2 c1")
    assert desk.run() == ["a1 a2", "b1 b2", "c1"]
    assert desk.notes.work[0].closed


def test_new_batches_start_while_others_go_on() -> None:
    desk = Desk()
    desk.notes.steps = {"a1": 50}
    desk.ask("a1")
    desk.ask("b1")
    desk.notes.gate.set()
    desk.handles["b1"].result(SECONDS)
    assert desk.run() == ["a1", "b1"]


def test_one_failing_request_fails_alone() -> None:
    desk = Desk()
    desk.notes.faults = {"a2": ValueError("bad")}
    desk.ask("a1 a2 a3")
    assert desk.run() == ["a1 a2 a3", "a1", "a2", "a3"]
    assert isinstance(desk.error("a2"), ValueError)
    assert desk.error("a1") is None and desk.error("a3") is None


def test_full_pools_are_waited_for_and_else_fail_one_alone() -> None:
    desk = Desk()
    desk.notes.steps = {"a1": 5}
    desk.ask("a1")
    desk.notes.faults = {"b1": PoolExhausted("full")}
    desk.ask("b1")
    assert desk.run() == ["a1", "b1", "b1"]
    assert isinstance(desk.error("b1"), PoolExhausted)


def test_a_prefix_that_went_away_is_looked_up_again() -> None:
    desk = Desk()
    desk.notes.faults = {"a2": StoreError("gone")}
    desk.ask("a1 a2")
    assert desk.run() == ["a1 a2", "a1 a2"]
    assert desk.error("a2") is None


def test_a_fault_of_ours_is_raised_where_the_result_is_asked_for() -> None:
    desk = Desk()
    desk.notes.faults = {"a1": RuntimeError("broken")}
    desk.ask("a1")
    with pytest.raises(RuntimeError, match="broken"):
        desk.run()
    desk.ask("b1")
    assert desk.error("b1") is None
    desk.scheduler.close()


def test_cancelled_and_late_requests_never_start() -> None:
    desk = Desk()
    desk.ask("a1 a3")
    desk.ask("a2", deadline_s=0.01)
    desk.handles["a1"].cancel()
    time.sleep(0.05)
    assert desk.run() == ["a3"]
    assert isinstance(desk.error("a1"), Cancelled)
    assert isinstance(desk.error("a2"), DeadlineExceeded)


def test_the_engine_lock_goes_to_who_waits() -> None:
    lock, stop, had = FairLock(), threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                had.set()
                time.sleep(0.002)

    thread = threading.Thread(target=work)
    thread.start()
    assert had.wait(SECONDS)
    start = time.perf_counter()
    for _ in range(20):
        with lock:
            pass
    waited = time.perf_counter() - start
    stop.set()
    thread.join()
    assert waited < SECONDS / 10


def test_close_fails_what_waits_and_stops_the_thread() -> None:
    before = threading.active_count()
    desk = Desk()
    desk.notes.steps = {"a1": 10**9}
    desk.ask("a1")
    desk.notes.gate.set()
    while not desk.notes.work:
        time.sleep(0.001)
    desk.scheduler.close()
    desk.scheduler.close()
    assert isinstance(desk.error("a1"), EngineClosed)
    assert desk.notes.work[0].closed
    assert threading.active_count() == before
    with pytest.raises(EngineClosed):
        desk.ask("a2")
