"""One request as numbers: time, bytes, tokens and amplification, all from its own trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import jax

from bench.common import Json, median_interval, summary
from bench.disk import Disk
from bench.lab import Lab
from ckv_jax import Engine, Result
from ckv_jax.storage.layout import Layout

PROBE_BLOCK = 1 << 20
"""Block size at which the disk is asked for its bandwidth on sequential probe reads."""

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """How many programs JAX compiles from here on, those that came from a cache on disk included.

    A context manager.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: object) -> None:
        self.count += event == _COMPILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one request did."""

    ttft_ms: float
    """Wall clock, from submission to answer."""
    breakdown_ms: dict[str, float]
    pack_bytes: int
    """Of packs read from SSD, speculated ones included."""
    probe_bytes: int
    """Of probe keys read from SSD."""
    unused_bytes: int
    """Of packs that were read ahead and not used."""
    needed_bytes: int
    """Of those pack bytes, what the attention then used."""
    device_bytes: int
    """Of packs and pages of probe keys found in the device pool."""
    host_bytes: int
    """Of packs and pages of probe keys found in the host pool."""
    coverage: float
    fell_back: int
    """Layers in which IMPRESS loaded all keys."""
    attention_mass: float
    jobs: int
    """Reads that the engine took packs from."""
    stage_ms: float
    """Engine thread's time to start their copies to the device."""

    @classmethod
    def of(cls, elapsed_ms: float, result: Result, layout: Layout, *, chunked: bool) -> Sample:
        """From a result over a prefix of `layout`. `chunked`: whole chunks take part."""
        trace = result.trace
        reads = [span.args["bytes"] for span in trace.spans if span.name == "pack_read"]
        copies = [s.end_ns - s.start_ns for s in trace.spans if s.name == "stage"]
        packs, unused = sum(reads), trace.bytes["unused"]
        token = layout.num_kv_heads * layout.head_dim * layout.numpy_dtype.itemsize
        needed = packs - unused
        if not chunked and "ssd_tokens_needed" in trace.counters:
            needed = trace.counters["ssd_tokens_needed"] * token
        return cls(
            ttft_ms=elapsed_ms,
            breakdown_ms=trace.breakdown_ms,
            pack_bytes=packs,
            probe_bytes=trace.bytes["ssd"] - packs,
            unused_bytes=unused,
            needed_bytes=needed,
            device_bytes=trace.bytes["device"],
            host_bytes=trace.bytes["host"],
            coverage=trace.coverage,
            fell_back=trace.counters.get("layers_fell_back", 0),
            attention_mass=trace.attention_mass,
            jobs=len(copies),
            stage_ms=sum(copies) / 1e6,
        )

    @property
    def demanded_bytes(self) -> int:
        """Pack bytes without what was read ahead and not used."""
        return self.pack_bytes - self.unused_bytes

    def io_floor_ms(self, disk: Disk, layout: Layout) -> float:
        """The bytes that had to be read at the disk's own bandwidth."""
        seconds = self.demanded_bytes / disk.bandwidth(layout.pack_bytes)
        if self.probe_bytes:
            seconds += self.probe_bytes / disk.bandwidth(PROBE_BLOCK)
        return seconds * 1e3


def measured(lab: Lab, engine: Engine, index: int, question: int, budget: float) -> Sample:
    """Asks once and keeps the numbers. What is done off the main path is over before: it is charged
    to no request."""
    engine.settle()
    elapsed, result = lab.ask(engine, index, question, budget)
    return Sample.of(elapsed, result, engine.layout, chunked=engine.system.chunked)


def hit_rate(samples: Sequence[Sample]) -> Json:
    """Shares of all bytes that were demanded, of packs and of probe keys, which the device's and
    the host's pool had."""
    found = {tier: sum(getattr(s, f"{tier}_bytes") for s in samples) for tier in ("device", "host")}
    read = sum(sample.demanded_bytes + sample.probe_bytes for sample in samples)
    every = sum(found.values()) + read
    return {tier: held / every if every else 0.0 for tier, held in found.items()}


def row_of(
    system: str, budget: float, variant: str, samples: Sequence[Sample], layout: Layout
) -> Json:
    """One row of the result, without the floors."""
    token_bytes = layout.token_bytes * layout.stored_bytes / layout.pack_bytes

    def total(name: str) -> int:
        return sum(getattr(sample, name) for sample in samples)

    def mean(name: str) -> float:
        return statistics.fmean(getattr(sample, name) for sample in samples)

    times = [sample.ttft_ms for sample in samples]
    needed = total("needed_bytes")
    return {
        "system": system,
        "budget": budget,
        "variant": variant,
        "ttft_ms": summary(times) | {"p50_interval": median_interval(times)},
        "breakdown_ms": {
            name: statistics.fmean(sample.breakdown_ms[name] for sample in samples)
            for name in samples[0].breakdown_ms
        },
        "hit_rate": hit_rate(samples),
        "coverage": mean("coverage"),
        "unused": total("unused_bytes") / max(1, total("pack_bytes")),
        "ssd_bytes": mean("pack_bytes") + mean("probe_bytes"),
        "ssd_kv_bytes": mean("demanded_bytes"),
        "ssd_probe_bytes": mean("probe_bytes"),
        "tokens_loaded": mean("demanded_bytes") / token_bytes,
        "tokens_needed": mean("needed_bytes") / token_bytes,
        "read_amplification": total("demanded_bytes") / needed if needed else 1.0,
        "read_amplification_with_unused": total("pack_bytes") / needed if needed else 1.0,
        "layers_fell_back": mean("fell_back"),
        "attention_mass": mean("attention_mass"),
        "copies": mean("jobs"),
        "stage_ms": mean("stage_ms"),
    }
