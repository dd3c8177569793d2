"""Prometheus metrics: counts of requests and tokens, and the present state of the engine."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation
from ckv_jax.server.formats import cached_tokens
from ckv_jax.server.schema import ParsedRequest
from ckv_jax.server.tenants import Admission
from ckv_jax.server.write_behind import WriteBehind
from ckv_jax.trace import Trace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/prefixes")
"""Routes that are counted by name; all others are "other"."""

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_MOST_BATCHES = 4096
_LATEST = 64  # generations in `Metrics.breakdown_ms`


class Metrics(Collector):
    """The metrics of one application. Used in one event loop."""

    def __init__(self, engine: Engine, admission: Admission, write_behind: WriteBehind) -> None:
        self._engine = engine
        self._admission = admission
        self._write_behind = write_behind
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._batches: OrderedDict[int, None] = OrderedDict()
        self._latest: deque[tuple[float, Trace]] = deque(maxlen=_LATEST)
        self._requests = self._counter("requests", "Requests by route and status.", "route status")
        self._undelivered = self._counter("undelivered", "Answers that did not reach their client.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._cached = self._counter("cached_tokens", "Prompt tokens whose KV came from the store.")
        self._bytes = self._counter("read_bytes", "KV moved before first tokens.", "source")
        self._recomputed = self._counter(
            "recomputed_chunks", "Chunks that could not be read and were computed again."
        )
        self.ttft = self._histogram("time_to_first_token", "From arrival.", _TTFT)
        self.gap = self._histogram("token_gap", "Between two tokens of a generation.", _GAP)
        self.queued = self._histogram(
            "queue", "From submission to the engine until computing began.", _TTFT
        )

    def answered(
        self,
        request: ParsedRequest,
        generations: Mapping[int, Generation],
        *,
        started: Collection[int],
        tokens: int,
    ) -> None:
        """Counts one request that is over, with success or not.

        Reads of a batch are counted once, however many generations were in it; a prompt that led to
        no token is not counted.

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
            trace = generation.trace
            self._latest.append((generation.queued_ms, trace))
            self.queued.observe(generation.queued_ms / 1e3)
            if trace.start_ns in self._batches:
                continue
            self._batches[trace.start_ns] = None
            if len(self._batches) > _MOST_BATCHES:
                self._batches.popitem(last=False)
            for source in ("ssd", "host", "device"):
                self._bytes.labels(source).inc(trace.bytes[source])
            self._recomputed.inc(trace.counters.get("recomputed_chunks", 0))

    def replied(self, path: str, status: int, *, delivered: bool) -> None:
        """Counts the response to a request of any kind."""
        route = next((r for r in ROUTES if path == r or path.startswith(f"{r}/")), "other")
        self._requests.labels(route, str(status)).inc()
        if not delivered:
            self._undelivered.inc()

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def breakdown_ms(self) -> dict[str, float]:
        """Mean milliseconds of each stage of the latest times to first token, queueing included."""
        total: dict[str, float] = {}
        for queued, trace in self._latest:
            for stage, spent in {"queue": queued, **trace.breakdown_ms}.items():
                total[stage] = total.get(stage, 0.0) + spent
        return {stage: spent / len(self._latest) for stage, spent in total.items()}

    def collect(self) -> Iterator[Metric]:
        """Reads the state of the engine, the store and the queue."""
        stats, config, layout = self._engine.stats(), self._engine.config, self._engine.layout
        capacity = config.device_cache_bytes + config.prefetch_device_bytes
        waiting = max(0, self._admission.under_way - stats.running)
        usage = min(1.0, stats.pinned_packs * layout.pack_bytes / capacity)
        yield _gauge("ckv_requests_waiting", "Generations admitted, not running yet.", waiting)
        yield _gauge("ckv_requests_running", "Generations between two tokens.", stats.running)
        yield _gauge("ckv_jobs", "Long jobs queued or under way.", stats.jobs)
        yield _gauge("ckv_kv_cache_usage_ratio", "Share of the pool in use.", usage)
        # By the names that the Gateway API Inference Extension looks for by default.
        yield _gauge("vllm:num_requests_waiting", "As ckv_requests_waiting.", waiting)
        yield _gauge("vllm:num_requests_running", "As ckv_requests_running.", stats.running)
        yield _gauge("vllm:kv_cache_usage_perc", "As ckv_kv_cache_usage_ratio.", usage)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Chunks.", labels=["block_size", "num_gpu_blocks"]
        )
        blocks = capacity // (layout.pack_bytes * layout.groups)
        info.add_metric([str(layout.chunk_tokens), str(blocks)], 1)
        yield info
        packs = CounterMetricFamily("ckv_packs", "Packs used, by tier.", labels=["tier"])
        used = {"device": stats.device_hits, "host": stats.host_hits, "ssd": stats.misses}
        for tier, count in used.items():
            packs.add_metric([tier], count)
        yield packs
        yield _count("ckv_bad_packs", "Packs that failed their checks.", stats.bad_reads)
        yield _count(
            "ckv_read_errors", "Reads that failed or missed their deadline.", stats.read_errors
        )
        yield _count("ckv_quarantined_chunks", "Chunks quarantined as damaged.", stats.quarantined)
        yield from self._store_metrics()
        written = self._write_behind
        yield _count("ckv_stored_turns", "Turns stored after answers.", written.stored_turns)
        yield _count("ckv_stored_tokens", "Tokens of these turns.", written.stored_tokens)
        yield _count("ckv_not_stored_errors", "Turns whose writing failed.", written.failed)
        skipped = CounterMetricFamily("ckv_not_stored", "Turns skipped.", labels=["reason"])
        for reason, count in list(written.skipped.items()):
            skipped.add_metric([reason], count)
        yield skipped
        slow = float(written.cost.slow_disk)
        yield _gauge("ckv_disk_slower_than_computing", "1: turns are not written.", slow)

    def _store_metrics(self) -> Iterator[Metric]:
        stats = self._engine.store.stats()
        evicted = CounterMetricFamily("ckv_evicted_segments", "By reason.", labels=["reason"])
        for reason in ("room", "expired", "pruned", "deleted"):
            evicted.add_metric([reason], stats[f"evicted_{reason}"])
        yield evicted
        yield _count("ckv_lookups_unread", "Lookups that the disk did not answer.", stats["unread"])
        try:
            used = self._engine.store.usage()
        except CkvError:
            return  # unknown just now: no figure is better than a wrong one
        yield _gauge("ckv_store_bytes", "Bytes of the store on disk.", used)

    def _counter(self, name: str, help: str, labels: str = "") -> Counter:
        return Counter(f"ckv_{name}", help, labels.split(), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"ckv_{name}_seconds", help, buckets=buckets, registry=self._registry)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _count(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=value)
