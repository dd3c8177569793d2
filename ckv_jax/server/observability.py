"""Prometheus metrics, the log of requests, and their OpenTelemetry spans.

The log is one JSON object per line on stderr. It never contains a client's text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation, TokenEvent
from ckv_jax.server.formats import cached_tokens
from ckv_jax.server.http import draining
from ckv_jax.server.parser import ParsedRequest
from ckv_jax.server.tenants import RequestLimiter
from ckv_jax.server.write_behind import WriteBehind
from ckv_jax.trace import STAGES, Trace

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/prefixes")
"""Routes that are counted by name; all others are "other"."""

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_MOST_BATCHES = 4096
_LATEST = 64  # generations in `Metrics.breakdown_ms`
_log = logging.getLogger("ckv_jax.server")
_NOT_LOGGED = frozenset(("/health", "/ready", "/metrics"))
_LONGEST_PATH = 200
_MOST_STAGES = 200  # spans of one generation's prefill


# -- metrics ---------------------------------------------------------------------------------------


class Metrics(Collector):
    """The metrics of one application. Used in one event loop; another thread may call `text` and
    `collect`."""

    def __init__(self, engine: Engine, limiter: RequestLimiter, write_behind: WriteBehind) -> None:
        self._engine = engine
        self._limiter = limiter
        self._write_behind = write_behind
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._batches: OrderedDict[int, None] = OrderedDict()
        self._latest: deque[tuple[float, Trace]] = deque(maxlen=_LATEST)
        self._requests = self._counter("requests", "Requests by route and status.", "route status")
        self._undelivered = self._counter("undelivered", "Answers that did not reach their client.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._generated = self._counter("generated_tokens", "Generated tokens.")
        self._cached = self._counter("cached_tokens", "Prompt tokens whose KV came from the store.")
        self._bytes = self._counter(
            "read_bytes", "Bytes of KV moved before first tokens, by source.", "source"
        )
        self._recomputed = self._counter(
            "recomputed_chunks", "Chunks that could not be read and were recomputed."
        )
        self.ttft = self._histogram(
            "time_to_first_token", "Time from arrival to first token.", _TTFT
        )
        self.gap = self._histogram("token_gap", "Time between two tokens of a generation.", _GAP)
        self.queued = self._histogram(
            "queue", "Time from submission to the engine to the start of computing.", _TTFT
        )

    def answered(
        self,
        request: ParsedRequest,
        generations: Mapping[int, Generation],
        *,
        started: Collection[int],
        tokens: int,
    ) -> None:
        """Counts one request that has ended, with success or not.

        Reads of a batch are counted once, however many generations it had; a prompt without any
        generated token is not counted.

        Args:
            generations: those that ended, by choice.
            started: choices that had a first token.
            tokens: generated tokens of all choices.
        """
        for i, prompt in enumerate(request.prompts):
            choices = range(i * request.choices, (i + 1) * request.choices)
            if any(choice in started for choice in choices):
                self._prompt.inc(request.document_tokens + len(prompt.tokens))
                self._cached.inc(cached_tokens(request, i, generations.get(choices[0])))
        self._generated.inc(tokens)
        for generation in generations.values():
            measured = generation.trace
            self._latest.append((generation.queued_ms, measured))
            self.queued.observe(generation.queued_ms / 1e3)
            if measured.start_ns in self._batches:
                continue
            self._batches[measured.start_ns] = None
            if len(self._batches) > _MOST_BATCHES:
                self._batches.popitem(last=False)
            for source in ("ssd", "host", "device"):
                self._bytes.labels(source).inc(measured.bytes[source])
            self._recomputed.inc(measured.counters.get("recomputed_chunks", 0))

    def replied(self, record: RequestRecord) -> None:
        """Counts a request of any kind, which is over."""
        path = record.path
        route = next((r for r in ROUTES if path == r or path.startswith(f"{r}/")), "other")
        self._requests.labels(route, str(record.status)).inc()
        if record.undelivered is not None:
            self._undelivered.inc()

    def text(self) -> bytes:
        """Formats all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def breakdown_ms(self) -> dict[str, float]:
        """Returns the mean milliseconds of each stage of the latest times to first token, and of
        queueing."""
        total: dict[str, float] = {}
        for queued, measured in self._latest:
            for stage, spent in {"queue": queued, **measured.breakdown_ms}.items():
                total[stage] = total.get(stage, 0.0) + spent
        return {stage: spent / len(self._latest) for stage, spent in total.items()}

    def collect(self) -> Iterator[Metric]:
        """Reads the state of the engine, the store and the queue."""
        stats, config, layout = self._engine.stats(), self._engine.config, self._engine.layout
        capacity = config.device_cache_bytes + config.prefetch_device_bytes
        waiting = max(0, self._limiter.under_way - stats.running)
        usage = min(1.0, stats.pinned_packs * layout.pack_bytes / capacity)
        yield _gauge("ckv_requests_waiting", "Admitted generations that wait to run.", waiting)
        yield _gauge("ckv_requests_running", "Running generations.", stats.running)
        yield _gauge("ckv_jobs", "Long jobs, queued or running.", stats.jobs)
        yield _gauge("ckv_kv_cache_usage_ratio", "Share of the device pool in use, 0 to 1.", usage)
        # Default names of the Gateway API Inference Extension.
        yield _gauge("vllm:num_requests_waiting", "Same as ckv_requests_waiting.", waiting)
        yield _gauge("vllm:num_requests_running", "Same as ckv_requests_running.", stats.running)
        yield _gauge("vllm:kv_cache_usage_perc", "Same as ckv_kv_cache_usage_ratio.", usage)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Tokens of a chunk, and chunks that fit in the device pool.",
            labels=["block_size", "num_gpu_blocks"],
        )
        blocks = capacity // (layout.pack_bytes * layout.groups)
        info.add_metric([str(layout.chunk_tokens), str(blocks)], 1)
        yield info
        used = {"device": stats.device_hits, "host": stats.host_hits, "ssd": stats.misses}
        yield _counts("ckv_packs", "Packs that selections used, by tier.", "tier", used)
        yield _count("ckv_bad_packs", "Packs that failed their checks.", stats.bad_reads)
        yield _count(
            "ckv_read_errors", "Reads that failed or missed their deadline.", stats.read_errors
        )
        yield _count("ckv_quarantined_chunks", "Chunks quarantined as damaged.", stats.quarantined)
        yield from self._store_metrics()
        written = self._write_behind
        yield _count("ckv_stored_turns", "Turns stored after their answers.", written.stored_turns)
        yield _count("ckv_stored_tokens", "Tokens of stored turns.", written.stored_tokens)
        yield _count("ckv_not_stored_errors", "Turns whose write failed.", written.failed)
        skipped = dict(written.skipped)
        yield _counts("ckv_not_stored", "Turns that were not stored, by reason.", "reason", skipped)
        slow = float(written.cost.slow_disk)
        yield _gauge(
            "ckv_disk_slower_than_computing",
            "1 while turns are skipped because writing takes longer than computing, else 0.",
            slow,
        )

    def _store_metrics(self) -> Iterator[Metric]:
        stats = self._engine.store.stats()
        reasons = ("room", "expired", "pruned", "deleted")
        evicted = {reason: stats[f"evicted_{reason}"] for reason in reasons}
        yield _counts("ckv_evicted_segments", "Evicted segments, by reason.", "reason", evicted)
        yield _count("ckv_lookups_unread", "Lookups that the disk did not answer.", stats["unread"])
        try:
            used = self._engine.store.usage()
        except CkvError:
            return  # unknown now: no figure is better than a wrong one
        yield _gauge("ckv_store_bytes", "Bytes of the store on disk.", used)

    def _counter(self, name: str, help: str, labels: str = "") -> Counter:
        return Counter(f"ckv_{name}", help, labels.split(), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"ckv_{name}_seconds", help, buckets=buckets, registry=self._registry)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _count(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=value)


def _counts(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, help, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


# -- log -------------------------------------------------------------------------------------------


def log_event(name: str, **fields: Any) -> None:
    """Logs an event of the server."""
    _log.info(name, extra={"fields": fields})


class RequestRecord:
    """The log line of one request, which routes read as `request.state.record`."""

    def __init__(self, path: str) -> None:
        self.id = f"req-{secrets.token_hex(8)}"
        self.path = path[:_LONGEST_PATH]
        self.fields: dict[str, Any] = {}
        self.status = 0
        self.undelivered: str | None = None
        """Why the answer did not reach the client."""
        self.began_ns = time.perf_counter_ns()

    def describe(self, request: ParsedRequest) -> None:
        """Adds the sizes of a parsed request."""
        self.fields |= {
            "model": request.model,
            "texts": request.num_generations,
            "prompt_tokens": request.prompt_tokens,
            "stored_tokens": sum(prompt.prefix.num_tokens for prompt in request.prompts),
            "budget": request.budget,
        }

    def write(self) -> None:
        """Logs the request, which has ended."""
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
    """Sends the server's log and uvicorn's warnings to stderr."""
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

    def __init__(self, http: Request, *, metrics: Metrics, tracer: Tracer) -> None:
        self._http = http
        self._record: RequestRecord = http.state.record
        self._metrics = metrics
        self._tracer = tracer
        self._submitted_ns = self._record.began_ns
        self._latest_ns: dict[int, int] = {}
        self._tokens = 0
        self._generations: dict[int, Generation] = {}

    def submitted(self, request: ParsedRequest) -> None:
        """Records the time at which the engine got the request."""
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
            self._record_spans(request, cause)

    def _record_spans(self, request: ParsedRequest, error: str | None) -> None:
        """Records the OpenTelemetry spans of the request, below the one in its headers.

        Each generation has the spans `prepare`, `queue` and `prefill`, which follow one another and
        sum to its time to first token, and `decode`; `prefill` contains its stages.
        """
        epoch = time.time_ns() - time.perf_counter_ns()
        root = self._tracer.start_span(
            f"POST {self._http.url.path}",
            context=propagate.extract(self._http.headers),
            kind=SpanKind.SERVER,
            start_time=epoch + self._record.began_ns,
            attributes={
                "ckv.model": request.model,
                "ckv.budget": request.budget,
                "ckv.texts": request.num_generations,
                "ckv.prompt_tokens": request.prompt_tokens,
            },
        )
        if root.is_recording():
            for choice, generation in self._generations.items():
                self._generation_spans(root, f"text {choice}", generation, epoch)
            if error is not None:
                root.set_status(Status(StatusCode.ERROR, error))
        root.end()

    def _generation_spans(self, root: Span, name: str, generation: Generation, epoch: int) -> None:
        """`epoch`: nanoseconds to add to times measured by `perf_counter_ns`."""
        measured = generation.trace
        answer = generation.completion()
        arrived, submitted = epoch + self._record.began_ns, epoch + self._submitted_ns
        began = epoch + measured.start_ns
        first = began if measured.end_ns is None else epoch + measured.end_ns
        end = first + int(generation.decode_ms * 1e6)
        attributes = {
            "ckv.ttft_ms": (first - arrived) / 1e6,
            "ckv.prefix_tokens": answer.prefix.num_tokens,
            "ckv.generated_tokens": len(answer.token_ids),
            "ckv.ssd_bytes": measured.of(answer.prefix.id, "ssd"),
            "ckv.attention_covered": measured.attention_mass,
            "ckv.chunks_recomputed": measured.of(answer.prefix.id, "recomputed_chunks"),
        }
        whole = self._child(root, name, arrived, end, attributes)
        self._child(whole, "prepare", arrived, max(arrived, submitted))
        self._child(whole, "queue", submitted, max(submitted, began))
        prefill = self._child(whole, "prefill", began, max(began, first))
        stages = [span for span in measured.spans if span.name in STAGES]
        for stage in stages[:_MOST_STAGES]:
            start_ns = max(epoch + stage.start_ns, began)
            end_ns = min(epoch + stage.end_ns, first)
            if end_ns > start_ns:
                self._child(prefill, stage.name, start_ns, end_ns)
        self._child(whole, "decode", first, end)

    def _child(
        self, parent: Span, name: str, start: int, end: int,
        attributes: Mapping[str, float] | None = None,
    ) -> Span:  # fmt: skip
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(
            name, context=context, start_time=start, attributes=attributes
        )
        span.end(end)
        return span
