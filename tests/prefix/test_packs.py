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
