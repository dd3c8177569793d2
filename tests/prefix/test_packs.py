"""Packs over a real store: one read for many, and room that is given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_support import small_engine, tokens
from pipeline_support import UnsteadyStore

from ckv_jax import Engine, Request
from ckv_jax.buckets import bucket
from ckv_jax.pipeline.executor import READ
from ckv_jax.prefix.landing import HostBlocks, Landing, landing_for
from ckv_jax.prefix.memory import job_packs
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.trace import Trace

WORK = 12


def test_one_demand_brings_packs_of_many_groups_and_prefixes(tmp_path: Path) -> None:
    """Both prefixes have the same chunk 2, of which one copy stays."""
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        texts = tokens(160), np.concatenate([tokens(160), tokens(64, 1)])
        prefixes = [engine.ingest(text) for text in texts]
        worker = engine._worker
        which, group, chunks = np.array([[0, 0, 1, 1, 1], [0, 1, 0, 1, 1], [2, 5, 2, 12, 3]])
        several = [worker.prefixes.use(prefix) for prefix in prefixes]
        stored = np.empty((len(which), *engine.layout.pack_shape), engine.layout.numpy_dtype)
        for at, (of, row) in enumerate(zip(which, group, strict=True)):
            assert (
                several[of]
                .reader.read_packs(int(row), chunks[at : at + 1], stored[at : at + 1])
                .all()
            )
        trace = Trace()
        with worker.packs(several, trace) as packs:
            assert packs.demand(which, group, chunks) == len(which)
            slots = packs.collect(which, group, chunks)
            assert len(set(slots.tolist())) == len(which)
            found = np.asarray(worker.memory.pool.pages[slots])
            assert found.tobytes() == stored.tobytes()
            packs.keep()
            assert packs.demand(which, group, chunks) == 0
            again = packs.collect(which, group, chunks)
            assert again[0] == again[2] and len(set(again.tolist())) == len(which) - 1
        reads = [span.args["packs"] for span in trace.spans if span.name == READ]
        assert sorted(reads) == [2, 3]  # one read for each prefix
        for opened in several:
            opened.close()
        assert worker.memory.free_slots == worker.memory.tiers.slots
        assert worker.memory.tiers.pinned_slots == 0


def test_chunks_that_are_computed_again_are_counted_once_and_probes_apart(tmp_path: Path) -> None:
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        prefix = engine.ingest(tokens(16 * WORK))
        request = Request(prefix=prefix, suffix=tokens(5, 1), budget=0.25)
        with engine.variant(engine.config, store=UnsteadyStore(engine.store, 1.0)) as failing:
            (result,) = failing.reprefill([request])
            chosen = np.unique(np.concatenate(failing.last_selection(prefix)))
        groups, periods = engine.layout.groups, 2
    counted = result.trace.counters
    assert result.trace.recomputed_chunks == counted["recomputed_chunks"] == len(chosen)
    assert counted["recomputed_packs"] == 3 * groups  # a quarter of twelve in each of them
    assert counted["recomputed_probes"] >= periods


def test_what_is_read_again_for_nothing_is_unused(tmp_path: Path) -> None:
    """It was used once, kept, and has left memory since."""
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        worker, chunks, trace = engine.worker, np.arange(2), Trace()
        opened = worker.prefixes.use(engine.ingest(tokens(64)))
        with worker.packs([opened], trace) as packs:
            packs.demand(0, 0, chunks)
            packs.collect(0, 0, chunks)
            packs.keep()
            worker.memory.trim()  # nobody pins them
            packs.ahead(0, 0, chunks)
            for job, _ in list(packs._begun.values()):
                worker.prefetcher.wait(job)
            packs.near_misses(0, 0, chunks[:0])
        opened.close()
    assert trace.bytes["unused"] == 2 * engine.layout.stored_bytes


def host_blocks(engine: Engine, count: int) -> HostBlocks:
    """The way in of a device with memory of its own, by so many blocks."""
    size = count * bucket(job_packs(engine.layout)) * engine.layout.stored_bytes
    return HostBlocks(engine._worker.memory, engine.layout, size, None)


@pytest.mark.parametrize("way", ["host blocks", "in pool"])
def test_a_read_whose_packs_find_no_slots_gives_its_room_back(tmp_path: Path, way: str) -> None:
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as plain:
        prefix = plain.ingest(tokens(16 * WORK))
        work = 8 * plain.layout.pack_bytes
    with small_engine(
        tmp_path, device_cache_bytes=0, host_cache_bytes=0, prefetch_device_bytes=work
    ) as engine:
        opened, chunks = engine._worker.prefixes.use(prefix), np.arange(WORK)
        landing: Landing = host_blocks(engine, 4)
        rooms = [1] * 4  # packs
        if way == "in pool":  # whose host memory is for reads that slots are too few for
            rooms, size = [WORK], WORK * engine.layout.pack_bytes
            landing = landing_for(engine._worker.memory, engine.layout, host_bytes=size)
        for _ in range(5):
            with engine._worker.packs_in(landing, [opened], Trace()) as packs:
                packs.demand(0, 0, chunks)
                with pytest.raises(PoolExhausted):
                    packs.collect(0, 0, chunks)
        assert all(landing.take(n, demand=True) is not None for n in rooms)
        assert landing.take(7, demand=True) is None
        opened.close()
        assert engine._worker.memory.free_slots == 8


@pytest.mark.parametrize("waiting", [False, True])
def test_a_group_that_starts_over_takes_no_other_along(tmp_path: Path, waiting: bool) -> None:
    """What was demanded of both in one read, under way or with no room yet."""
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        prefix = engine.ingest(tokens(16 * 4))
        opened, chunks = engine._worker.prefixes.use(prefix), np.arange(4)
        landing = host_blocks(engine, 1)
        with engine._worker.packs_in(landing, [opened], Trace()) as packs:
            room = landing.take(1, demand=True) if waiting else None
            packs.demand(0, np.repeat([0, 1], 4), np.tile(chunks, 2))
            packs.start_over(0, 0)
            if room is not None:
                landing.give_back(room, None)
            slots = packs.collect(0, 1, chunks)
            with pytest.raises(ValueError, match="not demanded"):
                packs.collect(0, 0, chunks)
            assert packs.demand(0, 0, chunks) == 4
            first = packs.collect(0, 0, chunks)
            stored = np.empty((8, *engine.layout.pack_shape), engine.layout.numpy_dtype)
            ok = opened.reader.read_packs(np.repeat([0, 1], 4), np.tile(chunks, 2), stored)
            found = np.asarray(engine._worker.memory.pool.pages[np.concatenate([first, slots])])
            assert ok.all() and found.tobytes() == stored.tobytes()
        opened.close()
