"""Intake: requests become placed handles in the queue; a bad one fails alone, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

from ckv_jax.errors import CkvError
from ckv_jax.request import Request
from ckv_jax.serving.generation import Sampled, TokenEvent
from ckv_jax.serving.handle import Handle
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.scheduler import Scheduler


class Intake:
    """The way in, for the requests of one call."""

    def __init__(self, placement: Placement, scheduler: Scheduler) -> None:
        self._placement = placement
        self._scheduler = scheduler
        self._ids: set[str] = set()
        self._count = 0

    def submit(
        self,
        requests: Sequence[Request],
        sampled: Sequence[Sampled] | None = None,
        *,
        listener: Callable[[TokenEvent], None] | None = None,
    ) -> list[Handle]:
        """One handle a request, queued together. May be called again for more of the same call.

        Raises `TypeError` for what is no request and `EngineClosed`.
        """
        handles = []
        for request, how in zip(requests, sampled or repeat(None)):  # noqa: B905 - endless
            if not isinstance(request, Request):
                raise TypeError(f"got {type(request).__name__}, expected a Request")
            handle = Handle(request, index=self._count, sampled=how, listener=listener)
            self._count += 1
            self._place(handle)
            handles.append(handle)
        self._scheduler.submit([handle for handle in handles if not handle.done()])
        return handles

    def _place(self, handle: Handle) -> None:
        request, sampled = handle.request, handle.sampled
        try:
            if request.id is not None and request.id in self._ids:
                raise ValueError(f"got id {request.id!r} twice, expected one request of each id")
            sampling = sampled.params if sampled is not None else None
            handle.placed = self._placement.place(request, sampling)
        except (CkvError, ValueError) as error:
            handle.fail(error)
        if request.id is not None:
            self._ids.add(request.id)
