"""What the engine thread makes of what it is asked for, and who goes on meanwhile."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from engine_support import tokens
from engine_tiny import tiny_engine

from bench.truth import FINGERPRINT
from bench.truth import SMALL as LAYOUT
from ckv_jax import Request, SamplingParams
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.memory.mapped import MappedPool
from ckv_jax.pipeline.decode import Decoder
from ckv_jax.pipeline.kv_rows import rows_bucket
from ckv_jax.pipeline.recovery import Recovered, Recoveries, RecoveryNeeded
from ckv_jax.serving.job import Job
from ckv_jax.serving.segments import most_buffered
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.slot_room import SlotRoom
from ckv_jax.serving.streams import TokenStream
from ckv_jax.storage.prefix import Prefix


def test_who_needs_no_more_than_a_recovery_computes_waits_for_that(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        worker, jobs = engine.worker, engine._scheduler
        prefixes = [engine.ingest(tokens(40, seed)) for seed in range(2)]
        leases = [jobs.call(partial(worker.leases.open, prefix)) for prefix in prefixes]
        lost, other = (lease.recovered for lease in leases)
        job = worker.recovery(RecoveryNeeded(lost, 20))
        assert worker.recovery(RecoveryNeeded(lost, 10)) is job
        assert worker.recovery(RecoveryNeeded(other, 10)) is not job
        more = worker.recovery(RecoveryNeeded(lost, 40))
        assert more is not job and worker.recovery(RecoveryNeeded(lost, 40)) is more
        jobs.add(more).future.result(60)
        assert lost._prefill is None  # its device memory is given back
        assert worker.recovery(RecoveryNeeded(lost, 10)) is not more
        for lease in leases:
            jobs.call(lease.close)


def test_what_was_computed_again_stays_of_the_four_prefixes_asked_for_last() -> None:
    nobody: Any = None
    recoveries = Recoveries(nobody)

    def of(n: int) -> Recovered:
        prefix = replace(Prefix.empty(FINGERPRINT, LAYOUT, ""), id=f"{n:032x}")
        return recoveries.of(prefix, nobody)

    first, second, *_ = [of(n) for n in range(4)]
    assert of(0) is first
    of(4)
    assert of(0) is first
    assert of(1) is not second


def test_a_block_of_a_prefill_takes_the_keys_and_values_of_its_tokens(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        layout = engine.layout
        shape = (layout.num_layers, 2, 3, layout.num_kv_heads, layout.head_dim)
        assert engine.worker.prefill_bytes(3) == np.empty(shape, layout.numpy_dtype).nbytes


def test_only_the_batch_that_waits_for_a_recovery_has_no_token(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, max_batch=1) as engine:
        prefix, running = engine.ingest(tokens(40)), engine.worker._running
        requests = [Request(prefix=prefix, suffix=[n]) for n in range(2)]
        with engine.generate(requests, SamplingParams(max_tokens=400)) as stream:
            begun: set[int] = set()
            while len(begun) < 2:
                begun.add(next(stream).index)

            def steps() -> None:
                waiting, going = running._batches
                ((text,), (other,)) = (
                    [row.sequence for row in batch.going.values()] for batch in (waiting, going)
                )

                def tokens_made() -> tuple[int, int]:
                    before = len(text.token_ids), len(other.token_ids)
                    assert running.step() == []
                    return len(text.token_ids) - before[0], len(other.token_ids) - before[1]

                waiting.waits_for = job = Job(iter(()))  # type: ignore[arg-type]
                assert tokens_made() == (0, 1)
                job.future.set_result(None)
                assert tokens_made() == (1, 1) and waiting.waits_for is None
                waiting.waits_for = Job(iter(()))  # type: ignore[arg-type]
                text.cancel()
                assert tokens_made() == (0, 1)
                assert text.reason == "cancelled" and other.reason is None
                waiting.waits_for.future.set_result(None)

            engine._scheduler.call(steps)
            stream.cancel()
            assert [text.finish_reason for text in stream.results()] == ["cancelled"] * 2


def begun(stream: TokenStream, count: int) -> None:
    """Waits until so many texts have had a token."""
    seen: set[int] = set()
    while len(seen) < count:
        seen.add(next(stream).index)


def test_windows_share_what_those_that_only_hold_leave_over(tmp_path: Path) -> None:
    """Of four texts two choose; one holds all that it stands on, and one stands on nothing."""
    with tiny_engine(tmp_path) as engine:
        prefix, running = engine.ingest(tokens(320)), engine.worker._running
        groups = prefix.layout.groups
        requests = [
            Request(prefix=prefix, suffix=[n], budget=budget)
            for n, budget in enumerate((0.1, 0.2, 1.0))
        ]
        requests.append(Request(prefix=[], suffix=tokens(20).tolist()))

        def share() -> None:
            going = running._all()
            choosers = [text.chooser for text in going if text.chooser is not None]
            assert len(going) == 4 and sorted(c.limit for c in choosers) == [2, 4]
            least, fixed = running._needs()
            assert (least, fixed) == ((2 + 4) * groups, prefix.num_chunks * groups)
            for slots, most, times in (
                (fixed + 3 * least, 8.0, 3),
                (fixed + 3 * least, 2.0, 2),
                (fixed, 8.0, 1),
            ):
                running._hold_slots, running._window = slots, most
                running._widen()
                for chooser in choosers:
                    for choice in range(engine.worker.plan.choices):
                        held = chooser.window.kept.chunk[choice]
                        assert len(held) == times * chooser.limit

        with engine.generate(requests, SamplingParams(max_tokens=400)) as stream:
            begun(stream, 4)
            engine._scheduler.call(share)
            stream.cancel()
            stream.results()


def test_a_batch_that_stays_needs_slots_in_every_layer_group_and_others_in_one_step() -> None:
    """Three chunks in steps of two of eight layer groups: 24 slots, or 6."""

    class Room(SlotRoom):
        def __init__(self, slots: int, excess: int = 0) -> None:
            narrowed.clear()
            self._layout: Any = SimpleNamespace(groups=8)
            self._system: Any = SimpleNamespace(chunked=True)
            self._memory: Any = SimpleNamespace(step_slots=slots, hold_slots=slots)
            self._running: Any = SimpleNamespace(
                holding=[], excess=excess, rest=lambda: None, narrow=lambda: narrowed.append(slots)
            )
            self._step, self._max_bytes = 2, 0

        def _chunks(self, sequences: Any) -> int:
            return 3

        def _num_bytes(self, batch: Any) -> int:
            return 0

    narrowed: list[int] = []
    batch: Any = [SimpleNamespace(sampling=None)]
    for slots, hold, narrows in ((24, True, 0), (23, True, 1), (6, False, 0), (5, False, 1)):
        Room(slots).make_way(batch, hold=hold)
        assert len(narrowed) == narrows
    assert Room(6).fits(batch, 0) and Room(4, excess=2).fits(batch, 0)
    assert not Room(4, excess=1).fits(batch, 0) and not Room(6).fits(batch, 1)
    texts: Any = [SimpleNamespace(sampling=SamplingParams())]
    assert Room(24).fits(texts, 0) and not Room(23).fits(texts, 0) and Room(23).fits(batch, 0)
    layerwise = Room(1)
    layerwise._system.chunked = False  # its slots are not counted
    assert layerwise.fits(batch, 0) and not layerwise.fits(batch, 1)
    layerwise.make_way(batch, hold=True)
    assert not narrowed


def test_bytes_of_a_batch_are_its_packs_and_the_rows_of_its_buffers(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix, room, groups = engine.ingest(tokens(320)), engine.worker._room, engine.layout.groups
        segment = engine.config.segment_tokens
        most = most_buffered(segment, engine.layout.chunk_tokens)

        def one(budget: float, new: int, over: Prefix = prefix) -> Sequence:
            sampling = SamplingParams(max_tokens=new) if new else None
            made = Sequence(Request(prefix=over, suffix=[1, 2, 3]), sampling=sampling)
            made.place(over, np.arange(3, dtype=np.int32), budget)
            return made

        for budget, new, packs, rows in (
            (0.1, 0, 2, 3),  # a step's, of one group
            (0.1, 200, 2 * groups, 203),
            (0.1, 10_000, 2 * groups, 3 + most),  # the rest becomes segments
            (1.0, 10_000, 20 * groups, 10_003),
        ):
            size = packs * engine.layout.pack_bytes + rows_bucket(rows) * room.token_bytes
            assert room._num_bytes([one(budget, new)]) == size
        approximate = replace(prefix, provenance="budget:0.1")
        nothing = Prefix.empty(prefix.fingerprint, prefix.layout, "")
        for over, packs in ((approximate, 2 * groups), (nothing, 0)):  # all stays in its buffers
            size = packs * engine.layout.pack_bytes + rows_bucket(10_003) * room.token_bytes
            assert room._num_bytes([one(0.1, 10_000, over)]) == size
        two = room._num_bytes([one(0.1, 0), one(0.1, 0)])
        assert two == 4 * engine.layout.pack_bytes + 2 * rows_bucket(3) * room.token_bytes
        assert room._chunks([one(0.1, 0)] * 11) == 20 and room._chunks([one(0.1, 0, nothing)]) == 0
        grown = one(0.1, 5)
        grown.grown = 3
        assert room._chunks([grown]) == 2 + 3


def test_windows_widen_once_somebody_has_left(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix, running = engine.ingest(tokens(320)), engine.worker._running
        requests = [Request(prefix=prefix, suffix=[n], budget=0.1) for n in range(2)]

        def widths() -> set[int]:
            """Chunks that may be in a window of somebody who runs."""
            texts = [text for text in running._all() if text.chooser is not None]
            return {width for text in texts for width in text.chooser.window.kept.open.tolist()}

        def leave() -> tuple[set[int], set[int]]:
            running._hold_slots, running._window = running._needs()[0], 2.0
            running._widen()
            before = widths()
            running._all()[0].sequence.cancel()
            running.step()
            assert len(running._all()) == 1
            return before, widths()

        with engine.generate(requests, SamplingParams(max_tokens=400)) as stream:
            begun(stream, 2)
            assert engine._scheduler.call(leave) == ({2}, {4})
            stream.cancel()
            stream.results()


def test_long_texts_have_a_batch_of_their_own(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        requests = [Request(prefix=[], suffix=tokens(n).tolist()) for n in (20, 1100)]
        with engine.generate(requests, SamplingParams(max_tokens=400)) as stream:
            begun(stream, 2)
            batches = engine.worker._running._batches
            found = engine._scheduler.call(
                lambda: sorted((batch.long, len(batch.going)) for batch in batches)
            )
            stream.cancel()
            stream.results()
    assert found == [(False, 1), (True, 1)]


def test_a_fault_of_ours_between_tokens_is_raised_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    with tiny_engine(tmp_path) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1], budget=0.5)
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "step", broken)
            with pytest.raises(RuntimeError, match="broken"):
                engine.generate(request, SamplingParams(max_tokens=8)).results()
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.residents._in_use


@pytest.mark.parametrize("mapped", [True, False])
def test_a_closed_engine_gives_its_memory_back(
    mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: what belongs to an engine is a cycle, which Python may leave for long."""
    monkeypatch.setattr(Target, "in_host_memory", mapped)
    with tiny_engine(tmp_path, host_cache_bytes=1 << 16) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1, 2], budget=0.5)
        [answer] = engine.reprefill([request])
        memory, pages = engine.worker.memory, engine.pages
        held = [weakref.ref(memory.host.packs.base)]
        if isinstance(memory.pool, MappedPool):
            held.append(weakref.ref(memory.pool.packs.base))
        assert engine.stats().digest_bytes > 0 and all(ref() is not None for ref in held)
        gc.collect()
        gc.disable()
    try:
        if mapped:
            del pages  # of the same memory
        else:
            assert pages.is_deleted()
        jax.device_put(np.zeros(1))  # JAX lets go of what it has aliased when it is next called
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()
    assert engine.stats().digest_bytes == 0 and np.isfinite(answer.logits).all()
    engine.close()
