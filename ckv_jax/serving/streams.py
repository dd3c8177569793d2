"""Outcomes as they come: results in order of completion, tokens of generations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from ckv_jax.request import Request, Result
from ckv_jax.serving.generation import Generation, TokenEvent
from ckv_jax.serving.handle import Handle

Submit = Callable[[Sequence[Request]], list[Handle]]
Item = TokenEvent | Handle
"""What a running generation puts into a stream's queue: a token, and itself at the end."""


def result_of(handle: Handle, *, settled: bool = False) -> Result:
    """The outcome of a handle that is not sampled; waits for it."""
    outcome = handle.settled_result() if settled else handle.result()
    assert isinstance(outcome, Result)
    return outcome


def generation_of(handle: Handle, *, settled: bool = False) -> Generation:
    """The outcome of a sampled handle; waits for it."""
    outcome = handle.settled_result() if settled else handle.result()
    assert isinstance(outcome, Generation)
    return outcome


def last_event(handle: Handle) -> TokenEvent:
    """The event that ends a request's tokens."""
    generation = generation_of(handle)
    return TokenEvent(index=handle.index, request=handle.request, generation=generation)


def results(requests: Iterable[Request], submit: Submit, *, window: int) -> Iterator[Result]:
    """Results in order of completion. At most `window` requests are taken ahead of them.

    Closing the iterator cancels what is still on its way.
    """
    source = iter(requests)
    done: SimpleQueue[Handle] = SimpleQueue()
    open_handles: set[Handle] = set()
    try:
        while True:
            more = list(islice(source, window - len(open_handles)))
            for handle in submit(more) if more else []:
                open_handles.add(handle)
                handle.on_done(done.put)
            if not open_handles:
                return
            handle = done.get()
            open_handles.remove(handle)
            yield result_of(handle)
    finally:
        for handle in open_handles:
            handle.cancel()


class TokenStream:
    """The tokens of one `Engine.generate` call, as they come. Used by one thread.

    An iterator of `TokenEvent`s; also a context manager that cancels what still runs when left.
    """

    def __init__(self, handles: Sequence[Handle], items: SimpleQueue[Item]) -> None:
        self._handles = list(handles)
        self._items = items
        self._left = len(self._handles)
        for handle in self._handles:
            handle.on_done(items.put)

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
        """The generations, in order of the requests; waits for them."""
        return [generation_of(handle, settled=True) for handle in self._handles]

    def cancel(self, index: int | None = None) -> None:
        """Ends one request, or all of them, with what there is."""
        for handle in self._handles if index is None else [self._handles[index]]:
            handle.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
