"""One request, as the log, the metrics, the spans and the status page are told of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from ckv_jax.request import Generation
from ckv_jax.server.asked import Asked
from ckv_jax.server.latest import Latest
from ckv_jax.server.log import Record
from ckv_jax.server.metrics import Metrics
from ckv_jax.server.spans import Spans


class Watch:
    """Used in one event loop, from a request's arrival until all of its texts have ended."""

    def __init__(
        self, http: Request, record: Record, *, metrics: Metrics, spans: Spans, latest: Latest
    ) -> None:
        self._http = http
        self._record = record
        self._metrics = metrics
        self._spans = spans
        self._latest = latest
        self._submitted_ns = record.began_ns
        self._tokens_ns: dict[int, int] = {}
        self._tokens = 0
        self._ended: dict[int, Generation] = {}

    def submitted(self, asked: Asked) -> None:
        """It goes to the engine."""
        self._submitted_ns = time.perf_counter_ns()
        self._record.asked(asked)

    def token(self, choice: int) -> None:
        """One of its texts has one more token."""
        now, before = time.perf_counter_ns(), self._tokens_ns.get(choice)
        self._tokens_ns[choice] = now
        self._tokens += 1
        if before is None:
            self._metrics.ttft.observe((now - self._record.began_ns) / 1e9)
        else:
            self._metrics.gap.observe((now - before) / 1e9)

    def ended(self, choice: int, generation: Generation) -> None:
        """One of its texts has ended, well or badly."""
        if generation.error is None:
            self._ended[choice] = generation

    @contextmanager
    def over(self, asked: Asked) -> Iterator[None]:
        """Around all of it: however it ends, what is known by then is told."""
        why: str | None = None
        try:
            yield
        except BaseException as error:
            why = type(error).__name__
            raise
        finally:
            self._over(asked, why)

    def _over(self, asked: Asked, why: str | None) -> None:
        self._metrics.answered(asked, self._ended, begun=self._tokens_ns, tokens=self._tokens)
        for generation in self._ended.values():
            self._latest.add(generation.queued_ms, generation.trace)
        self._spans.answered(
            self._http.url.path,
            self._http.headers,
            asked,
            self._ended,
            why=why,
            arrived_ns=self._record.began_ns,
            submitted_ns=self._submitted_ns,
        )
