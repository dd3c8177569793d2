"""Priorities, cancellation, faults and bounded memory of the prefetcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from ckv_jax.reads.prefetcher import Prefetcher, ReadJob, RequestToken
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.trace import Trace

from .slow_reader import PACK_BYTES, SHAPE, SlowReader, content

PAGE = 4096  # what the smallest block takes


@pytest.fixture
def reader() -> SlowReader:
    return SlowReader()


@pytest.fixture
def prefetcher() -> Iterator[Prefetcher]:
    with Prefetcher(1, 64 * PAGE, max_packs_per_job=4) as made:
        yield made
        stats = made.stats
        assert stats.queued == stats.waiting == stats.running == 0


def submit(
    prefetcher: Prefetcher,
    reader: SlowReader,
    owner: RequestToken,
    group: int,
    *chunks: int,
    demand: bool = True,
) -> ReadJob:
    ids = np.array(chunks or (group,), np.int64)
    (job,) = prefetcher.submit(
        reader, group, ids, SHAPE, np.float32, demand=demand, owner=owner, trace=None
    )
    return job


def hold(prefetcher: Prefetcher, reader: SlowReader, owner: RequestToken) -> ReadJob:
    """Keeps the only thread busy until the gate opens."""
    reader.gate.clear()
    job = submit(prefetcher, reader, owner, 99)
    assert reader.started.acquire(timeout=10)
    return job


def finish(reader: SlowReader, *jobs: ReadJob) -> None:
    reader.gate.set()
    for job in jobs:
        job.result(10)
        job.release()


def test_rows_are_the_packs_in_the_order_asked(prefetcher, reader) -> None:
    job = submit(prefetcher, reader, prefetcher.owner(), 2, 7, 3, 5)
    result = job.result(10)
    assert result.ok.tolist() == [True] * 3
    assert result.rows.shape == (3, *SHAPE) and result.rows.dtype == np.float32
    assert result.rows[:, 0, 0, 0, 0, 0].tolist() == [content(2, c) for c in (7, 3, 5)]
    assert result.rows.flags.c_contiguous and result.rows.ctypes.data % PAGE == 0
    assert result.bytes == 3 * PACK_BYTES and 0 < result.t0_ns <= result.t1_ns
    assert job.done() and job.started()
    job.release()
    assert prefetcher.stats.buffer_bytes == 0


def test_bfloat16_rows_are_views_too(prefetcher) -> None:
    class Bits:
        def read_packs(self, group: int, chunks: np.ndarray, out: np.ndarray) -> np.ndarray:
            assert out.dtype == ml_dtypes.bfloat16
            out.view(np.uint16)[...] = 0x3F80
            return np.ones(len(chunks), np.bool_)

    (job,) = prefetcher.submit(
        Bits(), 0, np.arange(2), SHAPE, ml_dtypes.bfloat16, demand=True, owner=prefetcher.owner()
    )
    assert (job.result(10).rows.astype(np.float32) == 1.0).all()
    job.release()


def test_long_lists_are_cut_into_jobs(prefetcher, reader) -> None:
    jobs = prefetcher.submit(
        reader, 0, np.arange(10), SHAPE, np.float32, demand=True, owner=prefetcher.owner()
    )
    assert [job.chunks.tolist() for job in jobs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    finish(reader, *jobs)


def test_demands_go_before_speculation(prefetcher, reader) -> None:
    owner = prefetcher.owner()
    held = hold(prefetcher, reader, owner)
    guesses = [submit(prefetcher, reader, owner, group, demand=False) for group in (1, 2)]
    demands = [submit(prefetcher, reader, owner, group) for group in (3, 4)]
    finish(reader, held, *demands, *guesses)
    assert [group for group, _ in reader.calls] == [99, 3, 4, 1, 2]


def test_promoted_speculation_goes_with_the_demands(prefetcher, reader) -> None:
    owner = prefetcher.owner()
    held = hold(prefetcher, reader, owner)
    first, second = (submit(prefetcher, reader, owner, g, demand=False) for g in (1, 2))
    prefetcher.promote(second)
    prefetcher.promote(second)
    finish(reader, held, second, first)
    assert [group for group, _ in reader.calls] == [99, 2, 1]
    assert prefetcher.stats.promoted == 1


def test_one_thread_of_several_never_speculates(reader) -> None:
    with Prefetcher(2, 64 * PAGE) as prefetcher:
        owner = prefetcher.owner()
        reader.gate.clear()
        guesses = [submit(prefetcher, reader, owner, g, demand=False) for g in (1, 2, 3)]
        assert reader.started.acquire(timeout=10)
        demand = submit(prefetcher, reader, owner, 4)
        assert reader.started.acquire(timeout=10)
        assert [group for group, _ in reader.calls] == [1, 4]
        finish(reader, demand, *guesses)


def test_cancel_drops_what_is_queued_and_frees_what_is_running(prefetcher, reader) -> None:
    mine, other = prefetcher.owner(), prefetcher.owner()
    running = hold(prefetcher, reader, mine)
    queued = [submit(prefetcher, reader, mine, g, demand=g < 3) for g in (1, 2, 3)]
    kept = submit(prefetcher, reader, other, 4)
    prefetcher.cancel(mine)
    assert all(job.done() and not job.result(0).ok.any() for job in queued)
    assert not running.done()
    reader.gate.set()
    prefetcher.cancel(mine, wait=True)
    assert not running.result(10).ok.any() and not mine.jobs
    assert kept.result(10).ok.all()
    assert prefetcher.stats.buffer_bytes == PAGE
    assert [group for group, _ in reader.calls] == [99, 4]
    kept.release()
    assert prefetcher.stats.buffer_bytes == 0


def test_cancel_leaves_rows_that_were_handed_out(prefetcher, reader) -> None:
    owner = prefetcher.owner()
    job = submit(prefetcher, reader, owner, 5)
    rows = job.result(10).rows
    prefetcher.cancel(owner)
    other = submit(prefetcher, reader, owner, 6)
    other.result(10)
    assert (rows == content(5, 5)).all()
    finish(reader, job, other)
    job.release()
    assert prefetcher.stats.buffer_bytes == 0 and not owner.jobs


def test_bad_packs_are_not_ok_and_the_others_are() -> None:
    reader = SlowReader(bad=frozenset({2}))
    with Prefetcher(2, 64 * PAGE) as prefetcher:
        job = submit(prefetcher, reader, prefetcher.owner(), 0, 1, 2, 3)
        result = job.result(10)
        assert result.ok.tolist() == [True, False, True] and result.error is None
        assert prefetcher.stats.bad_packs == 1 and prefetcher.stats.errors == 0
        job.release()


def test_a_reader_that_raises_is_a_miss_with_zero_rows() -> None:
    reader = SlowReader(broken=frozenset({3}))
    with Prefetcher(2, 64 * PAGE) as prefetcher:
        owner, trace = prefetcher.owner(), Trace()
        (job,) = prefetcher.submit(
            reader, 3, np.arange(2), SHAPE, np.float32, demand=True, owner=owner, trace=trace
        )
        result = job.result(10)
        assert not result.ok.any() and not result.rows.any()
        assert result.error == "OSError: group 3 is broken"
        assert prefetcher.stats.errors == 1 and prefetcher.stats.bad_packs == 2
        assert trace.bytes["ssd"] == 0
        job.release()
        good = submit(prefetcher, reader, owner, 4)
        assert good.result(10).ok.all(), "the thread lives on"
        good.release()


def test_the_block_of_a_read_given_up_is_not_reused_before_it_has_ended() -> None:
    ended = threading.Event()
    late: list[np.ndarray] = []

    class Hanging:
        def read_packs(self, group: int, chunks: np.ndarray, out: np.ndarray) -> np.ndarray:
            late.append(out)
            raise ReadTimeout("a read", 0.1, ended.is_set)

    with Prefetcher(1, PAGE) as prefetcher:
        owner = prefetcher.owner()
        (hung,) = prefetcher.submit(
            Hanging(), 0, np.arange(2), SHAPE, np.float32, demand=True, owner=owner
        )
        result = hung.result(10)
        late[0][...] = 7
        assert not result.ok.any() and not result.rows.any()
        hung.release()
        assert prefetcher.stats.buffer_bytes == PAGE
        reader = SlowReader()
        other = submit(prefetcher, reader, owner, 1)
        rows = other.result(10).rows
        late[0][...] = 8
        assert (rows == content(1, 1)).all()
        other.release()
        ended.set()
        assert prefetcher.stats.buffer_bytes == prefetcher.stats.overflow_bytes == 0


def test_reads_are_traced(prefetcher, reader) -> None:
    trace = Trace()
    (job,) = prefetcher.submit(
        reader, 1, np.arange(3), SHAPE, np.float32, demand=False, owner=prefetcher.owner(),
        trace=trace,
    )  # fmt: skip
    result = job.result(10)
    (span,) = trace.spans
    assert (span.name, span.lane) == ("pack_read", "ssd")
    assert (span.start_ns, span.end_ns) == (result.t0_ns, result.t1_ns)
    assert span.args == {"group": 1, "packs": 3, "demanded": False, "bytes": 3 * PACK_BYTES}
    assert trace.bytes["ssd"] == 3 * PACK_BYTES
    job.release()


def test_a_timeout_leaves_the_job_running(prefetcher, reader) -> None:
    job = hold(prefetcher, reader, prefetcher.owner())
    with pytest.raises(TimeoutError, match="group 99"):
        job.result(0.01)
    reader.gate.set()
    assert job.result(10).ok.all()
    job.release()


def test_speculation_is_refused_when_memory_is_full(reader) -> None:
    with Prefetcher(1, 2 * PAGE) as prefetcher:
        owner = prefetcher.owner()
        taken = [submit(prefetcher, reader, owner, g) for g in (1, 2)]
        for job in taken:
            job.result(10)
        refused = submit(prefetcher, reader, owner, 3, demand=False)
        assert refused.done() and not refused.started()
        result = refused.result(10)
        assert not result.ok.any() and result.rows.shape == (1, *SHAPE) and result.bytes == 0
        assert prefetcher.stats.refused == 1
        taken[0].release()
        prefetcher.promote(refused)
        assert refused.result(10).ok.all(), "a demand makes up for it"
        finish(reader, taken[1], refused)


def test_a_demand_takes_the_room_of_speculation_not_yet_read_first(reader) -> None:
    with Prefetcher(1, 3 * PAGE) as prefetcher:
        owner = prefetcher.owner()
        read = submit(prefetcher, reader, owner, 1, demand=False)
        while not read.done():  # `result` would count as taking it
            time.sleep(0.001)
        held = hold(prefetcher, reader, owner)
        queued = submit(prefetcher, reader, owner, 2, demand=False)
        demands = [submit(prefetcher, reader, owner, 3)]
        assert queued.done() and not queued.started()
        demands.append(submit(prefetcher, reader, owner, 4))
        assert prefetcher.stats.revoked == 2
        finish(reader, held, *demands)
        assert not read.result(10).ok.any()
        prefetcher.promote(read)
        assert read.result(10).ok.all()
        finish(reader, read, queued)
        assert [group for group, _ in reader.calls] == [1, 99, 3, 4, 1]


def test_handed_out_and_promoted_speculation_is_not_revoked(reader) -> None:
    with Prefetcher(1, 2 * PAGE) as prefetcher:
        owner = prefetcher.owner()
        seen, wanted = (submit(prefetcher, reader, owner, g, demand=False) for g in (1, 2))
        rows = seen.result(10).rows
        prefetcher.promote(wanted)
        waiting = submit(prefetcher, reader, owner, 3)
        assert not waiting.done() and prefetcher.stats.waiting == 1
        assert (rows == content(1, 1)).all() and wanted.result(10).ok.all()
        seen.release()
        assert waiting.result(10).ok.all()
        assert prefetcher.stats.revoked == 0 and prefetcher.stats.overflow_bytes == 0
        finish(reader, wanted, waiting)


def test_waiting_for_what_nobody_can_make_room_for_ends(reader) -> None:
    with Prefetcher(1, PAGE) as prefetcher:
        owner = prefetcher.owner()
        jobs = [submit(prefetcher, reader, owner, g) for g in (1, 2, 3)]
        for job in jobs:
            assert job.result(10).ok.all(), "the caller holds every block and still gets on"
        assert prefetcher.stats.overflow_bytes == 2 * PACK_BYTES
        finish(reader, *jobs)
        assert prefetcher.stats.overflow_bytes == prefetcher.stats.buffer_bytes == 0


def test_a_job_larger_than_the_arena_gets_memory_of_its_own(reader) -> None:
    with Prefetcher(2, PAGE, max_packs_per_job=64) as prefetcher:
        owner = prefetcher.owner()
        job = submit(prefetcher, reader, owner, 1, *range(40))
        assert job.result(10).ok.all()
        guess = submit(prefetcher, reader, owner, 1, *range(40), demand=False)
        assert not guess.result(10).ok.any()
        finish(reader, job, guess)
        assert prefetcher.stats.overflow_bytes == 0


def test_close_is_idempotent_and_leaves_no_thread(reader) -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(3, 64 * PAGE)
    owner = prefetcher.owner()
    assert prefetcher.stats.threads == 3
    reader.gate.clear()
    running = [submit(prefetcher, reader, owner, g) for g in (1, 2, 3)]
    for _ in running:
        assert reader.started.acquire(timeout=10)
    queued = submit(prefetcher, reader, owner, 4)
    opener = threading.Timer(0.05, reader.gate.set)
    opener.start()
    prefetcher.close()
    opener.join()
    prefetcher.close()
    assert prefetcher.stats.threads == 0
    assert all(job.result(0).ok.all() for job in running)
    assert not queued.result(0).ok.any()
    with pytest.raises(RuntimeError, match="closed"):
        submit(prefetcher, reader, owner, 5)
    prefetcher.promote(queued)
    for job in running:
        job.release()
    assert prefetcher.stats.buffer_bytes == 0
    assert threading.active_count() == before


def test_bad_arguments_are_refused(reader) -> None:
    with pytest.raises(ValueError, match="0 threads"):
        Prefetcher(0, PAGE)
    with pytest.raises(ValueError, match="0 packs"):
        Prefetcher(1, PAGE, max_packs_per_job=0)
    with pytest.raises(ValueError, match="arena of -1"):
        Prefetcher(1, -1)
    with Prefetcher(1, PAGE) as prefetcher, pytest.raises(ValueError, match="one dimension"):
        prefetcher.submit(
            reader, 0, np.zeros((2, 2)), SHAPE, np.float32, demand=True, owner=prefetcher.owner()
        )


def test_nothing_to_read_is_no_job(prefetcher, reader) -> None:
    none = np.zeros(0, np.int64)
    assert not prefetcher.submit(
        reader, 0, none, SHAPE, np.float32, demand=True, owner=prefetcher.owner()
    )
