"""What the engine thread makes of what it is asked for, and who goes on meanwhile."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import ExitStack, suppress
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

from ckv_jax import Request, SamplingParams
from ckv_jax.decode.decoder import Decoder, rows_bucket
from ckv_jax.decode.selection import DecodeSelection
from ckv_jax.errors import Cancelled
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.recovery import Recovered, Recoveries, RecoveryNeeded
from ckv_jax.prefix.pools import MappedPool
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.offload import most_buffered
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.streams import TokenStream
from ckv_jax.serving.worker import traces_of
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace
from tests.support.truth import FINGERPRINT
from tests.support.truth import SMALL as LAYOUT


def test_a_recovery_under_way_serves_all_that_need_no_more_of_it(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        worker, jobs = engine.worker, engine._scheduler
        prefixes = [engine.ingest(tokens(40, seed)) for seed in range(2)]
        several = [jobs.call(partial(worker.prefixes.use, prefix)) for prefix in prefixes]
        lost, other = (opened.recovered for opened in several)
        job = worker.recovery(RecoveryNeeded(lost, 20))
        assert worker.recovery(RecoveryNeeded(lost, 10)) is job
        assert worker.recovery(RecoveryNeeded(other, 10)) is not job
        assert worker.recovery(RecoveryNeeded(lost, 20)) is job  # though another has begun
        more = worker.recovery(RecoveryNeeded(lost, 40))
        assert more is not job and worker.recovery(RecoveryNeeded(lost, 40)) is more
        jobs.add(more).future.result(60)
        assert lost._prefill is None  # its device memory is given back
        assert worker.recovery(RecoveryNeeded(lost, 10)) is not more
        for opened in several:
            jobs.call(opened.close)


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


def test_only_the_batch_that_waits_for_a_recovery_has_no_token(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, max_batch=1) as engine:
        prefix, running = engine.ingest(tokens(40)), engine.worker._running
        requests = [Request(prefix=prefix, suffix=[n]) for n in range(2)]
        with engine.generate(requests, SamplingParams(max_tokens=900)) as stream:
            begun: set[int] = set()
            while len(begun) < 2:
                begun.add(next(stream).index)

            def steps() -> None:
                waiting, going = running.batches
                ((text,), (other,)) = (
                    [row.sequence for row in batch.sequences.values()] for batch in (waiting, going)
                )

                def tokens_made() -> tuple[int, int]:
                    before = len(text.token_ids), len(other.token_ids)
                    assert running.step() == []
                    return len(text.token_ids) - before[0], len(other.token_ids) - before[1]

                worker = engine.worker
                waiting.waits_for = job = Job(iter(()))  # type: ignore[arg-type]
                assert not running.waiting() and worker.running == len(running) == 2
                going.waits_for = job
                assert running.waiting() and worker.running == 0
                going.waits_for = None
                assert tokens_made() == (0, 1)
                job.future.set_result(None)
                assert not running.waiting()
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


def test_bytes_of_a_batch_are_its_packs_and_the_rows_of_its_buffers(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix, room, groups = (
            engine.ingest(tokens(320)),
            engine.worker._admission,
            engine.layout.groups,
        )
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
            size = (
                packs * engine.layout.pack_bytes
                + rows_bucket(rows) * engine.worker.runtime.token_bytes
            )
            assert room._num_bytes([one(budget, new)]) == size
        approximate = replace(prefix, provenance="budget:0.1")
        nothing = Prefix.empty(prefix.fingerprint, prefix.layout, "")
        for over, packs in ((approximate, 2 * groups), (nothing, 0)):  # all stays in its buffers
            size = (
                packs * engine.layout.pack_bytes
                + rows_bucket(10_003) * engine.worker.runtime.token_bytes
            )
            assert room._num_bytes([one(0.1, 10_000, over)]) == size
        two = room._num_bytes([one(0.1, 0), one(0.1, 0)])
        assert (
            two
            == 4 * engine.layout.pack_bytes + 2 * rows_bucket(3) * engine.worker.runtime.token_bytes
        )
        assert room._chunks([one(0.1, 0)] * 11) == 20 and room._chunks([one(0.1, 0, nothing)]) == 0
        grown = one(0.1, 5)
        grown.offloaded_chunks = 3
        assert room._chunks([grown]) == 2 + 3


def test_windows_widen_once_a_sequence_has_left(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix, running = engine.ingest(tokens(320)), engine.worker._running
        requests = [Request(prefix=prefix, suffix=[n], budget=0.1) for n in range(2)]

        def widths() -> set[int]:
            """Chunks that may be in a window of somebody who runs."""
            texts = [text for text in running._all() if text.selector is not None]
            return {width for text in texts for width in text.selector.window.kept.open.tolist()}

        def leave() -> tuple[set[int], set[int]]:
            running._hold_slots, running._window = running._needs()[0], 2.0
            running._widen()
            before = widths()
            running.narrow()
            assert widths() == {2} and running.excess == 0
            running._widen()
            running._all()[0].sequence.cancel()
            running.step()
            assert len(running._all()) == 1
            after = widths()
            for slots, left in ((0, {4}), (1, {2})):  # more than there are beside windows
                engine.worker.make_way(engine.worker.memory.step_slots + slots)
                assert widths() == left
            return before, after

        with engine.generate(requests, SamplingParams(max_tokens=900)) as stream:
            begun(stream, 2)
            assert engine._scheduler.call(leave) == ({2}, {4})
            stream.cancel()
            stream.results()


@pytest.mark.parametrize("lengths", [(1024, 1023, 1), (1, 1100)])
def test_long_texts_have_a_batch_of_their_own(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    with tiny_engine(tmp_path) as engine:
        requests = [Request(prefix=[], suffix=tokens(n).tolist()) for n in lengths]
        with ExitStack() as stack:
            for request in requests:  # in this order
                text = engine.generate(request, SamplingParams(max_tokens=900))
                begun(stack.enter_context(text), 1)
            batches = engine.worker._running.batches
            found = engine._scheduler.call(
                lambda: sorted((batch.long, len(batch.sequences)) for batch in batches)
            )
    assert found == [(False, len(lengths) - 1), (True, 1)]


def test_a_batch_takes_no_more_than_it_may(tmp_path: Path) -> None:
    """Of two that come together one finds a place beside the first, and one does not."""
    with tiny_engine(tmp_path, max_batch=2) as engine:
        prefix, sampling = engine.ingest(tokens(40)), SamplingParams(max_tokens=900)
        requests = [Request(prefix=prefix, suffix=[n]) for n in range(3)]
        with engine.generate(requests[0], sampling) as first:
            begun(first, 1)
            with engine.generate(requests[1:], sampling) as others:
                begun(others, 2)
                batches = engine.worker._running.batches
                found = engine._scheduler.call(lambda: [len(batch.sequences) for batch in batches])
    assert found == [2, 1]


@pytest.mark.parametrize("fault", [StoreError, ValueError, RuntimeError])
def test_a_failure_between_tokens_ends_its_generations_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    """A fault of the library is raised; others are what is wrong with the text."""

    def broken(*_: object, **__: object) -> None:
        raise fault("broken")

    with tiny_engine(tmp_path) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1], budget=0.5)
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "step", broken)
            stream = engine.generate(request, SamplingParams(max_tokens=8))
            if fault is RuntimeError:
                with pytest.raises(RuntimeError, match="broken"):
                    stream.results()
            else:
                assert isinstance(stream.results()[0].error, fault)
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.prefixes._in_use


def test_a_request_cancelled_while_its_batch_is_computed_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix, executor = engine.ingest(tokens(40)), engine.worker.executor
        run, batch = executor.run, []

        def given_up(*args: Any, **named: Any) -> Any:
            batch[0].cancel()
            return run(*args, **named)

        monkeypatch.setattr(executor, "run", given_up)
        requests = [Request(prefix=prefix, suffix=[n]) for n in range(2)]
        batch += engine._placement.sequences(requests)
        engine._scheduler.submit(batch)
        first, second = (sequence.settled_result() for sequence in batch)
        assert isinstance(first.error, Cancelled) and second.error is None


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("fault", [None, ValueError, RuntimeError])
def test_a_generation_is_gone_when_its_outcome_is_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep_kv: bool,
    fault: type[Exception] | None,
) -> None:
    found, settle = [], Sequence.settle
    with tiny_engine(tmp_path) as engine:

        def settled(sequence: Sequence) -> None:
            running = engine.worker._running.sequences
            found.append((sequence in running, sum(text.done() for text in running)))
            settle(sequence)

        def fails(*_: object, **__: object) -> None:
            raise fault("broken")  # type: ignore[misc]

        request = Request(prefix=engine.ingest(tokens(40)), suffix=[1])
        monkeypatch.setattr(Sequence, "settle", settled)
        if fault is not None:
            monkeypatch.setattr(Decoder, "step", fails)
        stream = engine.generate([request] * 2, SamplingParams(max_tokens=4), keep_kv=keep_kv)
        for sequence in stream._sequences:
            with suppress(RuntimeError):
                sequence.settled_result()
    assert found == [(False, 0)] * 2


def test_each_token_has_its_time_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who is in a batch is told to its choices when that changes, not at every token."""
    told: list[object] = []
    rows_are = DecodeSelection.rows_are
    monkeypatch.setattr(
        DecodeSelection, "rows_are", lambda self, rows: (told.append(rows), rows_are(self, rows))[1]
    )
    with tiny_engine(tmp_path) as engine:
        request = Request(prefix=engine.ingest(tokens(320)), suffix=[1], budget=0.1)
        began = time.perf_counter()
        [text] = engine.generate(request, SamplingParams(max_tokens=8)).results()
        spent_ms = (time.perf_counter() - began) * 1e3
    took = [token.ms for token in text.trace.tokens]
    assert len(took) == 7 and sum(took) <= spent_ms
    assert any(ms % 1 for ms in took) and min(took) > 0
    assert len(told) == 1


def test_what_is_looked_up_again_says_whether_that_changed_anything(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, prefill_block=16, prefill_window=32) as engine:
        prefix, worker = engine.ingest(tokens(40)), engine.worker
        text = Sequence(Request(prefix=prefix, suffix=[1, 2]))
        engine._placement.place(text)
        assert not engine._scheduler.call(partial(worker.shorten, text))
        engine.store.delete(prefix)
        assert engine._scheduler.call(partial(worker.shorten, text))
        assert text.prefix.num_tokens == 0 and text.suffix.tolist() == [*tokens(40), 1, 2]
        assert worker.prefill_bytes(33) == worker.prefill_bytes(32) > worker.prefill_bytes(31)


def test_prompts_that_are_too_long_for_one_piece_of_memory_are_stored_first(
    tmp_path: Path,
) -> None:
    with tiny_engine(tmp_path, prefill_block=16, prefill_window=32) as engine:
        prompts = [tokens(length).tolist() for length in (32, 33)]
        [fits] = engine.reprefill([Request(prefix=[], suffix=prompts[0])])
        assert fits.error is None and not list(engine.store.prefixes())
        [answer] = engine.reprefill([Request(prefix=[], suffix=prompts[1])])
        [stored] = engine.store.prefixes()
        assert stored.tokens.tolist() == prompts[1][:-1]
        over = Request(prefix=stored, suffix=prompts[1][-1:], budget=1.0)
        np.testing.assert_array_equal(answer.logits, engine.reprefill([over])[0].logits)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_closed_engine_gives_its_memory_back(
    mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: what belongs to an engine is a cycle, which Python may leave for long."""
    monkeypatch.setattr(Target, "in_host_memory", mapped)
    with tiny_engine(tmp_path, host_cache_bytes=1 << 16) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1, 2], budget=0.5)
        [answer] = engine.reprefill([request])
        memory, pages = engine.worker.memory, engine.worker.memory.pool.pages
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


def test_each_row_has_its_own_selection() -> None:
    """Two choices of two rows, of which chunk 0 is one like others and -1 is none."""
    first: Any = SimpleNamespace(
        selections=[np.array([[0, 1, -1], [3, -1, -1]]), np.array([[0, 2, 4], [-1, -1, -1]])],
        attention_mass=np.array([[0.5, 0.25], [0.75, 1.0]], np.float32),
    )
    traces = traces_of(Trace(), first, [5, 6])
    assert [trace.period_chunks for trace in traces] == [[2, 3], [1, 0]]
    assert [trace.chunks["total"] for trace in traces] == [10, 12]
    assert [trace.period_attention_mass for trace in traces] == [[0.5, 0.75], [0.25, 1.0]]


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_that_fails_as_its_generations_begin_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix, worker = engine.ingest(tokens(320)), engine.worker
        begin = worker._begin_generation

        def fails(sequence: Sequence, *of: Any) -> None:
            if sequence.suffix[0] == 2:
                raise KeyError("no beginning")
            if not late:
                begin(sequence, *of)

        if late:
            monkeypatch.setattr(Sequence, "allowed", fails)
        else:
            monkeypatch.setattr(worker, "_begin_generation", fails)
        made = []
        for suffix in (1, 2):
            one = Sequence(
                Request(prefix=prefix, suffix=[suffix]), sampling=SamplingParams(max_tokens=3)
            )
            one.place(prefix, np.array([suffix], np.int32), 0.1)
            made.append(one)

        def both() -> None:
            with pytest.raises(KeyError, match="no beginning"):
                worker.first_tokens(made)

        engine._scheduler.call(both)
        assert engine.stats().pinned_packs == 0 and worker.prefixes.known(prefix).users == 0
