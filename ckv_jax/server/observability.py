"""The log and the spans of requests: when they arrived, what they read, and how they ended.

The log is one JSON object per line on stderr, without any text of a client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckv_jax.request import Generation, TokenEvent
from ckv_jax.server.http import draining
from ckv_jax.server.metrics import Metrics
from ckv_jax.server.schema import ParsedRequest
from ckv_jax.trace import STAGES

_log = logging.getLogger("ckv_jax.server")
_NOT_LOGGED = frozenset(("/health", "/ready", "/metrics"))
_LONGEST_PATH = 200
_MOST_STAGES = 200  # spans of one generation's prefill


# -- log -------------------------------------------------------------------------------------------


def log_event(name: str, **fields: Any) -> None:
    """Logs an event of the server."""
    _log.info(name, extra={"fields": fields})


class RequestRecord:
    """The log line of one request; routes find it as `request.state.record`."""

    def __init__(self, path: str) -> None:
        self.id = f"req-{secrets.token_hex(8)}"
        self.path = path[:_LONGEST_PATH]
        self.fields: dict[str, Any] = {}
        self.status = 0
        self.undelivered: str | None = None
        """Why the answer did not reach the client."""
        self.began_ns = time.perf_counter_ns()

    def describe(self, request: ParsedRequest) -> None:
        """Adds the sizes of a request that was parsed."""
        self.fields |= {
            "model": request.model,
            "texts": request.num_generations,
            "prompt_tokens": request.prompt_tokens,
            "stored_tokens": sum(prompt.prefix.num_tokens for prompt in request.prompts),
            "budget": request.budget,
        }

    def write(self) -> None:
        """Logs the request, which is over."""
        seconds = round((time.perf_counter_ns() - self.began_ns) / 1e9, 4)
        fields = dict(self.fields)
        if self.undelivered is not None:
            fields["undelivered"] = self.undelivered
        log_event(
            "request", id=self.id, path=self.path, status=self.status, seconds=seconds, **fields
        )


def log_requests(app: ASGIApp, *, ended: Callable[[RequestRecord], None]) -> ASGIApp:
    """ASGI middleware that gives every request an id and a record, which is logged at its end.

    `ended` receives each record as well.
    """

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _NOT_LOGGED:
            await app(scope, receive, send)
            return
        record = RequestRecord(scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = message.get("headers", [])
                message["headers"] = [*headers, (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends
            if not record.status:
                await draining().response()(scope, receive, send_with_id)
        finally:
            record.write()
            ended(record)

    return logged


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def log_to_stderr() -> None:
    """Sends the log of the server, and warnings of uvicorn, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    for name, level in (("ckv_jax", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


# -- one request -----------------------------------------------------------------------------------


class RequestObserver:
    """Collects the times of one request, for the log, the metrics and the spans.

    Used in one event loop, from the request's arrival until all of its generations have ended.
    """

    def __init__(
        self, http: Request, record: RequestRecord, *, metrics: Metrics, tracer: Tracer
    ) -> None:
        self._http = http
        self._record = record
        self._metrics = metrics
        self._tracer = tracer
        self._submitted_ns = record.began_ns
        self._latest_ns: dict[int, int] = {}
        self._tokens = 0
        self._generations: dict[int, Generation] = {}

    def submitted(self, request: ParsedRequest) -> None:
        """Notes that the engine has the request from now on."""
        self._submitted_ns = time.perf_counter_ns()
        self._record.describe(request)

    async def observe(self, events: AsyncIterator[TokenEvent]) -> AsyncIterator[TokenEvent]:
        """Passes on the events of the request."""
        async for event in events:
            if event.token_id is not None:
                self._token(event.index)
            if event.generation is not None and event.generation.error is None:
                self._generations[event.index] = event.generation
            yield event

    def _token(self, choice: int) -> None:
        now, before = time.perf_counter_ns(), self._latest_ns.get(choice)
        self._latest_ns[choice] = now
        self._tokens += 1
        if before is None:
            self._metrics.ttft.observe((now - self._record.began_ns) / 1e9)
        else:
            self._metrics.gap.observe((now - before) / 1e9)

    @contextmanager
    def reporting(self, request: ParsedRequest) -> Iterator[None]:
        """Reports the request to metrics and spans when the block ends, with success or not."""
        cause: str | None = None
        try:
            yield
        except BaseException as error:
            cause = type(error).__name__
            raise
        finally:
            self._metrics.answered(
                request, self._generations, started=self._latest_ns, tokens=self._tokens
            )
            record_spans(
                self._tracer,
                self._http,
                request,
                self._generations,
                error=cause,
                arrived_ns=self._record.began_ns,
                submitted_ns=self._submitted_ns,
            )


# -- spans -----------------------------------------------------------------------------------------


def record_spans(
    tracer: Tracer,
    http: Request,
    request: ParsedRequest,
    generations: Mapping[int, Generation],
    *,
    error: str | None,
    arrived_ns: int,
    submitted_ns: int,
) -> None:
    """Records the OpenTelemetry spans of one request, from times that were measured anyway.

    Each generation has the spans `prepare`, `queue` and `prefill`, which follow one another and sum
    to its time to first token, and `decode`; `prefill` contains its stages.

    Args:
        http: a `traceparent` in its headers is the parent.
        generations: those that ended, by choice.
        error: what ended the request early.
        arrived_ns, submitted_ns: as `time.perf_counter_ns`.
    """
    epoch = time.time_ns() - time.perf_counter_ns()
    root = tracer.start_span(
        f"POST {http.url.path}",
        context=propagate.extract(http.headers),
        kind=SpanKind.SERVER,
        start_time=epoch + arrived_ns,
        attributes={
            "ckv.model": request.model,
            "ckv.budget": request.budget,
            "ckv.texts": request.num_generations,
            "ckv.prompt_tokens": request.prompt_tokens,
        },
    )
    if root.is_recording():
        for choice, generation in generations.items():
            times = (epoch + arrived_ns, epoch + submitted_ns)
            _generation_spans(tracer, root, f"text {choice}", generation, epoch, times)
        if error is not None:
            root.set_status(Status(StatusCode.ERROR, error))
    root.end()


def _generation_spans(
    tracer: Tracer,
    root: Span,
    name: str,
    generation: Generation,
    epoch: int,
    before: tuple[int, int],
) -> None:
    """Spans of one generation; `epoch` is added to its times, and is in those `before` it."""
    measured = generation.trace
    answer = generation.completion()
    began = epoch + measured.start_ns
    first = began if measured.end_ns is None else epoch + measured.end_ns
    end = first + int(generation.decode_ms * 1e6)

    def child(
        parent: Span, name: str, start: int, end: int, attributes: Mapping[str, float] | None = None
    ) -> Span:
        context = trace.set_span_in_context(parent)
        span = tracer.start_span(name, context=context, start_time=start, attributes=attributes)
        span.end(end)
        return span

    whole = child(
        root,
        name,
        before[0],
        end,
        {
            "ckv.ttft_ms": (first - before[0]) / 1e6,
            "ckv.prefix_tokens": answer.prefix.num_tokens,
            "ckv.generated_tokens": len(answer.token_ids),
            "ckv.ssd_bytes": measured.of(answer.prefix.id, "ssd"),
            "ckv.attention_covered": measured.attention_mass,
            "ckv.chunks_recomputed": measured.of(answer.prefix.id, "recomputed_chunks"),
        },
    )
    child(whole, "prepare", before[0], max(before))
    child(whole, "queue", before[1], max(before[1], began))
    prefill = child(whole, "prefill", began, max(began, first))
    stages = [span for span in measured.spans if span.name in STAGES]
    for stage in stages[:_MOST_STAGES]:
        start_ns = max(epoch + stage.start_ns, began)
        end_ns = min(epoch + stage.end_ns, first)
        if end_ns > start_ns:
            child(prefill, stage.name, start_ns, end_ns)
    child(whole, "decode", first, end)
