"""Intake: requests become placed sequences in the queue; a bad one fails alone, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import count, repeat

from ckv_jax.errors import CkvError
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request, TokenEvent
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one request goes on after its first token; without `sampling` it does not."""

    sampling: SamplingParams | None = None
    keep_kv: bool = False


class Intake:
    """The way into the queue of one engine. Thread-safe."""

    def __init__(self, placement: Placement, scheduler: Scheduler) -> None:
        self._placement = placement
        self._scheduler = scheduler

    def submit(
        self,
        requests: Several[Request],
        ways: Iterable[Way] | None = None,
        *,
        listener: Callable[[TokenEvent], None] | None = None,
    ) -> list[Sequence]:
        """One sequence for each request of a call, queued together.

        Raises `TypeError` for what is no request and `EngineClosed`.
        """
        return self._submit(requests, ways or repeat(Way()), listener, set(), count())

    def one_call(self) -> Callable[[Several[Request]], list[Sequence]]:
        """Queues more and more requests of one call; ids are unique among those under way."""
        ids: set[str] = set()
        places = count()

        def more(requests: Several[Request]) -> list[Sequence]:
            sequences = self._submit(requests, repeat(Way()), None, ids, places)
            for sequence in sequences:
                sequence.on_done(lambda done: ids.discard(str(done.request.id)))
            return sequences

        return more

    def _submit(
        self,
        requests: Several[Request],
        ways: Iterable[Way],
        listener: Callable[[TokenEvent], None] | None,
        ids: set[str],
        places: Iterator[int],
    ) -> list[Sequence]:
        sequences = []
        for request, way in zip(requests, ways):  # noqa: B905 - endless
            if not isinstance(request, Request):
                raise TypeError(f"got {type(request).__name__}, expected a Request")
            sequence = Sequence(
                request,
                index=next(places),
                sampling=way.sampling,
                keep_kv=way.keep_kv,
                listener=listener,
            )
            try:
                if request.id is not None and request.id in ids:
                    raise ValueError(
                        f"got id {request.id!r} twice, expected one request of each id"
                    )
                self._placement.place(sequence)
            except (CkvError, ValueError) as error:
                sequence.fail(error)
            if request.id is not None:
                ids.add(request.id)
            sequences.append(sequence)
        self._scheduler.submit([sequence for sequence in sequences if not sequence.done()])
        return sequences


def several(requests: Several[Request]) -> list[Request]:
    """The requests of one call; refuses an empty call and what is no list."""
    if not isinstance(requests, Several):
        raise TypeError(f"got {type(requests).__name__}, expected a list of Requests")
    if len(requests) == 0:
        raise ValueError("got an empty batch, expected at least one request")
    return list(requests)


def sampled(
    requests: Request | Several[Request],
    sampling: SamplingParams | Several[SamplingParams] | None,
    default: SamplingParams,
    keep_kv: bool | Several[bool],
) -> tuple[list[Request], list[Way]]:
    """Each request of a `generate` call with how it goes on."""
    asked = [requests] if isinstance(requests, Request) else several(requests)
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or default] * len(asked)
    if len(sampling) != len(asked):
        raise ValueError(f"got {len(sampling)} samplings, expected {len(asked)}, one per request")
    kept = [keep_kv] * len(asked) if isinstance(keep_kv, bool) else keep_kv
    return asked, [
        Way(sampling=params, keep_kv=keep) for params, keep in zip(sampling, kept, strict=True)
    ]
