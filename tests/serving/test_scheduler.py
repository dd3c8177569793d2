"""Who runs when: the queue by itself, with a worker that only takes notes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import threading
import time
from collections.abc import Generator
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ckv_jax.errors import Cancelled, CkvError, DeadlineExceeded, EngineClosed
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.request import Request, Result
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.errors import StoreError
from ckv_jax.trace import Trace

SECONDS = 20.0


class Notes:
    """Writes down what it is asked for. A request's id is its prefix's letter and a number.

    Batches are of one letter. Requests named in `steps` run on for so many tokens.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gate = threading.Event()
        self.faults: dict[str, Exception] = {}
        self.steps: dict[str, int] = {}
        self.room = 100
        self.paused = False
        """Whether those that run on wait for a job."""
        self.going: dict[str, tuple[int, list[Sequence]]] = {}
        self.scheduler: Scheduler | None = None

    @property
    def decoding(self) -> list[Sequence]:
        return [sequence for _, sequences in self.going.values() for sequence in sequences]

    @property
    def running(self) -> int:
        return 0 if self.paused else len(self.decoding)

    def together(self, sequence: Sequence) -> object:
        prefix = str(sequence.request.prefix)
        return None if prefix == "d" else prefix

    def fits(self, batch: Several[Sequence], job_bytes: int) -> bool:
        return len(self.decoding) + len(batch) + job_bytes <= self.room

    def shorten(self, sequence: Sequence) -> bool:
        self.faults.pop(str(sequence.request.id), None)
        return sequence.request.prefix != "gone"

    def first_tokens(self, batch: Several[Sequence]) -> None:
        assert self.gate.wait(SECONDS)
        ids = [str(sequence.request.id) for sequence in batch]
        self.done.append(" ".join(ids))
        for name in ids:
            if name in self.faults:
                raise self.faults[name]
        if ids[0] in self.steps:
            self.going[ids[0]] = (self.steps[ids[0]], list(batch))
            return
        for sequence in batch:
            answer(sequence)

    def step(self) -> list[Job]:
        for name, (left, sequences) in () if self.paused else list(self.going.items()):
            self.done.append(f"{name}+")
            self.going[name] = (left - 1, sequences)
            if left == 1:
                del self.going[name]
                for sequence in sequences:
                    answer(sequence)
        return []

    def job_for(self, sequence: Sequence) -> Job:
        steps = self.blocks(str(sequence.request.id), 3, sequence)
        return Job(steps, num_bytes=1, sequence=sequence)

    def recovery(self, needed: RecoveryNeeded) -> Job:
        return Job(self.blocks("recover", 2))

    def end(self, error: CkvError) -> None:
        for _, sequences in self.going.values():
            for sequence in sequences:
                sequence.fail(error)
        self.going.clear()

    def blocks(
        self, name: str, count: int, sequence: Sequence | None = None
    ) -> Generator[None, None, str]:
        for block in range(count):
            self.done.append(f"{name}:{block}")
            if block + 1 < count:
                yield
        if sequence is not None:
            answer(sequence)
        return name


def answer(sequence: Sequence) -> None:
    sequence.finish(Result(request=sequence.request, trace=Trace()))
    sequence.settle()


class Lost(RecoveryNeeded):
    """Of the prefix of a letter."""

    def __init__(self, letter: str = "a") -> None:
        Exception.__init__(self)
        self.recovered: Any = SimpleNamespace(prefix=prefix_of(letter))


def prefix_of(letter: str) -> Any:
    return SimpleNamespace(id=letter)


class Desk:
    """A scheduler whose thread is held up in a first batch until `run`."""

    def __init__(self, *, max_batch: int = 8, max_bytes: int = 100, room: int = 100) -> None:
        self.notes = Notes()
        self.notes.room = room
        self.scheduler = Scheduler(self.notes, max_batch=max_batch, max_bytes=max_bytes)
        self.sequences: dict[str, Sequence] = {}
        self.ask("-")
        while self.scheduler.waiting:
            time.sleep(0.001)

    def ask(self, names: str, *, deadline_s: float | None = None) -> None:
        new = [
            Sequence(Request(prefix=name[0], suffix=[0], id=name, deadline_s=deadline_s))
            for name in names.split()
        ]
        for sequence in new:
            sequence.prefix = prefix_of(str(sequence.request.prefix))
        self.sequences |= {str(sequence.request.id): sequence for sequence in new}
        self.scheduler.submit(new)

    def run(self) -> list[str]:
        """Lets the thread go; what it did, once every request has its outcome."""
        self.notes.gate.set()
        for sequence in self.sequences.values():
            sequence.result(SECONDS)
        self.scheduler.close()
        return self.notes.done[1:]

    def error(self, name: str) -> Exception | None:
        return self.sequences[name].result(SECONDS).error


@pytest.mark.parametrize(
    ("desk", "steps", "asked", "done"),
    [
        ({}, {}, ["a1 b1 a2", "c1 b2 a3"], ["a1 a2 a3", "b1 b2", "c1"]),
        ({"max_batch": 2}, {}, ["a1 a2 a3 b1 a4 a5 a6"], ["a1 a2", "a3 a4", "b1", "a5 a6"]),
        ({"room": 3}, {}, ["a1 a2 a3 a4 a5"], ["a1 a2 a3", "a4 a5"]),
        ({"room": 0}, {}, ["a1 a2"], ["a1", "a2"]),
        (
            {"room": 2}, {"a1": 3}, ["a1 a2", "b1 b2 c1"],
            ["a1 a2", "a1+", "a1+", "a1+", "b1 b2", "c1"],
        ),
        ({}, {}, ["d1 a1 b1"], ["a1", "d1:0", "b1", "d1:1", "d1:2"]),
    ],
    ids=[
        "first come, first served", "a popular prefix starves no other", "room bounds a batch",
        "what never fits runs alone", "what does not fit waits and is not overtaken",
        "a prompt that is not stored is a job between others",
    ],
)  # fmt: skip
def test_the_queue_runs_in_this_order(
    desk: dict[str, int], steps: dict[str, int], asked: list[str], done: list[str]
) -> None:
    made = Desk(**desk)
    made.notes.steps = steps
    for names in asked:
        made.ask(names)
    assert made.run() == done


def test_a_request_that_does_not_fit_into_a_batch_is_not_overtaken() -> None:
    desk = Desk()

    def fits(batch: Several[Sequence], job_bytes: int) -> bool:
        return len(batch) == 1 or all(sequence.request.id != "a2" for sequence in batch)

    desk.notes.fits = fits  # type: ignore[method-assign]
    desk.ask("a1 a2 a3 a4")
    assert desk.run() == ["a1", "a2", "a3 a4"]


def test_jobs_that_fit_together_take_turns_and_small_ones_pass_large_ones() -> None:
    desk = Desk(max_bytes=5)
    for name, size in (("x", 2), ("big", 4), ("y", 3)):
        desk.scheduler.add(Job(desk.notes.blocks(name, 2), num_bytes=size))
    last = desk.scheduler.add(Job(desk.notes.blocks("z", 1), num_bytes=6))  # more than there is
    desk.notes.gate.set()
    last.future.result(SECONDS)
    assert desk.run() == "x:0 y:0 x:1 y:1 big:0 big:1 z:0".split()


def test_each_round_has_a_batch_a_token_and_a_block() -> None:
    desk = Desk()
    desk.notes.steps = {"a1": 4}
    jobs = [Job(desk.notes.blocks(name, 2)) for name in ("x", "y")]
    for job in jobs:
        desk.scheduler.add(job)
    desk.ask("a1 b1 c1")
    done = desk.run()
    assert [job.future.result(SECONDS) for job in jobs] == ["x", "y"]
    assert done == "a1 a1+ x:0 b1 a1+ y:0 c1 a1+ x:1 a1+ y:1".split()


def test_a_job_that_is_not_ready_delays_no_other() -> None:
    desk = Desk()
    ready = threading.Event()
    late = desk.scheduler.add(Job(desk.notes.blocks("late", 1), ready=ready.is_set))
    desk.ask("a1")
    desk.notes.gate.set()
    desk.sequences["a1"].result(SECONDS)
    assert not late.future.done()
    ready.set()
    desk.scheduler.wake()
    assert late.future.result(SECONDS) == "late"
    assert desk.run() == ["a1", "late:0"]


def test_a_job_that_fails_or_is_cancelled_ends_alone() -> None:
    desk = Desk()

    def broken() -> Generator[None, None, None]:
        yield
        raise StoreError("full")

    failing, given_up = Job(broken()), Job(desk.notes.blocks("never", 9))
    given_up.cancel()
    for job in (failing, given_up):
        desk.scheduler.add(job)
    desk.ask("a1")
    assert desk.run() == ["a1"]
    assert isinstance(failing.future.exception(SECONDS), StoreError)
    assert given_up.future.cancelled() and desk.scheduler.jobs == 0


@pytest.mark.parametrize(
    ("name", "fault", "asked", "done"),
    [
        ("a2", ValueError("bad"), "a1 a2 a3", "a1 a2 a3,a1,a2,a3"),
        ("b1", PoolExhausted("full"), "r1 b1", "r1,r1+,b1,r1+,b1"),  # waited for, then alone
    ],
    ids=["bad", "full"],
)
def test_what_fails_in_a_batch_fails_alone(
    name: str, fault: Exception, asked: str, done: str
) -> None:
    desk = Desk()
    desk.notes.steps, desk.notes.faults = {"r1": 2}, {name: fault}
    desk.ask(asked)
    assert desk.run() == done.split(",")
    for one in asked.split():
        assert desk.error(one) is (fault if one == name else None)


def test_a_request_whose_first_token_was_sent_is_not_tried_again() -> None:
    """The listener would get it twice."""
    desk = Desk()
    first = desk.notes.first_tokens

    def first_tokens(batch: Several[Sequence]) -> None:
        if len(batch) > 1:
            batch[0].token_ids.append(7)
        first(batch)

    desk.notes.first_tokens = first_tokens  # type: ignore[method-assign]
    desk.notes.faults = {"a2": ValueError("bad")}
    desk.ask("a1 a2 a3")
    assert desk.run() == ["a1 a2 a3", "a2", "a3"]
    assert [str(desk.error(name)) for name in ("a1", "a2", "a3")] == ["bad", "bad", "None"]


@pytest.mark.parametrize("fault", [ValueError, StoreError, None])
def test_a_request_with_no_shorter_prefix_fails_and_others_are_tried_again(
    fault: type[Exception] | None,
) -> None:
    """Looking up again changes nothing, or says itself what is wrong. The other request has nothing
    to look up again: it is not even asked for."""
    desk = Desk()
    desk.notes.faults = {"a1": StoreError("gone")}

    def shorten(sequence: Sequence) -> bool:
        if fault is not None:
            raise fault("too long")
        return False

    desk.notes.shorten = shorten  # type: ignore[method-assign]
    desk.ask("a1 a2")
    assert desk.run() == ["a1 a2", "a1", "a2"]
    assert str(desk.error("a1")) == ("gone" if fault is None else "too long")
    assert isinstance(desk.error("a1"), fault or StoreError) and desk.error("a2") is None


@pytest.mark.parametrize(("name", "method"), [("a1", "shorten"), ("d1", "job_for")])
def test_a_fault_of_ours_as_a_request_is_looked_up_again_or_gets_a_job_ends_it_alone(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    desk.notes.faults = {"a1": StoreError("gone")}

    def full(sequence: Sequence) -> Any:
        raise MemoryError("full")

    monkeypatch.setattr(desk.notes, method, full)
    desk.ask(f"{name} b1")
    desk.notes.gate.set()
    with pytest.raises(MemoryError, match="full"):
        desk.error(name)
    assert desk.error("b1") is None
    desk.scheduler.close()


def test_a_request_waits_for_lost_kv_while_others_go_on() -> None:
    desk = Desk()
    first = desk.notes.first_tokens

    def first_tokens(batch: Several[Sequence]) -> None:
        try:
            first(batch)
        except RecoveryNeeded:
            del desk.notes.faults["a1"]
            raise

    desk.notes.first_tokens = first_tokens  # type: ignore[method-assign]
    desk.notes.faults = {"a1": Lost()}
    desk.ask("a1 a2 b1")
    assert desk.run() == ["a1 a2", "b1", "recover:0", "recover:1", "a1 a2"]


def test_a_request_is_cancelled_while_it_waits_for_lost_kv() -> None:
    desk, ready = Desk(), threading.Event()
    desk.notes.recovery = lambda needed: Job(  # type: ignore[method-assign]
        desk.notes.blocks("recover", 1), ready=ready.is_set
    )
    desk.notes.faults = {"a1": Lost()}
    desk.ask("a1 a2")
    desk.notes.gate.set()
    while not desk.scheduler.jobs:
        time.sleep(0.001)
    desk.sequences["a1"].cancel()
    assert isinstance(desk.error("a1"), Cancelled) and not desk.sequences["a2"].done()
    ready.set()
    assert desk.run() == ["a1 a2", "recover:0", "a2"] and desk.error("a2") is None


def test_generations_that_wait_for_lost_kv_keep_their_room() -> None:
    desk = Desk(room=1)
    desk.notes.steps = {"a1": 3}

    def recovery() -> Generator[None, None, None]:
        desk.notes.paused = True
        yield
        desk.notes.paused = False

    desk.ask("a1 b1")
    desk.scheduler.add(Job(recovery()))
    assert desk.run() == ["a1", "a1+", "a1+", "a1+", "b1"]


@pytest.mark.parametrize("name", ["a1", "d1"])
def test_a_late_request_fails_while_a_job_that_waits_holds_the_room(name: str) -> None:
    """Nothing happens that would wake the thread. A request may be a job that has not begun."""
    desk, begun = Desk(room=1, max_bytes=1), threading.Event()

    def steps() -> Generator[None, None, None]:
        begun.set()
        yield

    desk.scheduler.add(Job(steps(), num_bytes=1, ready=lambda: not begun.is_set()))
    desk.notes.gate.set()
    assert begun.wait(SECONDS)
    desk.ask(name, deadline_s=0.05)
    assert isinstance(desk.error(name), DeadlineExceeded)
    desk.scheduler.close()


def test_close_fails_what_waits_and_stops_the_thread() -> None:
    before = threading.active_count()
    desk = Desk()
    desk.notes.steps = {"a1": 10**9}
    job = desk.scheduler.add(Job(desk.notes.blocks("long", 10**9)))
    desk.ask("a1")
    desk.notes.gate.set()
    while not desk.notes.going:
        time.sleep(0.001)
    desk.scheduler.close()
    desk.scheduler.close()
    assert isinstance(desk.error("a1"), EngineClosed)
    assert isinstance(job.future.exception(SECONDS), EngineClosed)
    assert threading.active_count() == before
    with pytest.raises(EngineClosed):
        desk.ask("a2")


def test_close_fails_what_waits_for_lost_kv() -> None:
    desk = Desk()
    desk.notes.recovery = lambda needed: Job(  # type: ignore[method-assign]
        desk.notes.blocks("recover", 10**9)
    )
    desk.notes.faults = {"a1": Lost()}
    desk.ask("a1 a2")
    desk.notes.gate.set()
    while "recover:0" not in desk.notes.done:
        time.sleep(0.001)
    desk.scheduler.close()
    assert isinstance(desk.error("a1"), EngineClosed)
    assert isinstance(desk.error("a2"), EngineClosed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_ends_and_no_request_waits_for_it() -> None:
    desk = Desk()
    desk.notes.steps = {"a1": 3}

    def step() -> list[Job]:
        raise RuntimeError("broken")

    desk.notes.step = step  # type: ignore[method-assign]
    desk.ask("a1")
    refused: list[str] = []

    def again(_: Sequence) -> None:  # at once, in the engine's thread
        try:
            desk.scheduler.add(Job(desk.notes.blocks("late", 1)))
        except EngineClosed as error:
            refused.append(str(error))

    desk.sequences["a1"].on_done(again)
    desk.notes.gate.set()
    assert isinstance(desk.error("a1"), EngineClosed)
    thread = desk.scheduler._thread
    thread.join(SECONDS)
    assert refused == ["the engine is closed"]
    with pytest.raises(EngineClosed):
        desk.ask("a2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # that forks beside threads are risky
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_process_is_refused() -> None:
    desk = Desk()

    def child(out: multiprocessing.connection.Connection) -> None:
        try:
            desk.scheduler.submit([])
        except EngineClosed as error:
            out.send(str(error))
        desk.scheduler.close()

    parent, end = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(end,))
    process.start()
    assert parent.poll(SECONDS) and "forked" in parent.recv()
    process.join(SECONDS)
    assert process.exitcode == 0
    desk.run()


def test_lost_kv_that_cannot_be_computed_is_raised_to_its_requests() -> None:
    desk = Desk()

    def broken() -> Generator[None, None, None]:
        yield
        raise RuntimeError("no memory")

    desk.notes.recovery = lambda needed: Job(broken())  # type: ignore[method-assign]
    desk.notes.faults = {"a1": Lost()}
    desk.ask("a1 b1")
    desk.notes.gate.set()
    with pytest.raises(RuntimeError, match="no memory"):
        desk.error("a1")
    assert desk.error("b1") is None
    desk.scheduler.close()


@pytest.mark.parametrize(("lost", "failed"), [("a", "a1 a2"), ("c", "a1 b1 a2")])
def test_lost_kv_that_cannot_be_computed_ends_those_over_its_prefix(lost: str, failed: str) -> None:
    """The engine tries the rest of the batch again. It ends all rows if none has that prefix."""
    desk = Desk()

    def full() -> Generator[None, None, None]:
        yield
        raise StoreError("no room")

    desk.notes.together = lambda sequence: True  # type: ignore[method-assign]
    desk.notes.recovery = lambda needed: Job(full())  # type: ignore[method-assign]
    desk.notes.faults = {"a1": Lost(lost)}
    desk.ask("a1 b1 a2")
    assert desk.run() == ["a1 b1 a2"] + ["b1"] * (lost == "a")
    for name in ("a1", "b1", "a2"):
        assert isinstance(desk.error(name), StoreError) == (name in failed.split())


def test_a_fault_of_ours_is_raised_where_the_result_is_asked_for() -> None:
    desk = Desk()
    desk.notes.faults = {"a1": RuntimeError("broken")}
    desk.ask("a1")
    with pytest.raises(RuntimeError, match="broken"):
        desk.run()
    desk.ask("b1")
    assert desk.error("b1") is None
    desk.scheduler.close()


# -- a request by itself -------------------------------------------------------------------------


def test_a_deadline_and_the_time_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    clock = SimpleNamespace(perf_counter_ns=lambda: now[0])
    monkeypatch.setattr("ckv_jax.serving.sequence.time", clock)
    made = Sequence(Request(prefix="a", suffix=[1], deadline_s=2))
    now[0] = 2 * 10**9
    assert made.lapsed() is None and made.queued_ms == 2000
    made.begin()
    now[0] += 1
    assert made.queued_ms == 2000 and isinstance(made.lapsed(), DeadlineExceeded)


def test_a_settled_result_waits_until_nothing_is_held() -> None:
    made = Sequence(Request(prefix="a", suffix=[1]))
    made.finish(Result(request=made.request, trace=Trace()))
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(made.settled_result)
        with pytest.raises(TimeoutError):
            held.result(0.2)
        made.settle()
        assert held.result(SECONDS) is made.result(0)
