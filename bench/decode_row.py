"""One system decoding so many texts: what a row of `bench.decode` says, and how it is timed."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Json
from bench.measure import Compilations
from bench.memory import release_heap, status_mb
from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.kvdrive import KvDriveSelections
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.trace import Span, Trace, write_perfetto

QUESTION = 8
"""Tokens of a text that are re-prefilled; those after them are decoded."""
LEAST = 2
"""Tokens that are measured at least, however slow they are."""


class Clock:
    """Time and reads of texts that go on together, token by token, or one after the other: while
    one of them is past its first tokens, and before."""

    def __init__(self, texts: int, warm: int, total: int) -> None:
        """Each of `texts` has `total` tokens, of which `warm` after the first are told apart."""
        self.warm_s = self.late_s = 0.0
        self.late_reads = 0
        self._seen = [0] * texts
        self._warm = warm
        self._total = total
        self._before = (0.0, 0)

    def token(self, text: int, now: float, reads: int) -> None:
        """One more token of a text; `reads`: packs that were read so far."""
        then, known = self._before
        if any(self._warm < seen < self._total for seen in self._seen):
            self.late_s += now - then
            self.late_reads += reads - known
        elif any(0 < seen < self._total for seen in self._seen):
            self.warm_s += now - then
        self._seen[text] += 1
        self._before = (now, reads)


def tokens_within(seconds: float, step_s: float, warm: int, tokens: int) -> tuple[int, int]:
    """How many tokens are to be warm and measured so that all take about `seconds`: those asked
    for, or fewer. Warm ones, which fill windows, have up to half the time; `LEAST` are measured."""
    warm = min(warm, int(seconds / 2 / step_s))
    return warm, max(min(tokens, LEAST), min(tokens, int(seconds / step_s) - warm))


def forced(texts: Sequence[np.ndarray], tokens: int) -> list[SamplingParams]:
    """Ways to say so many tokens of given texts int32 [n], after their questions."""
    return [
        SamplingParams(
            max_tokens=tokens, forced_ids=tuple(text[QUESTION : QUESTION + tokens].tolist())
        )
        for text in texts
    ]


def timed(
    engine: Engine, requests: Sequence[Request], texts: Sequence[np.ndarray], warm: int, tokens: int
) -> tuple[Clock, list[Any]]:
    """What `warm` tokens and `tokens` more took after the first one, and the generations."""
    total = 1 + warm + tokens
    clock = Clock(len(requests), warm, total)
    with engine.generate(list(requests), forced(texts, total)) as stream:
        for event in stream:
            if event.token_id is not None:
                clock.token(event.index, time.perf_counter(), engine.stats().reads)
        found = stream.results()
    for text in found:
        text.raise_for_error()
    return clock, found


def warmed(engine: Engine, requests: Sequence[Request], texts: Sequence[np.ndarray]) -> float:
    """Compiles and loads what a few tokens need; seconds that one of all texts takes then."""
    asked = requests[0]
    engine.warmup(asked.prefix, max_suffix=QUESTION, budgets=[asked.budget])  # reads of every size
    clock, _ = timed(engine, requests, texts, warm=1, tokens=1)
    return clock.late_s


def warmed_up_to(
    engine: Engine, requests: Sequence[Request], texts: Sequence[np.ndarray], total: int
) -> None:
    """Compiles what so many tokens need: at each size that buffers grow to meanwhile, questions
    that fill the size before but for one token."""
    size = rows_bucket(QUESTION + 1)
    while size < QUESTION + total:
        longer = [
            dataclasses.replace(request, suffix=text[: size - 1].tolist())
            for request, text in zip(requests, texts, strict=True)
        ]
        timed(engine, longer, [text[size - 1 - QUESTION :] for text in texts], warm=1, tokens=1)
        size *= 2


def measured(
    engine: Engine,
    requests: Sequence[Request],
    texts: Sequence[np.ndarray],
    *,
    warm: int,
    tokens: int,
    bandwidth: float | None,
    timeline: Path | None = None,
) -> Json:
    """The measured part of a row; `bandwidth`: bytes a second that reads can have at best, None
    where the store lies in memory; `timeline`: takes the last two tokens of `kvdrive`."""
    warmed_up_to(engine, requests, texts, 1 + warm + tokens)
    selections, traces = engine.worker.decode_selections, list[Trace]()
    if isinstance(selections, KvDriveSelections):
        selections.timeline = traces
    with Compilations() as compilations:
        clock, found = timed(engine, requests, texts, warm, tokens)
    if timeline is not None and traces:
        _write_timeline(timeline, traces[-2:])
    late = slice(warm, None)
    spent, reads = clock.late_s, clock.late_reads
    told = [text.trace.tokens[late] for text in found]
    chose = [token for one in told for token in one]
    packs = sum(t.device_hits + t.host_hits + t.ssd_reads for t in chose)
    waited = sum(t.select_ms + t.fetch_ms for t in told[0]) / 1e3
    size = reads * engine.layout.pack_bytes
    read_s = size / bandwidth if bandwidth else 0.0
    busy = max(spent - waited, read_s)
    count = len(requests)
    return {
        "warm_tokens": warm,
        "measured_tokens": tokens,
        "tokens_s": count * tokens / spent,
        "warm_tokens_s": count * warm / clock.warm_s if warm else None,
        "step_ms": 1e3 * spent / tokens,
        "device_hits": sum(t.device_hits for t in chose) / packs if packs else None,
        "host_hits": sum(t.host_hits for t in chose) / packs if packs else None,
        "attention_mass": float(np.mean([t.attention_mass for t in chose])) if chose else None,
        "ahead_share": sum(t.ahead for t in told[0]) / max(1, reads),
        "unused_share": sum(t.unused for t in told[0]) / max(1, reads),
        "bytes_per_token": size / (count * tokens),
        "read_ms": 1e3 * read_s / tokens,
        "select_ms": sum(t.select_ms for t in told[0]) / tokens,
        "fetch_ms": sum(t.fetch_ms for t in told[0]) / tokens,
        "exposed_share": waited / spent if chose else None,
        "ratio_to_busy": spent / busy if chose else None,
        "compiled": compilations.count,
        "overlap": overlap([span for trace in traces[1 + warm :] for span in trace.spans]),
    }


def _write_timeline(path: Path, traces: Sequence[Trace]) -> None:
    """Tokens that follow one another, as one Perfetto trace."""
    whole = Trace()
    spans = [span for trace in traces for span in trace.spans]
    whole.extend((*span[:4], dict(span.args)) for span in spans)
    whole.start_ns = min(span.start_ns for span in spans)
    whole.end_ns = max(span.end_ns for span in spans)
    write_perfetto(path, [whole])


def overlap(spans: Sequence[Span]) -> float | None:
    """Of the time in which packs were looked up, read or copied, the share in which a selection or
    a layer was under way; None without such spans."""
    device, moved = (
        _covered([span for span in spans if span.lane in lanes])
        for lanes in (("select", "compute"), ("look-up", "host memory", "ssd"))
    )
    total = sum(end - start for start, end in moved)
    both = sum(
        max(0, min(end, other) - max(start, begin))
        for start, end in moved
        for begin, other in device
        if begin < end and start < other
    )
    return both / total if total else None


def _covered(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The stretches that spans cover together, none overlapping."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def forget_peak() -> None:
    """The process's highest memory (VmHWM) is counted anew from here on, without what earlier
    systems left: engines that nobody holds any more, and what C's heap keeps for later."""
    gc.collect()
    release_heap()
    Path("/proc/self/clear_refs").write_text("5")


def memory(engine: Engine, weights: int) -> Json:
    """MB that the process held at most since `forget_peak`, and those that it may: bytes of
    `weights`, device and host budgets, and the digests that are resident."""
    config = engine.config
    budgets = config.device_cache_bytes + config.host_cache_bytes
    budgets += config.prefetch_device_bytes + config.prefetch_host_bytes
    may = weights + budgets + engine.stats().digest_bytes
    return {"peak_mb": status_mb("VmHWM"), "budget_mb": may / 1e6}
