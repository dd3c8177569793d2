"""Who is served when, told by the order of what happens and by no clock."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from engine_sharp import Sharp
from engine_support import tokens

from ckv_jax import Engine, Request, Result, SamplingParams
from ckv_jax.storage.prefix import Prefix

SECONDS = 30.0
ENDLESS = 1900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(sharp: Sharp, folder: Path) -> Iterator[Engine]:
    with sharp.fresh(folder) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(60, seed)) for seed in range(6)]


class Held:
    """An ingest that does not come to its end until `go`."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.began, self.go = threading.Event(), threading.Event()

        def progress(done: int, total: int) -> None:
            self.began.set()
            assert self.go.wait(SECONDS)

        self.thread = threading.Thread(
            target=lambda: engine.ingest(tokens(200, seed), progress=progress), daemon=True
        )
        self.thread.start()
        assert self.began.wait(SECONDS)

    def end(self) -> None:
        self.go.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


def test_the_queue_is_first_come_first_served(engine: Engine, prefixes: list[Prefix]) -> None:
    """Behind a long job eight requests of as many callers wait, two over each prefix; with one
    row a batch they begin in the order in which they were asked."""
    with engine.variant(dataclasses.replace(engine.config, max_batch=1)) as one:
        held = Held(one, 100)
        order = [0, 1, 0, 2, 1, 3, 3, 2]
        handles = [
            one.submit(Request(prefix=prefixes[which], suffix=[which, place]))
            for place, which in enumerate(order)
        ]
        held.end()
        results = [handle.result(SECONDS) for handle in handles]
    for result in results:
        assert isinstance(result, Result)
        result.raise_for_error()
    starts = [result.trace.start_ns for result in results]
    assert starts == sorted(starts) and len(set(starts)) == len(order)


def asleep(thread: threading.Thread) -> bool:
    """Whether the kernel has the thread waiting for something."""
    status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return status.rpartition(") ")[2].startswith("S")


def test_an_ingest_gets_its_turn_among_requests_without_end(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    """Two callers ask again as soon as they are answered; an ingest that waits goes before what
    is asked after it, so not more than those two and one that was on its way are served first."""
    answered: list[int] = []
    began = threading.Event()
    before: list[int] = []

    def progress(done: int, total: int) -> None:
        before.append(len(answered))
        began.set()

    with engine.variant(dataclasses.replace(engine.config, max_batch=1)) as one:

        def ask(caller: int) -> None:
            request = Request(prefix=prefixes[caller], suffix=[len(answered) % 100])
            one.submit(request).on_done(lambda _: again(caller))

        def again(caller: int) -> None:
            answered.append(caller)
            if not began.is_set() and len(answered) < 200:
                ask(caller)

        held = Held(one, 101)
        ask(0)
        ask(1)
        late = threading.Thread(
            target=lambda: one.ingest(tokens(70, 102), progress=progress), daemon=True
        )
        late.start()
        still = 0
        while still < 20:  # it is where it waits: nothing else keeps it asleep for so long
            still = still + 1 if asleep(late) else 0
            time.sleep(0.005)
        held.end()
        late.join(SECONDS)
    assert before[0] <= 3


def test_two_endless_texts_both_go_on(engine: Engine, prefixes: list[Prefix]) -> None:
    """Each gives ten tokens while the other has not come to its end, and then ten more."""
    sampling = SamplingParams(max_tokens=ENDLESS)
    with (
        engine.generate(Request(prefix=prefixes[0], suffix=[1, 2]), sampling) as first,
        engine.generate(Request(prefix=prefixes[1], suffix=[3]), sampling) as second,
    ):
        seen: dict[int, list[int | None]] = {0: [], 1: []}
        for _ in range(2):
            for index, stream in enumerate((second, first)):
                seen[index] += [event.token_id for event in islice(stream, 10)]
        first.cancel()
        second.cancel()
        texts = [stream.results()[0] for stream in (second, first)]
    for index, text in enumerate(texts):
        assert text.finish_reason == "cancelled", "the other one had to end first"
        assert text.token_ids.tolist()[:20] == seen[index]
        assert 20 <= len(text.token_ids) < ENDLESS


def test_a_question_is_answered_beside_an_endless_text(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    with engine.generate(
        Request(prefix=prefixes[0], suffix=[1, 2]), SamplingParams(max_tokens=ENDLESS)
    ) as stream:
        next(stream)
        (answer,) = engine.reprefill([Request(prefix=prefixes[2], suffix=[5])])
        answer.raise_for_error()
        stored = engine.ingest(tokens(80, 103))
        assert stored.num_tokens == 80
        stream.cancel()
        (text,) = stream.results()
    assert text.finish_reason == "cancelled" and len(text.token_ids) < ENDLESS
