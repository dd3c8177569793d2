"""Many requests at once: the same answers as one by one, and each one's faults its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from engine_support import TIGHT, scale_error, tokens
from engine_tiny import tiny_engine
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckv_jax import ContextOverflow, Engine, Request, Result
from ckv_jax.config import Prefetch
from ckv_jax.errors import Cancelled, DeadlineExceeded, EngineClosed
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.streams import one_call
from ckv_jax.storage.errors import FingerprintMismatch, PrefixNotFound
from ckv_jax.storage.prefix import Prefix

LENGTHS = (125, 115)
"""Eight chunks each, so that few shapes are compiled."""
BUDGETS = (0.2, 0.6, 1.0)

PrefixRecord = tuple[int, int, int, float]
"""(which prefix, suffix length, suffix seed, budget)."""


class Served:
    """An engine with two prefixes, and the answers to single requests so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prefixes = [engine.ingest(tokens(n, seed)) for seed, n in enumerate(LENGTHS)]
        self._alone: dict[PrefixRecord, Result] = {}

    def request(self, wish: PrefixRecord, **more: object) -> Request:
        which, length, seed, budget = wish
        suffix = tokens(length, 100 + seed).tolist()
        return Request(prefix=self.prefixes[which], suffix=suffix, budget=budget, **more)

    def alone(self, wish: PrefixRecord) -> Result:
        if wish not in self._alone:
            (self._alone[wish],) = self.engine.reprefill([self.request(wish)])
        return self._alone[wish]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_engine(tmp_path_factory.mktemp("store"), max_batch=4) as engine:
        yield Served(engine)


@pytest.fixture(scope="module")
def prefix(served: Served) -> Prefix:
    return served.prefixes[0]


WISHES = st.tuples(
    st.integers(0, 1), st.integers(1, 16), st.integers(0, 3), st.sampled_from(BUDGETS)
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(wishes=st.lists(WISHES, min_size=1, max_size=6))
@example(wishes=[(0, 1, 0, 0.2), (0, 30, 0, 0.2)])  # of very different lengths
def test_a_batch_equals_one_by_one(served: Served, wishes: list[PrefixRecord]) -> None:
    results = served.engine.reprefill([served.request(wish) for wish in wishes])
    for wish, result in zip(wishes, results, strict=True):
        alone = served.alone(wish)
        assert scale_error(result.logits, alone.logits) < TIGHT
        assert result.trace.chunks == alone.trace.chunks
        assert result.trace.attention_mass == pytest.approx(alone.trace.attention_mass, abs=1e-4)


def test_a_batch_reads_each_pack_once(served: Served) -> None:
    with cold(served.engine) as engine:
        requests = [served.request((0, 4, seed, 0.4)) for seed in range(4)]
        engine.reprefill(requests)  # the digest stays from here on
        alone = [ssd_bytes(engine, [request]) for request in requests]
        union = {
            (period, chunk)
            for request in requests
            for period, chunks in enumerate(selected(engine, request))
            for chunk in chunks.tolist()
        }
        together = ssd_bytes(engine, requests)
        assert max(alone) <= together == 2 * len(union) * engine.layout.pack_bytes < sum(alone)
        assert ssd_bytes(engine, [requests[0]] * 4) == alone[0]


def test_a_large_budget_does_not_make_the_next_request_read_more(served: Served) -> None:
    """What is read ahead for a period is what this request selected for the one before."""
    small, large = served.request((0, 4, 0, 0.1)), served.request((0, 4, 0, 1.0))
    with cold(served.engine, "previous") as engine:
        ssd_bytes(engine, [large])
        after_large = [ssd_bytes(engine, [small]) for _ in range(2)]
        # Not equal: how much is read ahead depends on what reading takes.
        assert max(after_large) < ssd_bytes(engine, [large]) / 2


def cold(engine: Engine, prefetch: Prefetch = "intra") -> Engine:
    """The same engine with no cache, so that every pack it uses comes from the SSD."""
    system = dataclasses.replace(engine.system, prefetch=prefetch)
    return engine.variant(
        dataclasses.replace(engine.config, system=system, device_cache_bytes=0, host_cache_bytes=0)
    )


def ssd_bytes(engine: Engine, requests: list[Request]) -> int:
    return engine.reprefill(requests)[0].trace.bytes["ssd"]


def selected(engine: Engine, request: Request) -> list[np.ndarray]:
    engine.reprefill([request])
    return engine.last_selection(request.prefix)


def test_a_small_byte_budget_only_makes_batches_smaller(served: Served) -> None:
    wishes: list[PrefixRecord] = [(i % 2, 4, i, 0.2) for i in range(4)]
    config = dataclasses.replace(served.engine.config, admit_bytes=1)
    with served.engine.variant(config) as narrow:
        results = narrow.reprefill([served.request(wish) for wish in wishes])
    for wish, result in zip(wishes, results, strict=True):
        assert scale_error(result.logits, served.alone(wish).logits) < TIGHT
    assert len({id(result.trace.bytes) for result in results}) == 4


def test_each_request_has_its_own_part_of_the_trace(served: Served) -> None:
    few, many = served.engine.reprefill(
        [served.request((0, 3, 0, 0.2)), served.request((0, 3, 1, 1.0))]
    )
    periods = served.engine.worker.plan.periods
    assert few.trace.chunks == {"selected": 2 * periods, "total": 8 * periods}
    assert many.trace.chunks == {"selected": 8 * periods, "total": 8 * periods}
    assert few.trace.attention_mass < many.trace.attention_mass == pytest.approx(1.0, abs=1e-5)
    assert few.trace.bytes is many.trace.bytes
    assert few.queued_ms >= 0


def test_every_bad_request_fails_alone(served: Served, prefix: Prefix, tmp_path: Path) -> None:
    with tiny_engine(tmp_path, seed=1) as other:
        foreign = other.ingest(tokens(64))
    bad: list[tuple[Request, type[Exception], str]] = [
        (Request(prefix="00ff", suffix=[1]), PrefixNotFound, "00ff"),
        (Request(prefix=foreign, suffix=[1]), FingerprintMismatch, "weights"),
        (Request(prefix=prefix, suffix=tokens(2000)), ContextOverflow, "125 prefix and 2000"),
        (
            Request(prefix=prefix, suffix=[128]),
            ValueError,
            "token ids from 128 to 128",
        ),
        (Request(prefix=prefix, suffix=[0, -1]), ValueError, "token ids from -1 to 0"),
        (Request(prefix=prefix, suffix=[0.5]), ValueError, "got tokens float64"),  # type: ignore[list-item]
        (Request(prefix=prefix, suffix=[[1, 2]]), ValueError, "got tokens int64"),  # type: ignore[list-item]
        (Request(prefix=prefix, suffix="text"), ValueError, "no tokenizer"),
        (Request(prefix=prefix, suffix=[[1], [1, 2]]), ValueError, "several shapes"),  # type: ignore[list-item]
        (Request(prefix=prefix, suffix=[2**70]), ValueError, "expected integers"),
        (Request(prefix=prefix, suffix=[1], id="x"), ValueError, "'x' twice"),
        (Request(prefix=prefix, suffix=[1], deadline_s=1e-9), DeadlineExceeded, "1e-09 s"),
    ]
    good = Request(prefix=prefix, suffix=[1], id="x")
    expected = served.engine.reprefill([good])[0].logits
    first, *failed, last = served.engine.reprefill(
        [good, *(request for request, _, _ in bad), Request(prefix=prefix, suffix=[1])]
    )
    for result in (first, last):
        assert scale_error(result.logits, expected) < TIGHT
    for result, (request, kind, words) in zip(failed, bad, strict=True):
        assert result.request is request
        assert isinstance(result.error, kind) and words in str(result.error)
        for name in ("token_id", "text", "logits"):
            with pytest.raises(kind, match=words):
                getattr(result, name)


def test_calls_refuse_what_no_single_request_is_to_blame_for(
    served: Served, prefix: Prefix
) -> None:
    engine = served.engine
    with pytest.raises(ValueError, match="empty batch"):
        engine.reprefill([])
    with pytest.raises(ValueError, match="empty batch"):
        engine.generate([])
    with pytest.raises(TypeError, match="got Request, expected a list"):
        engine.reprefill(Request(prefix=prefix, suffix=[1]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dict"):
        engine.reprefill([{"prefix": prefix.id}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got dict, expected a Request"):
        asyncio.run(engine.agenerate([{"prefix": prefix.id}]).results())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="max_batch=0"):
        engine.warmup(prefix, max_batch=0)
    with pytest.raises(ValueError, match="2 samplings, expected 1"):
        engine.generate(Request(prefix=prefix, suffix=[1]), [SamplingParams()] * 2)


def test_a_stream_gives_every_result_once_and_takes_requests_as_it_goes(
    served: Served, prefix: Prefix
) -> None:
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        while True:
            taken += 1
            yield Request(prefix=prefix, suffix=[taken % 128], id=str(taken))

    stream = served.engine.stream(endless())
    seen = {next(stream).request.id for _ in range(30)}
    assert len(seen) == 30
    assert taken <= 30 + 2 * served.engine.config.max_batch
    stream.close()
    assert list(served.engine.stream([])) == []


def test_a_closed_stream_gives_up_what_it_asked_for(
    served: Served, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Sequence] = []
    submit = served.engine._scheduler.submit
    monkeypatch.setattr(
        served.engine._scheduler, "submit", lambda some: (queued.extend(some), submit(some))
    )
    stream = served.engine.stream(Request(prefix=prefix, suffix=[n]) for n in range(40))
    first = next(stream)
    stream.close()
    rest = [sequence for sequence in queued if sequence.request is not first.request]
    assert rest and all(isinstance(sequence.lapsed(), Cancelled) for sequence in rest)


def test_a_handle_can_be_cancelled_and_waited_for(served: Served, prefix: Prefix) -> None:
    with held(served.engine):
        handles = [served.engine.submit(Request(prefix=prefix, suffix=[i])) for i in range(20)]
        handles[-1].cancel()
    assert isinstance(handles[-1].result(60).error, Cancelled)
    assert all(handle.result(60).error is None for handle in handles[:-1])


def test_async_calls_answer_the_same(served: Served) -> None:
    wishes: list[PrefixRecord] = [(0, 4, 0, 0.2), (1, 4, 1, 0.2)]

    async def ask() -> tuple[list[Result], list[Result]]:
        requests = [served.request(wish, id=str(i)) for i, wish in enumerate(wishes)]
        streamed = [result async for result in served.engine.astream(requests)]
        streamed.sort(key=lambda result: str(result.request.id))
        return await served.engine.areprefill(requests), streamed

    for results in asyncio.run(ask()):
        for wish, result in zip(wishes, results, strict=True):
            assert scale_error(result.logits, served.alone(wish).logits) < TIGHT


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("submitting", [False, True])
def test_cancelling_a_task_cancels_its_requests(
    served: Served, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, streams: bool, submitting: bool
) -> None:
    """It submits them at that moment, or has done so and waits for what they answer."""
    queued: list[Sequence] = []
    asked, cancelled = Event(), Event()
    submit = served.engine._scheduler.submit

    def noting(sequences: list[Sequence]) -> None:
        asked.set()
        assert not submitting or cancelled.wait(60)
        submit(sequences)
        queued.extend(sequences)

    async def give_up() -> None:
        task = asyncio.create_task(ask_three(served.engine, prefix, streams))
        await asyncio.to_thread(asked.wait, 60)
        while not submitting and not queued:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0 if submitting else 0.2)  # until it waits for outcomes
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        while not queued or not all(sequence.lapsed() for sequence in queued):
            await asyncio.sleep(0.01)

    monkeypatch.setattr(served.engine._scheduler, "submit", noting)
    with held(served.engine):
        asyncio.run(asyncio.wait_for(give_up(), 60))
    assert [type(sequence.result(60).error) for sequence in queued] == [Cancelled] * 3


async def ask_three(engine: Engine, prefix: Prefix, streams: bool) -> None:
    """Three requests, waited for together or as they are answered."""
    requests = [Request(prefix=prefix, suffix=[1])] * 3
    if streams:
        await anext(engine.astream(requests))
    else:
        await engine.areprefill(requests)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Nothing is computed meanwhile."""
    begun, free = Event(), Event()

    def wait() -> Generator[None, None, None]:
        begun.set()
        free.wait(60)
        yield

    engine._scheduler.add(Job(wait()))
    assert begun.wait(60), "else the engine's thread may answer first what comes meanwhile"
    try:
        yield
    finally:
        free.set()


def test_an_id_is_taken_until_its_request_is_done(served: Served, prefix: Prefix) -> None:
    request = Request(prefix=prefix, suffix=[1], id="None")
    engine = served.engine
    more = one_call(engine._placement.sequences, engine._scheduler.submit)
    with held(served.engine):
        (first,) = more([request])
        for _ in range(2):
            (again,) = more([request])
            assert "'None' twice" in str(again.result(60).error)
        more([Request(prefix="00ff", suffix=[1])])  # fails at once, and has no id
        (again,) = more([request])
        assert again.done()
    assert first.result(60).error is None
    (again,) = more([request])
    assert again.result(60).error is None


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(32))
        request = Request(prefix=prefix, suffix=[1])
    with pytest.raises(EngineClosed):
        engine.reprefill([request])
