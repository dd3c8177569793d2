"""Parameters of `bench.simulation`: this machine's disk, link and contention, recorded runs.

Nothing here is taken from the time to first token that is to be predicted: calls are timed by
replaying them, reads by loops of their own, and the engine's part by requests that read no packs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.common import Json
from bench.floor import REPLAYS, Recording
from bench.lab import Lab
from bench.simulation import Hardware, Script, Stage
from ckv_jax import Engine
from ckv_jax.pipeline.device_pool import DevicePool
from ckv_jax.pipeline.mapped_pool import MappedPool
from ckv_jax.pipeline.memory import job_packs
from ckv_jax.pipeline.plan import Plan
from ckv_jax.storage.reader import PrefixReader

SECONDS = 1.0
LOOPS = 3
_SCORING = ("_select", "_project", "_by_keys", "_by_probe")
_LAYERS = ("_run", "_attend_tokens", "_attend_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one request by themselves, with everything on the device (`bench.floor`)."""

    total_s: float
    """Back to back, with one wait at the end."""
    select_s: tuple[float, ...]
    """Scoring before each stage; 0 where a selection is shared."""
    compute_s: tuple[float, ...]
    """Each stage's layers."""
    ends_s: tuple[float, float]
    """Embedding, and the head."""
    lookahead_s: float
    """Of each scoring: what speculation scores again."""


def hardware(lab: Lab, engine: Engine, recording: Recording, cold: Json) -> Hardware:
    """This machine as `engine`'s reads and calls see it; `cold` is a row of its requests.

    Bandwidths are those of loops that read alone. Contention is how much slower the recorded calls
    are while such a loop is running, and such a loop while they are.
    """
    threads = engine.config.io_threads
    prefix = lab.prefix(0, engine)
    with lab.store.reader(prefix) as reader:
        packs = _Packs(reader, job_packs(prefix.layout), scattered=engine.system.chunked)
        alone = _bandwidth(packs.read, 1)
        together = max(alone, _bandwidth(packs.read, threads))
        probe = together
        if prefix.layout.probe != "none":
            probe = _bandwidth(_Probes(reader).read, 2)
        latency = statistics.median(_timed(lambda: _one_pack(reader)) for _ in range(20))
        slower, busy = _contention(recording, packs.read, threads)
    jobs = max(1.0, cold["copies"])
    return Hardware(
        name="here",
        read_latency=max(0.0, latency - prefix.layout.pack_bytes / alone),
        pack_bandwidth=together,
        probe_bandwidth=probe,
        thread_bandwidth=alone,
        threads=threads,
        link_bandwidth=_link(engine),
        job_overhead=cold["stage_ms"] / 1e3 / jobs,
        call_overhead=0.0,  # part of the engine's own time, in `sync_overhead`
        sync_overhead=0.0,
        compute_contention=slower,
        read_contention=max(0.0, together / busy - 1),
    )


def with_engine(here: Hardware, engine: Engine, calls: Calls, resident: Json) -> Hardware:
    """`here` with what the engine adds to the bare calls of a request that reads no packs.

    It is charged where the engine waits for the device: at each selection, or at each layer.
    """
    spent = resident["breakdown_ms"]
    waits = spent["probe_io"] + spent["critical_io_wait"]
    total = (resident["ttft_ms"]["p50"] - waits) / 1e3
    selections = sum(seconds > 0 for seconds in calls.select_s) or engine.layout.num_layers
    return dataclasses.replace(here, sync_overhead=max(0.0, total - calls.total_s) / selections)


def calls_of(engine: Engine, recording: Recording) -> Calls:
    """Times of the recorded calls, one by one, scaled to what all take back to back."""
    totals = [_timed(recording.replay) for _ in range(REPLAYS)]
    each = np.median([recording.times() for _ in range(REPLAYS)], axis=0)
    total = statistics.median(totals)
    each *= total / each.sum()
    select: list[float] = []
    compute: list[float] = []
    scoring: list[float] = []  # since the layers before
    for call, seconds in zip(recording.calls[1:-1], each[1:-1].tolist(), strict=True):
        if call.name in _SCORING:
            scoring.append(seconds)
        elif call.name in _LAYERS:
            # Ours scores for itself, then perhaps for the period after.
            select.append(sum(scoring[:1] if engine.system.chunked else scoring))
            compute.append(seconds)
            scoring = []
        else:
            raise ValueError(f"got a call {call.name!r}, expected one that scores or runs layers")
    ahead = (total - each[0] - each[-1] - sum(select) - sum(compute)) / max(
        1, sum(seconds > 0 for seconds in select)
    )
    return Calls(
        total_s=total,
        select_s=tuple(select),
        compute_s=tuple(compute),
        ends_s=(float(each[0]), float(each[-1])),
        lookahead_s=max(0.0, ahead),
    )


def script(engine: Engine, cold: Json, calls: Calls) -> Script:
    """A request of the mean bytes of `cold` rows and the times of `calls`."""
    system, layout = engine.system, engine.layout
    useful, probe = cold["ssd_kv_bytes"], cold["ssd_probe_bytes"]
    waste = cold["waste"] * (cold["ssd_bytes"] - probe)
    embed, head = calls.ends_s
    times = list(zip(calls.select_s, calls.compute_s, strict=True))
    if not system.chunked:
        everything = system.selector == "all"
        keys = useful if everything else _keys_ahead(cold, engine)
        stages = tuple(
            Stage(
                select_s=select,
                compute_s=compute,
                probe_bytes=round(probe / len(times)),
                ahead_bytes=round(keys / len(times)),
                demanded_bytes=round((useful - keys) / len(times)),
            )
            for select, compute in times
        )
        return Script(
            kind="all" if everything else "tokens",
            stages=stages, pack_bytes=layout.pack_bytes, embed_s=embed, head_s=head,
            packs_per_job=job_packs(layout),
        )  # fmt: skip
    plan = Plan.of(layout.num_layers, system)
    later = max(1, sum(not s.selects or s.period for s in plan.steps))
    ahead = cold["coverage"] if system.prefetch == "inter" else 0.0
    stages = tuple(
        Stage(
            select_s=select,
            compute_s=compute,
            probe_bytes=round(probe / plan.periods) if s.selects else 0,
            speculated_bytes=round(ahead * useful / len(plan.steps)),
            wasted_bytes=round(waste / later) if s.period else 0,
            demanded_bytes=round((1 - ahead) * useful / len(plan.steps)),
        )
        for s, (select, compute) in zip(plan.steps, times, strict=True)
    )
    return Script(
        kind="ours", stages=stages, pack_bytes=layout.pack_bytes, embed_s=embed, head_s=head,
        lookahead_s=calls.lookahead_s,
    )  # fmt: skip


def _keys_ahead(row: Json, engine: Engine) -> float:
    """H2O's keys: half of all KV, whatever is chosen, less what caches held."""
    if engine.system.selector != "h2o":
        return 0.0
    layout = engine.layout
    tokens = row["tokens_in_prefix"]
    return min(
        float(row["ssd_kv_bytes"]),
        layout.num_layers * layout.num_chunks(tokens) * float(layout.pack_bytes),
    )


Read = Callable[[np.random.Generator, dict[str, np.ndarray]], int]
"""Reads something into a thread's own buffers and returns its bytes."""


def _bandwidth(read: Read, threads: int) -> float:
    return statistics.median(_read_loop(read, threads, SECONDS / LOOPS) for _ in range(LOOPS))


def _read_loop(read: Read, threads: int, seconds: float) -> float:
    """Bytes a second of `threads` threads that call `read`."""
    stop = time.perf_counter() + seconds

    def run(seed: int) -> int:
        rng, buffers, done = np.random.default_rng(seed), dict[str, np.ndarray](), 0
        while time.perf_counter() < stop:
            done += read(rng, buffers)
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(run, range(threads)))
    return total / (time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class _Packs:
    """Jobs as the engine has them: chunks here and there for ours, runs of chunks for rivals."""

    reader: PrefixReader
    count: int
    scattered: bool

    def read(self, rng: np.random.Generator, buffers: dict[str, np.ndarray]) -> int:
        layout, chunks = self.reader.prefix.layout, self.reader.prefix.num_chunks
        count = min(self.count, chunks)
        if self.scattered:
            ids = np.sort(rng.choice(chunks, count, replace=False))
        else:
            ids = np.arange(count) + int(rng.integers(chunks - count + 1))
        shape = (count, *layout.pack_shape)
        out = buffers.setdefault("packs", np.zeros(shape, layout.numpy_dtype))
        self.reader.read_packs(int(rng.integers(layout.groups)), ids, out)
        return out.nbytes


@dataclass(frozen=True, slots=True)
class _Probes:
    """One layer's probe keys at a time."""

    reader: PrefixReader

    def read(self, rng: np.random.Generator, buffers: dict[str, np.ndarray]) -> int:
        layout = self.reader.prefix.layout
        shape = (self.reader.prefix.num_tokens, layout.probe_heads, layout.head_dim)
        out = buffers.setdefault("probe", np.zeros(shape, layout.numpy_dtype))
        self.reader.read_probe(int(rng.choice(layout.probe_layers)), out)
        return out.nbytes


def _one_pack(reader: PrefixReader) -> None:
    layout = reader.prefix.layout
    reader.read_packs(0, np.array([0]), np.empty((1, *layout.pack_shape), layout.numpy_dtype))


def _link(engine: Engine) -> float:
    """Bytes a second from a host buffer into the pool; as good as endless if they are one."""
    if isinstance(engine._parts.memory.pool, MappedPool):
        return 1e15
    layout = engine.layout
    packs = job_packs(layout)
    pool = DevicePool(4 * packs, layout.pack_shape, layout.numpy_dtype)
    rows = np.zeros((packs, *layout.pack_shape), layout.numpy_dtype)
    slots = np.arange(packs, dtype=np.int32)
    pool.write(rows, slots).block_until_ready()
    times = [_timed(lambda: pool.write(rows, slots).block_until_ready()) for _ in range(10)]
    return rows.nbytes / statistics.median(times)


def _contention(recording: Recording, read: Read, threads: int) -> tuple[float, float]:
    """How much longer calls take beside busy readers, and the readers' bytes a second meanwhile."""
    alone = statistics.median(_timed(recording.replay) for _ in range(REPLAYS))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_loop, read, threads, SECONDS)
        spent = []
        while not reading.done():
            spent.append(_timed(recording.replay))
    return max(0.0, statistics.median(spent) / alone - 1), reading.result()


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
