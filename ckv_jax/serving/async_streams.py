"""The same outcomes in an event loop. Cancelling the task cancels the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Generic, Self, TypeVar

from ckv_jax.request import Request, Result
from ckv_jax.serving.generation import Generation, TokenEvent
from ckv_jax.serving.handle import Handle, Outcome
from ckv_jax.serving.streams import Item, Submit, generation_of, last_event, result_of

T = TypeVar("T")


class LoopQueue(Generic[T]):
    """A queue that any thread may put into and one event loop takes from."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T] = asyncio.Queue()

    def put(self, item: T) -> None:
        """Never blocks; does nothing once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop has closed: nobody is left to take it
            return

    async def get(self) -> T:
        """Waits for the next item."""
        return await self._queue.get()


async def outcomes(handles: Sequence[Handle]) -> list[Outcome]:
    """All outcomes, in order."""
    try:
        return [await asyncio.wrap_future(handle.future) for handle in handles]
    finally:
        for handle in handles:
            if not handle.done():
                handle.cancel()


async def results_async(
    requests: Iterable[Request], submit: Submit, *, window: int
) -> AsyncIterator[Result]:
    """See `streams.results`."""
    source = iter(requests)
    done: LoopQueue[Handle] = LoopQueue()
    open_handles: set[Handle] = set()
    try:
        while True:
            more = list(islice(source, window - len(open_handles)))
            for handle in await asyncio.to_thread(submit, more) if more else []:
                open_handles.add(handle)
                handle.on_done(done.put)
            if not open_handles:
                return
            handle = await done.get()
            open_handles.remove(handle)
            yield result_of(handle)
    finally:
        for handle in open_handles:
            handle.cancel()


class AsyncTokenStream:
    """See `streams.TokenStream`. Requests are submitted when the first event is asked for."""

    def __init__(self, submit: Callable[[Callable[[TokenEvent], None]], list[Handle]]) -> None:
        self._submit = submit
        self._handles: list[Handle] | None = None
        self._left = 0

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        await self._begin()
        if not self._left:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, TokenEvent):
            return item
        self._left -= 1
        return last_event(item)

    async def results(self) -> list[Generation]:
        """The generations, in order of the requests; waits for them."""
        handles = await self._begin()
        await outcomes(handles)
        return [generation_of(handle) for handle in handles]

    def cancel(self) -> None:
        """Ends every request with what there is."""
        for handle in self._handles or []:
            handle.cancel()

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def _begin(self) -> list[Handle]:
        if self._handles is None:
            self._items: LoopQueue[Item] = LoopQueue()
            self._handles = await asyncio.to_thread(self._submit, self._items.put)
            self._left = len(self._handles)
            for handle in self._handles:
                handle.on_done(self._items.put)
        return self._handles
