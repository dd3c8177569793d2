"""Outcomes as they come, of requests that the test itself answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ckv_jax import Prefix, Request, SamplingParams
from ckv_jax.errors import Cancelled
from ckv_jax.request import Generation, TokenEvent
from ckv_jax.serving.sequence import Listener, Sequence
from ckv_jax.serving.streams import AsyncTokenStream, Mailbox, Mailboxes, outcomes
from ckv_jax.trace import Trace
from tests.support.truth import FINGERPRINT
from tests.support.truth import SMALL as LAYOUT


def placed(sequence: Sequence) -> Sequence:
    sequence.place(Prefix.empty(FINGERPRINT, LAYOUT, ""), np.zeros(1, np.int32), 1.0)
    return sequence


def answer(sequence: Sequence) -> None:
    sequence.answer(1, None, np.zeros(4, np.float32), Trace())
    sequence.settle()


class Generations:
    """Two generations of two tokens each, whose tokens come when the test says."""

    def __init__(self) -> None:
        self.made: list[Sequence] = []
        self.calls = 0

    def submit(self, put: Listener) -> list[Sequence]:
        self.calls += 1
        for index in range(2):
            sampling = SamplingParams(max_tokens=2)
            request = Request(prefix=[], suffix=[1])
            one = placed(Sequence(request, index=index, sampling=sampling, listener=put))
            one.begin_generation(None, [], Trace())
            self.made.append(one)
        return self.made

    def go_on(self) -> None:
        for one in self.made:
            one.push(one.index)()
            if one.reason is not None:
                one.finish_generation(None)
                one.settle()

    @property
    def cancelled(self) -> list[int]:
        return [one.index for one in self.made if one.lapsed() is not None]


def told(event: TokenEvent) -> tuple[int, int | None, bool]:
    return event.index, event.token_id, event.generation is not None


EVENTS = [(0, 0, False), (1, 1, False), (0, 0, False), (0, None, True), (1, 1, False),
          (1, None, True)]  # fmt: skip


def test_two_tasks_may_ask_for_the_first_event_at_once() -> None:
    texts = Generations()

    async def ask() -> None:
        stream = AsyncTokenStream(texts.submit, Mailboxes())
        tasks = [asyncio.create_task(anext(stream)) for _ in range(2)]
        while len(texts.made) < 2:
            await asyncio.sleep(0.001)
        texts.go_on()
        assert sorted([told(await task) for task in tasks]) == EVENTS[:2]
        stream.cancel()

    asyncio.run(asyncio.wait_for(ask(), 20))
    assert texts.calls == 1 and texts.cancelled == [0, 1]


def test_cancelling_the_wait_for_all_cancels_those_that_are_not_done() -> None:
    done, waits = (placed(Sequence(Request(prefix=[], suffix=[1]))) for _ in range(2))
    answer(done)

    async def ask() -> None:
        task = asyncio.create_task(outcomes([done, waits]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    assert done.lapsed() is None and isinstance(waits.lapsed(), Cancelled)


def test_a_loop_wakes_once_for_the_tokens_of_a_batch() -> None:
    class Loop:
        wakes = 0

        def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
            self.wakes += 1
            call()

    loop, taken = Loop(), list[int]()
    mailbox = Mailbox(loop)  # type: ignore[arg-type]
    wakes = {mailbox.add(partial(taken.append, one)) for one in range(3)}
    assert taken == []
    for wake in wakes:
        wake()
    assert (taken, loop.wakes) == ([0, 1, 2], 1)


def test_an_event_loop_streams_the_same_and_asks_once() -> None:
    texts = Generations()

    async def ask() -> None:
        stream = AsyncTokenStream(texts.submit, Mailboxes())
        stream.cancel()  # nothing has been asked for
        assert texts.calls == 0
        async with stream:
            assert texts.calls == 1
            for _ in range(2):
                texts.go_on()
            assert [told(event) async for event in stream] == EVENTS
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert [type(text) for text in await stream.results()] == [Generation] * 2
            assert texts.calls == 1 and texts.cancelled == []
        assert texts.cancelled == [0, 1]

    asyncio.run(ask())
