"""Traces of requests (spans, counters, bytes) and statistics of an engine."""

from __future__ import annotations

import copy
import itertools
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

    from ckv_jax.serving.scheduler import Scheduler
    from ckv_jax.serving.worker import Worker
    from ckv_jax.storage.store import ChunkStore

MEANING = {
    "open": "finding and opening the prefix",
    "probe_io": "waiting for the keys to score",
    "select": "copying the selection to the host",
    "submit": "submitting reads of packs",
    "critical_io_wait": "waiting for packs",
    "dispatch": "dispatching calls to the device",
    "book": "recording what the cache holds",
    "compute": "waiting for the device",
    "other": "none of these",
}
"""Stages of the breakdown, and the engine thread's work in each."""

STAGES = tuple(name for name in MEANING if name != "other")
"""Span names of the breakdown. Spans of worker threads have other names."""


_BAR = 12  # with the longest meaning, a line of the breakdown fits 80 columns


class TraceSpan(NamedTuple):
    """One named interval in one lane, in nanoseconds of `time.perf_counter_ns`."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


RawSpan = tuple[str, str, int, int, dict[str, Any]]
"""A `TraceSpan`, cheaper to make."""
_END = attrgetter("end_ns")


class Trace:
    """Timeline, bytes and counters of one batch of requests, up to its first tokens.

    Any thread may record; a span costs under a microsecond. Lanes in use: "ssd" (reads, in worker
    threads), "stage" (host to device), "compute", "host" (the engine thread).

    Attributes:
        start_ns, end_ns: start of the batch and time of its first tokens, in nanoseconds of
            `time.perf_counter_ns` (`end_ns` is None until `end`).
        bytes: bytes moved, by source: "ssd", "host", "device"; "unused" is the part of "ssd" that
            was prefetched and not used.
        chunks: "selected" and "total", summed over periods.
        counters: all other counters, such as "demanded" and "covered" packs.
        prefixes: counters of single prefixes, by id; see `of`.
        period_attention_mass: for each period, the share of the probe's attention on the selected
            chunks, without those that are always kept.
        period_chunks: for each period, how many chunks (or tokens) one request selected; empty
            unless the trace is of one request.
        tokens: one `TokenTrace` for each generated token that selected.
        segments: how often generated tokens moved from the device to the store.
    """

    def __init__(self) -> None:
        self.start_ns = perf_counter_ns()
        self.end_ns: int | None = None
        self._spans: list[RawSpan] = []
        self.bytes: dict[str, int] = {"ssd": 0, "host": 0, "device": 0, "unused": 0}
        self.chunks: dict[str, int] = {"selected": 0, "total": 0}
        self.counters: dict[str, int] = {}
        self.prefixes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.period_attention_mass: list[float] = []
        self.period_chunks: list[int] = []
        self.tokens: list[TokenTrace] = []
        self.segments = 0
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, *, lane: str, **args: Any) -> Iterator[None]:
        """Records the `with` block: `with trace.span("select", lane="host", period=0): ...`."""
        start = perf_counter_ns()
        try:
            yield
        finally:
            self._spans.append((name, lane, start, perf_counter_ns(), args))

    def add(self, name: str, lane: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Records a finished span; times are those of `time.perf_counter_ns`."""
        self._spans.append((name, lane, start_ns, end_ns, args))

    def extend(self, spans: Iterable[RawSpan]) -> None:
        """Records several finished spans in one call."""
        self._spans.extend(spans)

    def count(self, name: str, n: int, *, prefix: str | None = None) -> None:
        """Adds `n` to a counter, and to the same counter of the prefix with id `prefix`."""
        with self._lock:
            self.counters[name] = self.counters.get(name, 0) + n
            if prefix is not None:
                self.prefixes[prefix][name] += n

    def count_bytes(self, source: str, n: int, *, prefix: str | None = None) -> None:
        """Adds `n` bytes moved from a source, and to those of the prefix with id `prefix`."""
        with self._lock:
            self.bytes[source] += n
            if prefix is not None:
                self.prefixes[prefix][source] += n

    def of(self, prefix: str, name: str) -> int:
        """Returns a counter of one prefix of the batch, by its id: bytes from "ssd", or
        "recomputed_chunks"."""
        return self.prefixes[prefix][name] if prefix in self.prefixes else 0

    def count_chunks(self, *, selected: int, total: int) -> None:
        """Adds one period's selection."""
        with self._lock:
            self.chunks["selected"] += selected
            self.chunks["total"] += total

    def share(
        self, *, selected: Iterable[int], total: int, attention_mass: Iterable[float]
    ) -> Trace:
        """Copies the trace for one request of the batch, with the request's own selection."""
        own = copy.copy(self)
        own.period_chunks = list(selected)
        own.chunks = {"selected": sum(own.period_chunks), "total": total}
        own.period_attention_mass = list(attention_mass)
        own.tokens = []
        return own

    def end(self) -> None:
        """Marks the time of the first token. Later calls have no effect."""
        if self.end_ns is None:
            self.end_ns = perf_counter_ns()

    @property
    def spans(self) -> list[TraceSpan]:
        """All spans so far, in the order in which they ended."""
        return sorted([TraceSpan(*raw) for raw in self._spans], key=_END)

    @property
    def ttft_ms(self) -> float:
        """Time to first token in ms; until `end`, the time so far."""
        end = perf_counter_ns() if self.end_ns is None else self.end_ns
        return (end - self.start_ns) / 1e6

    @property
    def breakdown_ms(self) -> dict[str, float]:
        """`STAGES` and "other", in ms; they add up to the time to first token.

        Where such spans overlap, the time counts for the one that began last.
        """
        end = perf_counter_ns() if self.end_ns is None else self.end_ns
        parts = dict.fromkeys(STAGES, 0)
        mine = [span for span in self.spans if span.name in parts]
        edges = sorted({t for s in mine for t in (s.start_ns, s.end_ns)} | {self.start_ns, end})
        mine.sort(key=lambda span: span.start_ns)
        opened: list[TraceSpan] = []
        following = 0
        for left, right in itertools.pairwise(edges):
            while following < len(mine) and mine[following].start_ns <= left:
                opened.append(mine[following])
                following += 1
            opened = [span for span in opened if span.end_ns > left]
            if opened and self.start_ns <= left and right <= end:
                parts[opened[-1].name] += right - left
        stages = {name: spent / 1e6 for name, spent in parts.items()}
        return stages | {"other": (end - self.start_ns - sum(parts.values())) / 1e6}

    @property
    def attention_mass(self) -> float:
        """Mean of `period_attention_mass`; 1.0 where nothing was left out by a selection."""
        masses = self.period_attention_mass
        return sum(masses) / len(masses) if masses else 1.0

    @property
    def recomputed_chunks(self) -> int:
        """Chunks that could not be read and were recomputed."""
        return self.counters.get("recomputed_chunks", 0)

    @property
    def blended_tokens(self) -> int:
        """Tokens of `Request.documents` after the first whose stored KV was used, although it was
        computed without the documents before them; averaged over periods."""
        return self.counters.get("blended_tokens", 0)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of `Request.documents` that were recomputed at their new positions."""
        return self.counters.get("recomputed_tokens", 0)

    @property
    def compiled(self) -> int:
        """Programs that were compiled, or loaded from the compilation cache, for the first tokens;
        `ttft_ms` includes that time. 0 in a warm engine."""
        return self.counters.get("compiled", 0)

    def __str__(self) -> str:
        """Formats the time to first token, its longest stages and the bytes read as one line."""
        parts = sorted(self.breakdown_ms.items(), key=lambda part: -part[1])[:3]
        longest = ", ".join(f"{name} {spent:.1f}" for name, spent in parts)
        read = self.bytes["ssd"] / 1e6
        ahead = self.bytes["unused"] / 1e6
        unused = f", {ahead:.1f} of it prefetched and not used" if ahead else ""
        chunks = self.recomputed_chunks
        again = f"; {chunks} chunk{'' if chunks == 1 else 's'} recomputed" if chunks else ""
        if self.blended_tokens or self.recomputed_tokens:
            again += f"; {self.blended_tokens} tokens blended, {self.recomputed_tokens} recomputed"
        made = f"; programs compiled or loaded: {self.compiled}" if self.compiled else ""
        return (
            f"first token after {self.ttft_ms:.1f} ms ({longest}); {read:.1f} MB from SSD{unused}; "
            f"attention covered {self.attention_mass:.1%}{again}{made}"
        )

    @property
    def coverage(self) -> float:
        """Share of the demanded, uncached packs that a prefetch had already requested."""
        demanded = self.counters.get("demanded", 0)
        return self.counters.get("covered", 0) / demanded if demanded else 1.0

    @property
    def unused(self) -> float:
        """Share of the bytes read from SSD that were prefetched and not used."""
        return self.bytes["unused"] / self.bytes["ssd"] if self.bytes["ssd"] else 0.0

    @property
    def decode(self) -> dict[str, float]:
        """Means over `tokens`: shares of packs found on the device and in host memory, bytes from
        host memory and from SSD, attention mass, and times in ms; empty without tokens."""
        if not self.tokens:
            return {}
        n, size = len(self.tokens), self.tokens[0].pack_bytes
        device, host, ssd = (
            sum(getattr(token, name) for token in self.tokens)
            for name in ("device_hits", "host_hits", "ssd_reads")
        )
        packs = max(1, device + host + ssd)
        means = {
            name: sum(getattr(token, name) for token in self.tokens) / n
            for name in ("attention_mass", "select_ms", "fetch_ms", "ms")
        }
        return {
            "tokens": n,
            "device_hits": device / packs,
            "host_hits": host / packs,
            "host_bytes": host * size / n,
            "ssd_bytes": ssd * size / n,
            **means,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the spans as plain JSON values."""
        return {
            "ttft_ms": self.ttft_ms,
            "breakdown_ms": self.breakdown_ms,
            "bytes": dict(self.bytes),
            "chunks": dict(self.chunks),
            "counters": dict(self.counters),
            "attention_mass": self.attention_mass,
            "period_attention_mass": list(self.period_attention_mass),
            "coverage": self.coverage,
            "unused": self.unused,
            "decode": self.decode,
        }

    def breakdown_bar(self, console: Console) -> None:
        """Draws the breakdown as a bar chart in the terminal."""
        from rich.table import Table  # only the CLI needs rich

        parts = self.breakdown_ms
        total = self.ttft_ms
        meaning = MEANING | {"ttft": "time to first token"}
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, spent in [*parts.items(), ("ttft", total)]:
            filled = round(_BAR * spent / total) if total else 0
            bar = "" if name == "ttft" else "█" * filled
            style = "bold" if name == "ttft" else ""
            table.add_row(name, f"{spent:,.1f} ms", bar, f"[dim]{meaning[name]}[/dim]", style=style)
        console.print(table)


def perfetto(traces: Iterable[Trace]) -> dict[str, Any]:
    """Requests as one Chrome trace-event JSON object: a process each, a thread for each lane.

    Spans of a lane that overlap, such as concurrent reads, go to numbered lanes.
    """
    traces = list(traces)
    origin = min((trace.start_ns for trace in traces), default=0)
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, start=1):
        events.append(_metadata("process_name", pid, 0, f"request {pid}"))
        end = trace.start_ns + round(trace.ttft_ms * 1e6)
        whole = TraceSpan("ttft", "request", trace.start_ns, end, trace.to_json())
        rows = _rows([whole, *trace.spans])
        for tid, (name, spans) in enumerate(rows.items(), start=1):
            events.append(_metadata("thread_name", pid, tid, name))
            order = {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid}
            events.append(order | {"args": {"sort_index": tid}})
            events.extend(
                {
                    "name": span.name,
                    "cat": span.lane,
                    "ph": "X",
                    "ts": (span.start_ns - origin) / 1e3,
                    "dur": max(0, span.end_ns - span.start_ns) / 1e3,
                    "pid": pid,
                    "tid": tid,
                    "args": dict(span.args),
                }
                for span in spans
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(path: str | os.PathLike[str], traces: Iterable[Trace]) -> None:
    """Writes `perfetto(traces)` to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(perfetto(traces), file, default=str)


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _rows(spans: list[TraceSpan]) -> dict[str, list[TraceSpan]]:
    """Spans by lane, split so that none of a row overlap: "ssd", "ssd 2", "ssd 3" ..."""
    lanes: dict[str, list[list[TraceSpan]]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        rows = lanes.setdefault(span.lane, [])
        for row in rows:
            if row[-1].end_ns <= span.start_ns:
                row.append(span)
                break
        else:
            rows.append([span])
    return {
        lane if index == 0 else f"{lane} {index + 1}": row
        for lane, rows in lanes.items()
        for index, row in enumerate(rows)
    }


@dataclass(slots=True, kw_only=True)
class TokenTrace:
    """Pack sources and times of one token of a generation under a budget below 1.

    Packs are those of the sequence's own windows; times are those of the batch.
    """

    device_hits: int = 0
    """Packs found in device slots, of the window or cached."""
    host_hits: int = 0
    """Packs that came from host memory."""
    ssd_reads: int = 0
    """Packs that came from SSD, prefetched or on demand."""
    recomputed: int = 0
    """Packs of the batch that could not be read and were recomputed."""
    ahead: int = 0
    """Packs of the batch whose prefetch had ended or was running when they were selected."""
    unused: int = 0
    """Packs of the batch that were prefetched and dropped, because no selection used them."""
    pack_bytes: int = 0
    """Bytes of one pack on disk, averaged over layer groups."""
    attention_mass: float = 1.0
    """Share of the probe's attention on the selected chunks, averaged over periods, when they were
    selected."""
    select_ms: float = 0.0
    """Milliseconds of waiting for selections, after the layers before them were computed."""
    fetch_ms: float = 0.0
    """Milliseconds of waiting for packs, where some row selects."""
    ms: float = 0.0
    """Milliseconds from the dispatch of the token's first call until the token was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Snapshot of an engine's state; its counters start at 0 when the engine starts.

    Attributes:
        device_hits, host_hits, misses: packs that selections used, by the tier they were found in.
        device_packs, host_packs: packs cached now.
        device_bytes, host_bytes: bytes of these packs.
        digest_bytes: bytes of the digests resident now.
        pinned_packs: device packs pinned by running sequences.
        reads, bad_reads, read_errors: packs read from the store, packs that failed their checks,
            and reads that failed or missed their deadline.
        quarantined: chunks that the store quarantined as damaged since it was opened.
        queue, running, jobs: sequences waiting, sequences between two tokens, long jobs.
        programs: compiled programs in memory.
    """

    device_hits: int
    host_hits: int
    misses: int
    device_packs: int
    host_packs: int
    device_bytes: int
    host_bytes: int
    digest_bytes: int
    pinned_packs: int
    reads: int
    bad_reads: int
    read_errors: int
    quarantined: int
    queue: int
    running: int
    jobs: int
    programs: int

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as plain JSON values."""
        return asdict(self)


def stats_of(worker: Worker, scheduler: Scheduler, store: ChunkStore) -> EngineStats:
    """Takes a snapshot of one engine's parts, at about one moment."""
    tiers, reads = worker.memory.tiers, worker.prefetcher.stats
    pack = worker.memory.host.pack_bytes
    return EngineStats(
        device_hits=tiers.stats.device_hits,
        host_hits=tiers.stats.host_hits,
        misses=tiers.stats.misses,
        device_packs=tiers.device_pages,
        host_packs=tiers.host_pages,
        device_bytes=tiers.device_pages * pack,
        host_bytes=tiers.host_pages * pack,
        digest_bytes=worker.prefixes.digest_bytes,
        pinned_packs=tiers.pinned_slots,
        reads=reads.packs,
        bad_reads=reads.bad_packs,
        read_errors=reads.errors,
        quarantined=store.stats()["quarantined"],
        queue=scheduler.waiting,
        running=scheduler.running,
        jobs=scheduler.jobs,
        programs=len(worker.layers.programs),
    )
