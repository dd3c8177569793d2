"""What Prometheus reads: counts of what was asked and answered, and the engine as it is now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation
from ckv_jax.server.asked import Asked
from ckv_jax.server.behind import Behind
from ckv_jax.server.gate import Gate
from ckv_jax.server.shapes import cached_tokens

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/prefixes")
"""Routes that are counted by name; all others are "other"."""

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_MOST_BATCHES = 4096


class Metrics:
    """The registry of one application. Used in one event loop."""

    def __init__(self, engine: Engine, gate: Gate, behind: Behind) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(engine, gate, behind))
        self._batches: OrderedDict[int, None] = OrderedDict()
        self._requests = self._counter("requests", "Requests by route and status.", "route status")
        self._undelivered = self._counter("undelivered", "Answers whose client did not take them.")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._cached = self._counter("cached_tokens", "Prompt tokens that came from the store.")
        self._bytes = self._counter("read_bytes", "KV moved before first tokens.", "source")
        self._recomputed = self._counter(
            "recomputed_chunks", "Chunks that the store could not give, computed again."
        )
        self.ttft = self._histogram("time_to_first_token", "From arrival.", _TTFT)
        self.gap = self._histogram("token_gap", "Between two tokens of a text.", _GAP)
        self.queued = self._histogram(
            "queue", "From submission to the engine until computing began.", _TTFT
        )

    def answered(
        self,
        asked: Asked,
        generations: Mapping[int, Generation],
        *,
        begun: Collection[int],
        tokens: int,
    ) -> None:
        """One request is over, well or badly: `generations` that ended by choice, choices that
        had a first token, `tokens` of all texts. What a batch read is counted once, however many
        texts were in it; a prompt that led to no token is not counted."""
        for i, prompt in enumerate(asked.prompts):
            choices = range(i * asked.choices, (i + 1) * asked.choices)
            if any(choice in begun for choice in choices):
                self._prompt.inc(len(prompt.tokens))
                self._cached.inc(cached_tokens(prompt, generations.get(choices[0])))
        self._generated.inc(tokens)
        for generation in generations.values():
            self.queued.observe(generation.queued_ms / 1e3)
            trace = generation.trace
            if trace.start_ns in self._batches:
                continue
            self._batches[trace.start_ns] = None
            if len(self._batches) > _MOST_BATCHES:
                self._batches.popitem(last=False)
            for source in ("ssd", "host", "device"):
                self._bytes.labels(source).inc(trace.bytes[source])
            self._recomputed.inc(trace.counters.get("recomputed_chunks", 0))

    def replied(self, path: str, status: int, *, delivered: bool) -> None:
        """A request of any kind has been replied to."""
        route = next((r for r in ROUTES if path == r or path.startswith(f"{r}/")), "other")
        self._requests.labels(route, str(status)).inc()
        if not delivered:
            self._undelivered.inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, labels: str = "") -> Counter:
        return Counter(f"ckv_{name}", what, labels.split(), registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"ckv_{name}_seconds", what, buckets=buckets, registry=self._registry)


class _Now(Collector):
    """What is read off the engine, the store and the gate when somebody looks."""

    def __init__(self, engine: Engine, gate: Gate, behind: Behind) -> None:
        self._engine = engine
        self._gate = gate
        self._behind = behind

    def collect(self) -> Iterator[Metric]:
        stats, behind = self._engine.stats(), self._behind
        config = self._engine.config
        layout = self._engine.layout
        capacity = config.device_cache_bytes + config.prefetch_device_bytes
        waiting = max(0, self._gate.inside - stats.running)
        usage = min(1.0, stats.pinned_packs * layout.pack_bytes / capacity)
        yield _gauge("ckv_requests_waiting", "Texts accepted, not running yet.", waiting)
        yield _gauge("ckv_requests_running", "Texts between two tokens.", stats.running)
        yield _gauge("ckv_jobs", "Long jobs queued or under way.", stats.jobs)
        yield _gauge("ckv_kv_cache_usage_ratio", "Share of the pool that texts hold.", usage)
        # By the names that the Gateway API Inference Extension looks for without being told.
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
        for tier, count in (
            ("device", stats.device_hits), ("host", stats.host_hits), ("ssd", stats.misses)
        ):  # fmt: skip
            packs.add_metric([tier], count)
        yield packs
        yield _count("ckv_bad_packs", "Packs that were read and not good.", stats.bad_reads)
        yield _count("ckv_read_errors", "Reads that failed or came too late.", stats.read_errors)
        yield _count("ckv_quarantined_chunks", "Chunks put aside as damaged.", stats.quarantined)
        yield from self._store()
        yield _count("ckv_stored_turns", "Turns written behind answers.", behind.stored_turns)
        yield _count("ckv_stored_tokens", "Tokens of theirs.", behind.stored_tokens)
        yield _count("ckv_not_stored_errors", "Turns whose writing failed.", behind.failed)
        skipped = CounterMetricFamily("ckv_not_stored", "Turns passed over.", labels=["reason"])
        for reason, count in list(behind.skipped.items()):
            skipped.add_metric([reason], count)
        yield skipped
        slow = behind.pace.slow_disk
        yield _gauge("ckv_disk_slower_than_computing", "1: turns are not written.", float(slow))

    def _store(self) -> Iterator[Metric]:
        told = self._engine.store.stats()
        evicted = CounterMetricFamily("ckv_evicted_segments", "By reason.", labels=["reason"])
        for reason in ("room", "expired", "pruned", "deleted"):
            evicted.add_metric([reason], told[f"evicted_{reason}"])
        yield evicted
        yield _count("ckv_lookups_unread", "Lookups that the disk did not answer.", told["unread"])
        try:
            used = self._engine.store.usage()
        except CkvError:
            return  # it cannot be told just now; a wrong figure would be worse than none
        yield _gauge("ckv_store_bytes", "Bytes of the store on disk.", used)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def _count(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)
