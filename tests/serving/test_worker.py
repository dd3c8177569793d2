"""Generations that fail, are cancelled or end, and what an engine gives back."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import threading
import weakref
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_support import tokens
from engine_tiny import tiny_engine

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.decode.decoder import Decoder, KvRows
from ckv_jax.errors import Cancelled, DeadlineExceeded, EngineClosed
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.recovery import Recovered, RecoveryNeeded
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import MappedPool
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.sequence import RunningSequence, Sequence, generation_of
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreError, StoreUnavailable
from ckv_jax.storage.store import ChunkStore


def over_lost_prefixes(engine: Engine, folder: Path, count: int) -> list[Request]:
    """Requests over as many prefixes of a store in `folder`, whose packs are gone."""
    prefixes = [engine.ingest(tokens(40, seed)) for seed in range(count)]
    for packs in folder.rglob("packs"):
        shutil.rmtree(packs)
    return [Request(prefix=prefix, suffix=[1], budget=0.5) for prefix in prefixes]


def check_failed(handle: Sequence, fault: type[Exception]) -> None:
    """Whether a generation has ended with the `fault` of a recovery."""
    if fault is StoreError:
        assert isinstance(handle.result(60).error, StoreError)
    else:
        with pytest.raises(RuntimeError, match="no room"):
            handle.result(60)


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


def test_tokens_reach_an_event_loop_before_the_next_ones_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens of a batch as well as later ones. A step may be dispatched before the tokens
    of the one before are read, so those of step n are there before step n + 2."""
    gate, step, steps = threading.Semaphore(0), Decoder.step, []

    def gated(*args: Any, **named: Any) -> Any:
        assert gate.acquire(timeout=5), "the tokens of the step before did not arrive"
        steps.append(None)
        return step(*args, **named)

    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(40))
        requests = [Request(prefix=prefix, suffix=[n]) for n in range(2)]
        monkeypatch.setattr(Decoder, "step", gated)

        async def ask() -> list[int]:
            stream, found = engine.agenerate(requests, SamplingParams(max_tokens=5)), []
            async for event in stream:
                if event.token_id is not None:
                    found.append(event.index)
                    if len(found) % 2 == 0:
                        gate.release(2 if len(found) == 2 else 1)
            return found

        assert asyncio.run(ask()) == [0, 1] * 5
    assert len(steps) >= 4


@pytest.mark.parametrize(
    ("keep_kv", "fault"),
    [(False, None), (True, None), (False, StoreError), (True, ValueError), (False, RuntimeError)],
)
def test_a_generation_is_gone_when_its_outcome_is_set_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_kv: bool, fault: type[Exception] | None
) -> None:
    """A fault of the library between tokens is raised; others are what is wrong with the text."""
    found, settle = [], Sequence.settle
    with tiny_engine(tmp_path) as engine:

        def settled(sequence: Sequence) -> None:
            running = engine.worker.decoding.sequences
            found.append((sequence in running, sum(text.done() for text in running)))
            settle(sequence)

        def fails(*_: object, **__: object) -> None:
            raise fault("broken")  # type: ignore[misc]

        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1], budget=0.5)
        monkeypatch.setattr(Sequence, "settle", settled)
        if fault is not None:
            monkeypatch.setattr(Decoder, "step", fails)
        stream = engine.generate([request] * 2, SamplingParams(max_tokens=4), keep_kv=keep_kv)
        for sequence in stream._sequences:
            if fault is RuntimeError:
                with pytest.raises(RuntimeError, match="broken"):
                    sequence.settled_result()
            else:
                assert isinstance(sequence.settled_result().error, fault or type(None))
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.prefixes._in_use
    assert found == [(False, 0)] * 2


@pytest.mark.parametrize("fault", [StoreError, RuntimeError])
def test_a_generation_whose_lost_kv_cannot_be_computed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    tried = []

    def advance(self: Recovered) -> None:
        tried.append(self)
        raise fault("no room for it")

    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(100))
        lost = engine.worker.recoveries.begin(prefix, lambda _: None)

        def fails(*_: object, **__: object) -> None:
            raise RecoveryNeeded(lost, 1)

        monkeypatch.setattr(Recovered, "advance", advance)
        monkeypatch.setattr(Decoder, "step", fails)
        request = Request(prefix=prefix, suffix=[1], budget=0.5)
        handle = engine.submit(request, SamplingParams(max_tokens=4))
        check_failed(handle, fault)
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
    assert tried == [lost]


@pytest.mark.parametrize("fault", [StoreError, RuntimeError])
def test_lost_kv_that_cannot_be_computed_ends_no_other_generation_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    sampling, step = SamplingParams(max_tokens=8), Decoder.step
    with tiny_engine(tmp_path) as engine:
        prefixes = [engine.ingest(tokens(100, seed)) for seed in range(3)]
        requests = [Request(prefix=prefix, suffix=[1], budget=0.5) for prefix in prefixes]
        healthy = engine.generate(requests, sampling).results()
        lost, failed = engine.worker.recoveries.begin(prefixes[1], lambda _: None), list[int]()

        def fails(self: Decoder, *args: Any, **named: Any) -> Any:
            if len(self.live) == 3:
                raise RecoveryNeeded(lost, 1)
            return step(self, *args, **named)

        def advance(self: Recovered) -> None:
            failed.append(len(engine.worker.decoding))
            raise fault("no room for it")

        monkeypatch.setattr(Recovered, "advance", advance)
        monkeypatch.setattr(Decoder, "step", fails)
        handles = engine.generate(requests, sampling)._sequences
        check_failed(handles[1], fault)
        for n in (0, 2):
            handles[n].settled_result()
            mine = generation_of(handles[n])
            assert mine.token_ids.tolist() == healthy[n].token_ids.tolist()
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.prefixes._in_use
    assert failed == [3]


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_generation_is_cancelled_while_it_waits_for_lost_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_kv: bool
) -> None:
    sampling, step, ready, begun = SamplingParams(max_tokens=8), Decoder.step, [], threading.Event()
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(100))
        request = Request(prefix=prefix, suffix=[1], budget=0.5)
        [healthy] = engine.generate(request, sampling).results()
        lost = engine.worker.recoveries.begin(prefix, lambda _: None)

        def fails(self: Decoder, *args: Any, **named: Any) -> Any:
            if not lost.tokens:
                raise RecoveryNeeded(lost, 1)
            return step(self, *args, **named)

        def advance(self: Recovered) -> None:
            begun.set()
            self.tokens = len(ready)

        monkeypatch.setattr(Recovered, "advance", advance)
        monkeypatch.setattr(Decoder, "step", fails)
        given_up, other = engine.generate([request] * 2, sampling, keep_kv=keep_kv)._sequences
        assert begun.wait(60)
        given_up.cancel()
        given_up.result(60)
        ended = generation_of(given_up)
        assert ended.finish_reason == "cancelled" and len(ended.token_ids) == 1
        assert ended.completion().kv is None and not other.done()
        ready.append(True)
        other.result(60)
        assert generation_of(other).token_ids.tolist() == healthy.token_ids.tolist()
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.prefixes._in_use


def test_a_generation_that_cannot_join_others_ends_alone_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for its row, once the batch has grown for it."""
    sampling = SamplingParams(max_tokens=12)
    handles: list[Sequence] = []
    with tiny_engine(tmp_path, warm_batch=0) as engine:
        prefix = engine.ingest(tokens(100))
        requests = [Request(prefix=prefix, suffix=[n], budget=0.5) for n in range(3)]
        alone = [engine.generate(request, sampling).results()[0] for request in requests]

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("no memory")

        def steps() -> Generator[None, None, None]:  # each between two tokens of the first one
            handles.append(engine.submit(requests[0], sampling))
            yield
            with monkeypatch.context() as patch:
                patch.setattr(KvRows, "pick", fails)
                handles.append(engine.submit(requests[1], sampling))
                yield
            handles.append(engine.submit(requests[2], sampling))

        engine._scheduler.add(Job(steps())).future.result(60)
        with pytest.raises(RuntimeError, match="no memory"):
            handles[1].result(60)
        for n in (0, 2):
            handles[n].result(60)
            mine = generation_of(handles[n])
            assert mine.token_ids.tolist() == alone[n].token_ids.tolist()
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.prefixes._in_use


def test_where_joining_fails_on_the_way_nobody_else_keeps_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that start together one has room in a batch that runs; its pins are not given back."""
    sampling, close, closed = SamplingParams(max_tokens=12), RunningSequence.close, list[object]()

    def closes(running: RunningSequence) -> None:
        close(running)
        closed.append(running)
        if len(closed) == 1:
            raise RuntimeError("broken")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with tiny_engine(tmp_path, warm_batch=0, max_batch=2) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1], budget=0.5)

        def steps() -> Generator[None, None, list[Sequence]]:
            alone = engine.submit(request, sampling)
            yield
            with monkeypatch.context() as patch:
                patch.setattr(KvRows, "pick", full)
                patch.setattr(RunningSequence, "close", closes)
                stream = engine.generate([request] * 2, sampling)
                yield
            return [alone, *stream._sequences]

        alone, *both = engine._scheduler.add(Job(steps())).future.result(60)
        alone.result(60)
        assert len(generation_of(alone).token_ids) == 12
        for sequence in both:
            with pytest.raises(RuntimeError, match="no memory"):
                sequence.result(60)
        engine._scheduler.call(lambda: None)
        assert len({id(running) for running in closed}) == 2
        assert engine.stats().running == engine.stats().pinned_packs == 0
        assert not engine.worker.prefixes._in_use


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_generation_that_cannot_give_back_what_it_holds_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], RunningSequence.close

    def fails(running: RunningSequence) -> None:
        close(running)
        closed.append(running)
        raise RuntimeError("broken")

    with tiny_engine(tmp_path) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1], budget=0.5)
        with monkeypatch.context() as patch:
            patch.setattr(RunningSequence, "close", fails)
            lengths = [SamplingParams(max_tokens=n) for n in (4, 4, 8)]
            stream = engine.generate([request] * 3, lengths)
            for sequence, sampling in zip(stream._sequences, lengths, strict=True):
                sequence.result(60)
                assert len(generation_of(sequence).token_ids) == sampling.max_tokens
            engine._scheduler.call(lambda: None)
        assert len(closed) == 3
        assert engine.generate(request, SamplingParams(max_tokens=4)).results()[0].error is None


def test_a_generation_whose_outcome_cannot_be_made_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence has left its batch by then, so the error goes to its own caller."""
    finish = Sequence.finish_generation

    def fails(sequence: Sequence, kv: np.ndarray | None) -> None:
        if sequence.index == 1:
            raise RuntimeError("broken")
        finish(sequence, kv)

    with tiny_engine(tmp_path) as engine:
        request = Request(prefix=engine.ingest(tokens(100)), suffix=[1], budget=0.5)
        monkeypatch.setattr(Sequence, "finish_generation", fails)
        lengths = [SamplingParams(max_tokens=n) for n in (4, 4, 8, 1)]
        handles = engine.generate([request] * 4, lengths)._sequences
        with pytest.raises(RuntimeError, match="broken"):
            handles[1].result(60)
        for n in (0, 2, 3):
            handles[n].result(60)
            assert len(generation_of(handles[n]).token_ids) == lengths[n].max_tokens
        engine._scheduler.call(lambda: None)
        assert engine.stats().running == engine.stats().pinned_packs == 0


def test_a_prefix_is_not_in_use_once_its_first_token_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caches keep of the packs that were read is decided after that."""
    freed, finish = list[int](), Packs.finish

    def delete(self: Packs) -> None:
        assert sequence.done()
        freed.append(engine.store.delete(prefix))
        finish(self)

    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(100))
        monkeypatch.setattr(Packs, "finish", delete)
        [sequence] = engine._placement.sequences([Request(prefix=prefix, suffix=[1], budget=0.5)])
        engine._scheduler.submit([sequence])
        assert sequence.settled_result().error is None
        assert freed and freed[0] > 0
        assert not engine.worker.prefixes._in_use and not engine.stats().pinned_packs


def test_prompts_that_are_too_long_for_one_piece_of_memory_are_stored_first(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, prefill_block=16, prefill_window=32) as engine:
        prompts = [tokens(length).tolist() for length in (32, 33)]
        [fits] = engine.reprefill([Request(prefix=[], suffix=prompts[0])])
        assert fits.error is None and not list(engine.store.prefixes())
        [answer] = engine.reprefill([Request(prefix=[], suffix=prompts[1])])
        [stored] = engine.store.prefixes()
        assert stored.tokens.tolist() == prompts[1][:-1]
        over = Request(prefix=stored, suffix=prompts[1][-1:], budget=1.0)
        np.testing.assert_array_equal(answer.logits, engine.reprefill([over])[0].logits)


def test_a_long_prompt_whose_time_is_over_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline ends it before the next block is computed, and nothing is kept of it."""
    with tiny_engine(tmp_path, prefill_block=16, prefill_window=32) as engine:
        prompt = Request(prefix=[], suffix=tokens(100).tolist(), deadline_s=60.0)
        blocks: list[int] = []
        lapsed = Sequence.lapsed

        def after_two_blocks(sequence: Sequence) -> Any:
            blocks.append(1)
            late = DeadlineExceeded("late") if len(blocks) > 3 else None
            return late or lapsed(sequence)

        monkeypatch.setattr(Sequence, "lapsed", after_two_blocks)
        [answer] = engine.reprefill([prompt])
        assert isinstance(answer.error, DeadlineExceeded)
        assert not list(engine.store.prefixes())


def test_an_engine_closed_by_its_own_thread_does_not_wait_for_prompts(tmp_path: Path) -> None:
    """That thread computes them."""
    with tiny_engine(tmp_path, prefill_block=16, prefill_window=32) as engine:
        [prompt, other] = engine._placement.sequences(
            [Request(prefix=[], suffix=tokens(n).tolist()) for n in (400, 8)]
        )
        other.future.add_done_callback(lambda _: engine.close())
        engine._scheduler.submit([prompt, other])
        assert isinstance(prompt.settled_result().error, EngineClosed)


@pytest.mark.parametrize(
    ("lost", "sealed", "sizes"),
    [
        ("packs", False, {}),
        ("packs", False, {"max_batch": 1, "prefill_block": 16}),  # each in a batch of its own
        ("digest", True, {"admit_bytes": 300_000, "warm_batch": 0}),  # which two exceed
    ],
)
def test_requests_over_more_lost_prefixes_than_stay_are_answered(
    tmp_path: Path, lost: str, sealed: bool, sizes: dict[str, Any]
) -> None:
    """Recomputed KV stays until who waited for it has it."""
    (tmp_path / "key").write_text("ab" * 32)
    settings = StoreConfig(encrypt_key_file=tmp_path / "key" if sealed else None)
    store = ChunkStore.open(tmp_path / "kv", config=settings)
    with (
        tiny_engine(tmp_path / "other", **sizes) as other,
        closing(store),
        other.variant(other.config, store=store) as engine,
    ):
        requests = [
            Request(prefix=engine.ingest(tokens(400, seed)), suffix=[1], budget=0.05)
            for seed in range(5)
        ]
        for folder in tmp_path.rglob(lost):
            shutil.rmtree(folder)
        handles = engine._placement.sequences(requests)
        engine._scheduler.submit(handles)
        found = [handle.result(60) for handle in handles]
        assert all(one.error is None for one in found)
        kind = "recomputed_packs" if lost == "packs" else "recomputed_probes"
        assert all(one.trace.counters[kind] for one in found)
        for handle in handles:
            handle.settled_result()
            assert not handle.recovered


def test_a_full_folder_for_temporary_files_fails_the_request_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has recomputed KV that no request waits for, which goes first."""
    room = os.posix_fallocate

    def full(*of: int) -> None:
        if len(engine.worker.recoveries._known) > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room(*of)

    with tiny_engine(tmp_path) as engine:
        requests = over_lost_prefixes(engine, tmp_path, 2)
        monkeypatch.setattr(os, "posix_fallocate", full)
        most = 0
        with pytest.raises(StoreUnavailable, match="set TMPDIR"):
            engine.reprefill(requests[:1])[0].raise_for_error()
        most = 1
        assert [engine.reprefill([one])[0].error for one in requests] == [None, None]


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
        digest = engine.worker.prefixes.known(request.prefix).digest
        codes = jax.tree.leaves(digest.probes)
        held = [weakref.ref(memory.host.packs.base), weakref.ref(codes[0])]
        del digest, codes
        if isinstance(memory.pool, MappedPool):
            held.append(weakref.ref(memory.pool.packs.base))
        assert engine.stats().digest_bytes > 0 and all(ref() is not None for ref in held)
        assert engine.store.bounds.in_use
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
    assert not engine.store.bounds.in_use
    engine.close()
