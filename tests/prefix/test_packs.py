"""Packs over a real store: one read for many."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_support import small_engine, tokens
from pipeline_support import UnsteadyStore
from segment_support import segment_folder

from ckv_jax import Request
from ckv_jax.prefix import open_prefix
from ckv_jax.storage.segment.reader import PrefixReader
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
        reads = [span.args["packs"] for span in trace.spans if span.name == "pack_read"]
        assert sorted(reads) == [2, 3]  # one read for each prefix
        for opened in several:
            opened.close()
        assert worker.memory.tiers.device.free == worker.memory.tiers.slots
        assert worker.memory.tiers.pinned_slots == 0


def test_a_segment_that_is_gone_is_looked_for_at_once_and_then_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request each second begins before the last one has ended."""
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        prefix, prefixes = engine.ingest(tokens(160)), engine._worker.prefixes
        made, real, now = [], engine.store.reader, time.monotonic()
        monkeypatch.setattr(engine.store, "reader", lambda *a, **k: made.append(1) or real(*a, **k))
        monkeypatch.setattr(open_prefix, "time", SimpleNamespace(monotonic=lambda: now))
        there = segment_folder(tmp_path, prefix)
        away = there.rename(tmp_path / "away")
        opened = [prefixes.use(prefix)]

        def read() -> bool:
            out = np.empty((1, *engine.layout.pack_shape), engine.layout.numpy_dtype)
            return bool(opened[-1].reader.read_packs(0, np.array([2]), out).all())

        counts = []
        for _ in range(1000):
            assert not read()
            opened.append(prefixes.use(prefix))
            counts.append(len(made))
            now += 1
        assert counts[0] == 2 and counts[-1] < 12
        away.rename(there)
        now += 1000
        opened.append(prefixes.use(prefix))
        assert read()
        for one in opened:
            one.close()


def test_segments_that_cannot_be_held_are_tried_again_and_make_few_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation looks every tenth of a second, for a day, at a disk that answers with errors."""
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        prefix, prefixes = engine.ingest(tokens(160)), engine._worker.prefixes
        made, real, now = [], engine.store.reader, time.monotonic()
        monkeypatch.setattr(engine.store, "reader", lambda *a, **k: made.append(1) or real(*a, **k))
        monkeypatch.setattr(open_prefix, "time", SimpleNamespace(monotonic=lambda: now))
        opened = prefixes.use(prefix)
        with monkeypatch.context() as patch:
            patch.setattr(PrefixReader, "hold", lambda _: False)
            opened.hold()
            assert opened.hold_at == pytest.approx(now + 0.1)
            while len(made) < 12:
                now = opened.hold_at
                opened.hold()
        assert opened.hold_at - now > 100
        now = opened.hold_at
        opened.hold()
        assert opened.hold_at == math.inf
        opened.close()


def test_prefixes_that_cannot_be_held_stop_the_engine_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a disk that hangs, each try takes a second."""
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        now, prefixes = 100.0, engine._worker.prefixes
        opened = [prefixes.use(engine.ingest(tokens(160, seed))) for seed in range(3)]

        def hangs(_: PrefixReader) -> bool:
            nonlocal now
            now += 1
            return False

        monkeypatch.setattr(open_prefix, "time", SimpleNamespace(monotonic=lambda: now))
        with monkeypatch.context() as patch:
            patch.setattr(PrefixReader, "hold", hangs)
            for began in (100.0, 111.0, 122.0):
                for one in opened:
                    one.hold()
                assert now == began + 1 and all(one.hold_at >= now + 10 for one in opened)
                now += 10
        for one in opened:
            one.hold()
            assert one.hold_at == math.inf
            one.close()


def test_chunks_that_are_computed_again_are_counted_once_and_probes_apart(tmp_path: Path) -> None:
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as engine:
        prefix = engine.ingest(tokens(16 * WORK))
        request = Request(prefix=prefix, suffix=tokens(5, 1), budget=0.25)
        with engine.variant(engine.config, store=UnsteadyStore(engine.store, 1.0)) as failing:
            (result,) = failing.reprefill([request])
            selected = np.unique(np.concatenate(failing.last_selection(prefix)))
        groups, periods = engine.layout.groups, 2
    counted = result.trace.counters
    assert result.trace.recomputed_chunks == counted["recomputed_chunks"] == len(selected)
    assert counted["recomputed_packs"] == 3 * groups  # a quarter of twelve in each of them
    assert counted["recomputed_probes"] >= periods
