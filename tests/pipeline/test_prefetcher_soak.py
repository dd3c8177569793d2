"""Random lives of the prefetcher: nothing hangs, nothing leaks, every row is the right one."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.reads.arena import BufferArena
from ckv_jax.reads.prefetcher import Prefetcher, ReadJob

from .slow_reader import PACK_BYTES, SHAPE, SlowReader, content

PAGE = 4096


def check(job: ReadJob, bad: frozenset[int], broken: frozenset[int]) -> bool:
    """Waits for a job; whether it was read. Rows must be the packs asked for, or zero."""
    result = job.result(20)
    expected = [content(job.group, chunk) for chunk in job.chunks.tolist()]
    for row, ok, value in zip(result.rows, result.ok, expected, strict=True):
        assert (row == value).all() if ok else not row.any()
    if result.bytes and result.error is None:
        assert result.ok.tolist() == [chunk not in bad for chunk in job.chunks.tolist()]
    return result.bytes > 0


actions = st.lists(
    st.tuples(
        st.sampled_from(["demand", "speculate", "promote", "result", "release", "cancel"]),
        st.integers(0, 7),
        st.integers(1, 30),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions=actions, pages=st.integers(0, 4), threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_no_order_of_calls_hangs_or_leaks(
    actions: list[tuple[str, int, int]], pages: int, threads: int, seed: int
) -> None:
    chance = random.Random(seed)
    bad, broken = frozenset({3, 11}), frozenset({5})
    reader = SlowReader(delay=lambda: chance.choice((0.0, 0.0, 0.0005)), bad=bad, broken=broken)
    with Prefetcher(threads, pages * PAGE, max_packs_per_job=8) as prefetcher:
        owners = [prefetcher.owner() for _ in range(2)]
        jobs: list[ReadJob] = []
        wanted: set[ReadJob] = set()
        for kind, index, size in actions:
            if kind in ("demand", "speculate"):
                made = prefetcher.submit(
                    reader, index, np.arange(size), SHAPE, np.float32,
                    demand=kind == "demand", owner=owners[index % 2],
                )  # fmt: skip
                jobs += made
                wanted.update(made if kind == "demand" else [])
            elif kind == "cancel":
                owner = owners[index % 2]
                prefetcher.cancel(owner, wait=bool(size % 2))
                wanted = {job for job in wanted if job.owner is not owner}
            elif jobs:
                job = jobs[index % len(jobs)]
                if kind == "promote":
                    prefetcher.promote(job)
                elif kind == "release":
                    job.release()
                    wanted.discard(job)
                else:
                    read = check(job, bad, broken)
                    assert read or job not in wanted, "a demand is always read"
        for job in jobs:
            assert check(job, bad, broken) or job not in wanted
            job.release()
        stats = prefetcher.stats
        assert stats.queued == stats.waiting == stats.running == 0
        assert stats.buffer_bytes == stats.overflow_bytes == 0
        assert not owners[0].jobs and not owners[1].jobs


@pytest.mark.slow
def test_nothing_is_left_after_ten_thousand_mixed_jobs() -> None:
    chance = random.Random(7)
    reader = SlowReader(bad=frozenset({3}), broken=frozenset({5}))
    before = threading.active_count()
    with Prefetcher(3, 24 * PAGE, max_packs_per_job=8) as prefetcher:
        submitted = 0
        while submitted < 10_000:
            owner = prefetcher.owner()
            jobs: list[ReadJob] = []
            for group in range(6):
                jobs += prefetcher.submit(
                    reader,
                    group,
                    np.arange(chance.randint(1, 40)),
                    SHAPE,
                    np.float32,
                    demand=chance.random() < 0.5,
                    owner=owner,
                )
            submitted += len(jobs)
            for job in jobs:
                fate = chance.random()
                if fate < 0.5:
                    prefetcher.promote(job)
                if fate < 0.7:
                    check(job, reader.bad, reader.broken)
                if fate < 0.6:
                    job.release()
            prefetcher.cancel(owner, wait=chance.random() < 0.5)
            for job in jobs:
                job.release()
        prefetcher.cancel(owner, wait=True)
        stats = prefetcher.stats
        assert stats.threads == 3
        assert stats.queued == stats.waiting == 0
        assert stats.packs > 10_000
    stats = prefetcher.stats
    assert stats.threads == stats.buffer_bytes == stats.overflow_bytes == 0
    assert threading.active_count() == before


@given(
    sizes=st.lists(st.integers(1, 3 * PAGE), max_size=30),
    order=st.randoms(use_true_random=False),
)
def test_arena_blocks_never_overlap_and_all_come_back(sizes, order) -> None:
    arena = BufferArena(8 * PAGE + 5)  # whole pages only
    held: list[tuple[int, int]] = []
    for size in sizes:
        if held and order.random() < 0.4:
            arena.give_back(*held.pop(order.randrange(len(held))))
        found = arena.take(size)
        if found is None:
            continue
        offset, block = found
        assert block.nbytes == size and offset % PAGE == 0
        assert block.ctypes.data % PAGE == 0
        for other, length in held:
            assert offset + size <= other or other + length <= offset
        held.append((offset, size))
    order.shuffle(held)
    for block in held:
        arena.give_back(*block)
    assert arena.used == 0
    assert arena.take(8 * PAGE) is not None, "the holes are one again"


def test_packs_are_smaller_than_the_pages_the_tests_count_with() -> None:
    assert 8 * PACK_BYTES < PAGE
