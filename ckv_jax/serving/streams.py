"""Streams of outcomes: results in order of completion, tokens of generations.

For threads and for event loops, where cancelling the task cancels the requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

from ckv_jax.request import Generation, Request, Result, TokenEvent
from ckv_jax.serving.sequence import Listener, Outcome, Sequence, generation_of, result_of

T = TypeVar("T")
PlaceRequests = Callable[..., list[Sequence]]
"""See `Placement.sequences`."""
Submit = Callable[[list[Sequence]], None]
"""See `Scheduler.submit`."""
Item = TokenEvent | Sequence
"""An item of a stream's queue: an event of a token, or the sequence at its end."""


def last_event(sequence: Sequence) -> TokenEvent:
    """Creates the last event of a request."""
    generation = generation_of(sequence)
    return TokenEvent(index=sequence.index, request=sequence.request, generation=generation)


def one_call(place: PlaceRequests, submit: Submit) -> Callable[[Several[Request]], list[Sequence]]:
    """Returns a function that queues further requests of one call, with unique running ids."""
    under_way: dict[str, Sequence] = {}
    asked = 0

    def forget(sequence: Sequence) -> None:
        name = sequence.request.id
        if name is not None and under_way.get(name) is sequence:
            del under_way[name]

    def more(requests: Several[Request]) -> list[Sequence]:
        nonlocal asked
        sequences = place(requests, under_way=under_way, first=asked)
        asked += len(sequences)
        submit(sequences)
        for sequence in sequences:
            sequence.on_done(forget)
        return sequences

    return more


def results(
    requests: Iterable[Request], place: PlaceRequests, submit: Submit, *, max_batch: int
) -> Iterator[Result]:
    """Yields results in order of completion, with two batches of requests in progress at most: one
    that is computed, one that waits.

    Closing the iterator cancels running requests.
    """
    source, queue = iter(requests), one_call(place, submit)
    done: SimpleQueue[Sequence] = SimpleQueue()
    under_way: set[Sequence] = set()
    try:
        while True:
            more = list(islice(source, 2 * max_batch - len(under_way)))
            for sequence in queue(more) if more else []:
                under_way.add(sequence)
                sequence.on_done(done.put)
            if not under_way:
                return
            sequence = done.get()
            under_way.remove(sequence)
            yield result_of(sequence)
    finally:
        for sequence in under_way:
            sequence.cancel()


class TokenStream:
    """Stream of the tokens of one `Engine.generate` call, for one thread.

    An iterator of `TokenEvent`s; also a context manager, which cancels running requests at its end.
    """

    def __init__(self, sequences: Several[Sequence], items: SimpleQueue[Item]) -> None:
        self._sequences = list(sequences)
        self._items = items
        self._left = len(self._sequences)
        for sequence in self._sequences:
            sequence.on_done(items.put)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        if not self._left:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, TokenEvent):
            return item
        self._left -= 1
        return last_event(item)

    def results(self) -> list[Generation]:
        """Waits for all requests; returns their generations in order of the requests."""
        return [generation_of(sequence, settled=True) for sequence in self._sequences]

    def cancel(self) -> None:
        """Ends every request with the tokens generated so far."""
        for sequence in self._sequences:
            sequence.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Mailbox:
    """Calls for one event loop from any thread, many of them for one wake-up of the loop.

    A wake-up hands the interpreter over to the loop: one for each token of a batch would stop the
    engine thread as many times.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()

    def add(self, call: Callable[[], None]) -> Callable[[], None]:
        """Queues a call, which comes with the next wake-up; returns what wakes the loop."""
        self._calls.append(call)
        return self.wake

    def wake(self) -> None:
        """Has the loop make all queued calls, in order; does nothing once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._calls:
            self._calls.popleft()()


class Mailboxes:
    """A mailbox for each event loop."""

    def __init__(self) -> None:
        self._of: dict[asyncio.AbstractEventLoop, Mailbox] = {}

    def here(self) -> Mailbox:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._of:
            for other in list(self._of):
                if other.is_closed():
                    self._of.pop(other, None)
        return self._of.setdefault(loop, Mailbox(loop))


class AsyncQueue(Generic[T]):
    """A queue that any thread may put into and one event loop takes from."""

    def __init__(self, mailbox: Mailbox | None = None) -> None:
        self._mailbox = mailbox or Mailbox(asyncio.get_running_loop())
        self._queue: asyncio.Queue[T] = asyncio.Queue()

    def add(self, item: T) -> Callable[[], None]:
        """Never blocks; the item is there after the call of what this returns."""
        return self._mailbox.add(partial(self._queue.put_nowait, item))

    def put(self, item: T) -> None:
        """Never blocks; does nothing once the loop is closed."""
        self.add(item)()

    async def get(self) -> T:
        """Waits for the next item."""
        return await self._queue.get()


async def submitted(submit: Callable[[], list[Sequence]]) -> list[Sequence]:
    """Calls `submit` in another thread; cancels its sequences if the task is cancelled first."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:  # what is being submitted has no reader
        submitting.add_done_callback(_cancel_all)
        raise


def _cancel_all(submitting: asyncio.Future[list[Sequence]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        for sequence in submitting.result():
            sequence.cancel()


async def outcomes(sequences: Several[Sequence]) -> list[Outcome]:
    """Waits for all outcomes; returns them in order."""
    try:
        return [await asyncio.wrap_future(sequence.future) for sequence in sequences]
    finally:
        for sequence in sequences:
            if not sequence.done():
                sequence.cancel()


async def results_async(
    requests: Iterable[Request], place: PlaceRequests, submit: Submit, *, max_batch: int
) -> AsyncIterator[Result]:
    """`results` in an event loop."""
    source, queue = iter(requests), one_call(place, submit)
    done: AsyncQueue[Sequence] = AsyncQueue()
    under_way: set[Sequence] = set()
    try:
        while True:
            more = list(islice(source, 2 * max_batch - len(under_way)))
            for sequence in await submitted(partial(queue, more)) if more else []:
                under_way.add(sequence)
                sequence.on_done(done.put)
            if not under_way:
                return
            sequence = await done.get()
            under_way.remove(sequence)
            yield result_of(sequence)
    finally:
        for sequence in under_way:
            sequence.cancel()


class AsyncTokenStream:
    """`TokenStream` for an event loop. It submits its requests when the first event is awaited."""

    def __init__(
        self,
        submit: Callable[[Listener], list[Sequence]],
        mailboxes: Mailboxes,
        *,
        quick: bool = False,
    ) -> None:
        """Creates a stream.

        `mailboxes`: the engine's, which deliver the tokens of a batch together; `quick`: whether
        `submit` takes less time than handing it to a thread.
        """
        self._submit = submit
        self._mailboxes = mailboxes
        self._quick = quick
        self._sequences: list[Sequence] | None = None
        self._lock = asyncio.Lock()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._sequences is None:
            await self._begin()
        if not self._left:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, TokenEvent):
            return item
        self._left -= 1
        return last_event(item)

    async def results(self) -> list[Generation]:
        """Waits for all requests; returns their generations in order of the requests."""
        sequences = await self._begin()
        await outcomes(sequences)
        return [generation_of(sequence) for sequence in sequences]

    def share(self, index: int, call: Callable[[Generation], None]) -> None:
        """See `Sequence.share`."""
        if self._sequences is not None:
            self._sequences[index].share(call)

    def cancel(self) -> None:
        """Ends every request with the tokens generated so far."""
        for sequence in self._sequences or []:
            sequence.cancel()

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def _begin(self) -> list[Sequence]:
        async with self._lock:  # two tasks may ask for the first event at once
            if self._sequences is None:
                self._items: AsyncQueue[Item] = AsyncQueue(self._mailboxes.here())
                submit = partial(self._submit, self._items.add)
                self._sequences = submit() if self._quick else await submitted(submit)
                self._left = len(self._sequences)
                for sequence in self._sequences:
                    sequence.on_done(self._items.put)
        return self._sequences
