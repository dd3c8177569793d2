"""Outcomes as they come: results in order of completion, tokens of generations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from itertools import islice
from queue import SimpleQueue
from typing import Self

from ckv_jax.request import Generation, Request, Result, TokenEvent
from ckv_jax.serving.sequence import Sequence, generation_of, result_of

Submit = Callable[[Several[Request]], list[Sequence]]
Item = TokenEvent | Sequence
"""What a running generation puts into a stream's queue: a token, and itself at the end."""


def last_event(sequence: Sequence) -> TokenEvent:
    """The event that ends a request's tokens."""
    generation = generation_of(sequence)
    return TokenEvent(index=sequence.index, request=sequence.request, generation=generation)


def results(requests: Iterable[Request], submit: Submit, *, window: int) -> Iterator[Result]:
    """Results in order of completion. At most `window` requests are taken ahead of them.

    Closing the iterator cancels what is still on its way.
    """
    source = iter(requests)
    done: SimpleQueue[Sequence] = SimpleQueue()
    under_way: set[Sequence] = set()
    try:
        while True:
            more = list(islice(source, window - len(under_way)))
            for sequence in submit(more) if more else []:
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
    """The tokens of one `Engine.generate` call, as they come. Used by one thread.

    An iterator of `TokenEvent`s; also a context manager that cancels what still runs when left.
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
        """The generations, in order of the requests; waits for them."""
        return [generation_of(sequence, settled=True) for sequence in self._sequences]

    def cancel(self, index: int | None = None) -> None:
        """Ends one request, or all of them, with what there is."""
        for sequence in self._sequences if index is None else [self._sequences[index]]:
            sequence.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
