"""What is asked of an engine: first tokens and texts, at once or as they come, async too."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request, Result
from ckv_jax.serving.async_streams import AsyncTokenStream, outcomes, results_async
from ckv_jax.serving.generation import Sampled, TokenEvent
from ckv_jax.serving.handle import Handle
from ckv_jax.serving.intake import Intake
from ckv_jax.serving.streams import Item, TokenStream, result_of, results


class Answering(ABC):
    """The calls that put requests into an engine's queue; see `Engine`."""

    @abstractmethod
    def _intake(self) -> Intake:
        """The way into the queue, for the requests of one call."""

    @property
    @abstractmethod
    def _window(self) -> int:
        """Requests that a stream has under way."""

    def submit(self, request: Request, sampling: SamplingParams | None = None) -> Handle:
        """Queues one request and returns at once; with `sampling` it ends in a `Generation`."""
        sampled = None if sampling is None else [Sampled(params=sampling)]
        return self._intake().submit([request], sampled)[0]

    def reprefill(self, requests: Sequence[Request]) -> list[Result]:
        """First tokens of `requests`, in their order. See `Result.error` for those that fail."""
        handles = self._intake().submit(_some(requests))
        try:
            return [result_of(handle, settled=True) for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        """First tokens in order of completion. `requests` may be endless: it is read as room
        comes free. Closing the iterator cancels what is on its way."""
        return results(requests, self._intake().submit, window=self._window)

    def generate(
        self,
        requests: Request | Sequence[Request],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        reselect_every: int = 0,
        keep_kv: bool = False,
    ) -> TokenStream:
        """Text after each suffix: an iterator of tokens; its `results()` are the generations.

        Decode attends to the chunks that the re-prefill chose, the suffix, and what was
        generated. Requests over one prefix are decoded together, whatever their `sampling`.

        Args:
            sampling: for all requests, or one each; None is greedy.
            reselect_every: choose the chunks again after so many tokens, by the queries of the
                latest ones; 0: never.
            keep_kv: keep keys and values in host memory for `append`.
        """
        requests, sampled = _sampled(requests, sampling, reselect_every, keep_kv)
        items: SimpleQueue[Item] = SimpleQueue()
        return TokenStream(self._intake().submit(requests, sampled, listener=items.put), items)

    async def areprefill(self, requests: Sequence[Request]) -> list[Result]:
        """`reprefill` in an event loop."""
        handles = await asyncio.to_thread(self._intake().submit, _some(requests))
        await outcomes(handles)
        return [result_of(handle) for handle in handles]

    def astream(self, requests: Iterable[Request]) -> AsyncIterator[Result]:
        """`stream` in an event loop."""
        return results_async(requests, self._intake().submit, window=self._window)

    def agenerate(
        self,
        requests: Request | Sequence[Request],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        reselect_every: int = 0,
        keep_kv: bool = False,
    ) -> AsyncTokenStream:
        """`generate` in an event loop: an asynchronous iterator with an asynchronous `results`."""
        requests, sampled = _sampled(requests, sampling, reselect_every, keep_kv)
        intake = self._intake()

        def submit(listener: Callable[[TokenEvent], None]) -> list[Handle]:
            return intake.submit(requests, sampled, listener=listener)

        return AsyncTokenStream(submit)


def _some(requests: Sequence[Request]) -> list[Request]:
    if not isinstance(requests, Sequence):
        raise TypeError(f"got {type(requests).__name__}, expected a list of Requests")
    if len(requests) == 0:
        raise ValueError("got an empty batch, expected at least one request")
    return list(requests)


def _sampled(
    requests: Request | Sequence[Request],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    reselect_every: int,
    keep_kv: bool,
) -> tuple[list[Request], list[Sampled]]:
    """Each request with how it goes on."""
    several = [requests] if isinstance(requests, Request) else _some(requests)
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * len(several)
    if len(sampling) != len(several):
        raise ValueError(f"got {len(sampling)} samplings, expected {len(several)}, one a request")
    return several, [
        Sampled(params=params, reselect_every=reselect_every, keep_kv=keep_kv)
        for params in sampling
    ]
