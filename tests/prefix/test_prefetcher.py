"""What the prefetcher reads first, gives up, and never mixes up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.prefix.landing import Room
from ckv_jax.prefix.prefetcher import Prefetcher, ReadJob, State
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.trace import Trace

SHAPE = (1, 2, 4, 1, 8)


class SlowReader:
    """A reader in memory that can be slow, can be held back, and can fail.

    Pack (group, chunk) is filled with the number `content(group, chunk)`.

    `delay` gives the seconds a read takes; while `gate` is not set reads do not end. Chunks in
    `bad` come back as not ok; groups in `broken` raise.
    """

    def __init__(
        self,
        *,
        delay: Callable[[], float] = lambda: 0.0,
        bad: frozenset[int] = frozenset(),
        broken: frozenset[int] = frozenset(),
    ) -> None:
        self.delay = delay
        self.bad = bad
        self.broken = broken
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[int, list[int]]] = []
        self.started = threading.Semaphore(0)

    def read_packs(
        self, group: int, chunks: np.ndarray, out: np.ndarray, *, rows: np.ndarray | None = None
    ) -> np.ndarray:
        self.calls.append((group, chunks.tolist()))
        self.started.release()
        time.sleep(self.delay())
        if not self.gate.wait(30):
            raise TimeoutError("the test never opened the gate")
        if group in self.broken:
            raise OSError(f"group {group} is broken")
        ok = ~np.isin(chunks, list(self.bad))
        places = np.arange(len(chunks)) if rows is None else rows
        for row, chunk, good in zip(places, chunks.tolist(), ok, strict=True):
            out[row] = content(group, chunk) if good else 0
        return ok


def content(group: int, chunk: int) -> float:
    return 1000.0 * group + chunk


@pytest.fixture
def reader() -> SlowReader:
    return SlowReader()


@pytest.fixture
def prefetcher() -> Iterator[Prefetcher]:
    with closing(Prefetcher(1)) as made:
        yield made
        assert made.idle


def read(
    prefetcher: Prefetcher,
    reader: SlowReader,
    group: int,
    *chunks: int,
    demand: bool = True,
    trace: Trace | None = None,
) -> ReadJob:
    ids = np.array(chunks or (group,), np.int64)
    room = Room(np.full((2 * len(ids), *SHAPE), np.nan, np.float32), 2 * np.arange(len(ids)))
    job = ReadJob(
        reader=reader, group=group, first_group=group, chunks=ids, room=room, demanded=demand,
        trace=trace or Trace(), prefix="", span="read", num_bytes=room.array.nbytes, codes=ids,
    )  # fmt: skip
    prefetcher.submit(job)
    return job


def hold(prefetcher: Prefetcher, reader: SlowReader) -> ReadJob:
    """Keeps the only thread busy until the gate opens."""
    reader.gate.clear()
    job = read(prefetcher, reader, 99)
    assert reader.started.acquire(timeout=10)
    return job


def finish(prefetcher: Prefetcher, reader: SlowReader, *jobs: ReadJob) -> None:
    reader.gate.set()
    for job in jobs:
        prefetcher.wait(job)


def test_demands_go_before_speculation(prefetcher, reader) -> None:
    held = hold(prefetcher, reader)
    guesses = [read(prefetcher, reader, group, demand=False) for group in (1, 2)]
    demands = [read(prefetcher, reader, group) for group in (3, 4)]
    finish(prefetcher, reader, held, *demands, *guesses)
    assert [group for group, _ in reader.calls] == [99, 3, 4, 1, 2]


@pytest.mark.parametrize("threads", [2, 3])
def test_one_thread_of_several_never_speculates(reader, threads: int) -> None:
    reader.gate.clear()
    with closing(Prefetcher(threads)) as prefetcher:
        guesses = [read(prefetcher, reader, group, demand=False) for group in range(1, threads + 1)]
        for _ in range(threads - 1):
            assert reader.started.acquire(timeout=10)
        demand = read(prefetcher, reader, 9)
        assert reader.started.acquire(timeout=10)
        assert sorted(group for group, _ in reader.calls) == [*range(1, threads), 9]
        finish(prefetcher, reader, demand, *guesses)


def test_speculation_that_is_demanded_lets_the_next_begin(reader) -> None:
    reader.gate.clear()
    with closing(Prefetcher(2)) as prefetcher:
        guesses = [read(prefetcher, reader, group, demand=False) for group in (1, 2)]
        assert reader.started.acquire(timeout=10)
        while prefetcher._work.qsize():  # the other thread has found nothing that it may read
            time.sleep(0.001)
        prefetcher.promote(guesses[0])
        assert reader.started.acquire(timeout=10)
        finish(prefetcher, reader, *guesses)


def test_a_read_that_failed_has_brought_no_bytes() -> None:
    trace = Trace()
    with closing(Prefetcher(1)) as prefetcher:
        broken = SlowReader(broken=frozenset({1}))
        prefetcher.wait(read(prefetcher, broken, 1, 2, 3, trace=trace))
    assert trace.spans[0].args["bytes"] == trace.bytes["ssd"] == 0


def test_a_disk_that_never_answers_is_given_up(reader) -> None:
    reader.gate.clear()
    with closing(Prefetcher(1, hang_timeout_s=1.0)) as prefetcher:
        running, queued = read(prefetcher, reader, 1), read(prefetcher, reader, 2)
        for job in (running, queued):
            prefetcher.wait(job)
            assert not job.ok.any()
        assert running.settled is not None and not running.settled() and queued.settled is None
        reader.gate.set()
        while not running.settled():
            time.sleep(0.001)
        after = read(prefetcher, reader, 3)
        prefetcher.wait(after)
        assert after.ok.all() and not running.ok.any()
        assert prefetcher.stats.errors == 2


def test_a_hang_timeout_may_be_longer_than_a_lock_can_wait(reader) -> None:
    with closing(Prefetcher(1, hang_timeout_s=2 * threading.TIMEOUT_MAX)) as prefetcher:
        held = hold(prefetcher, reader)
        threading.Timer(0.05, reader.gate.set).start()
        prefetcher.wait(held)
        assert held.ok.all()


def test_a_read_given_up_twice_settles_once_nothing_of_it_writes_any_more(reader) -> None:
    """By its caller, as the thread hung, and then by the thread itself."""
    written = threading.Event()

    class Late:
        def read_packs(self, *of: object, **named: object) -> np.ndarray:
            reader.gate.wait(30)
            raise ReadTimeout("a pack", 1.0, written.is_set)

    reader.gate.clear()
    with closing(Prefetcher(1, hang_timeout_s=0.2)) as prefetcher:
        job = read(prefetcher, Late(), 1)
        prefetcher.wait(job)
        assert job.settled is not None and not job.settled()
        reader.gate.set()
        while job.left:
            time.sleep(0.001)
        assert not job.settled()
        written.set()
        assert job.settled()


def test_close_is_idempotent_and_leaves_no_thread(reader) -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(3)
    held = hold(prefetcher, reader)
    queued = [read(prefetcher, reader, group, demand=group % 2 == 0) for group in range(8)]
    threading.Timer(0.05, reader.gate.set).start()
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() <= before + 1  # the timer may still be ending
    assert held.ok.all() and all(job.state is State.ENDED for job in queued)
    with pytest.raises(RuntimeError, match="closed"):
        read(prefetcher, reader, 1)


ACTIONS = st.lists(
    st.tuples(st.sampled_from("demand guess promote wait drop".split()), st.integers(0, 7)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_no_order_of_calls_hangs_or_mixes_rows_up(
    actions: list[tuple[str, int]], threads: int, seed: int
) -> None:
    chance = random.Random(seed)
    bad, broken = frozenset({3}), frozenset({5})
    reader = SlowReader(delay=lambda: chance.choice((0.0, 0.0, 0.0005)), bad=bad, broken=broken)
    jobs: list[ReadJob] = []
    with closing(Prefetcher(threads)) as prefetcher:
        for kind, index in actions:
            if kind in ("demand", "guess"):
                made = read(prefetcher, reader, index, *range(index + 1), demand=kind == "demand")
                jobs.append(made)
            elif jobs:
                call = {"wait": prefetcher.wait, "drop": prefetcher.drop}
                call.get(kind, prefetcher.promote)(jobs[index % len(jobs)])
    for job in jobs:
        assert job.state is State.ENDED
        for row, chunk, ok in zip(job.room.rows, job.chunks.tolist(), job.ok, strict=True):
            assert ok == (job.t0_ns and chunk not in bad and job.group not in broken)
            if ok:
                assert (job.room.array[row] == content(job.group, chunk)).all()
