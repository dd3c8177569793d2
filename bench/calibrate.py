"""Parameters of `bench.simulation`: this machine's disk, link and cores, and recorded runs.

Nothing here is taken from the time to first token that is to be predicted: calls are timed by
replaying them, reads and the engine thread's work for them by loops of their own, and what else the
engine adds by requests that read no packs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.common import Json
from bench.costs import covered_shares
from bench.floor import REPLAYS, Recording
from bench.simulation import Hardware, Script, Simulation, Stage
from ckv_jax import Engine
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.memory.device import DevicePool
from ckv_jax.memory.landing import landing_for
from ckv_jax.memory.memory import Memory, job_packs
from ckv_jax.memory.pages import slot_shape
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.read_ahead import READ
from ckv_jax.reads.packs import Packs
from ckv_jax.reads.prefetcher import Prefetcher
from ckv_jax.reads.residents import Residents
from ckv_jax.reads.source import Source
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace

LOOP_S = 0.15
_BEFORE = ("latest", "bring", "_merged")
"""What takes the tokens that score out of a hidden state, and probe keys out of their slots: parts
of the selection that follows."""
_SCORING = ("select", "project", "by_keys", "by_heads", "_by_probe")
_LAYERS = ("run", "attend_tokens", "attend_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one request by themselves, with everything on the device (`bench.floor`)."""

    total_s: float
    """Back to back, with one wait at the end, without those that look ahead."""
    select_s: tuple[float, ...]
    """Scoring before each stage; 0 where a selection is shared."""
    compute_s: tuple[float, ...]
    """Each stage's layers."""
    ends_s: tuple[float, float]
    """Embedding, and the head."""
    lookahead_s: float
    """Each guess at the period after; 0.0 if the system makes none."""


class Reads:
    """How fast packs and probes are read here, in short loops that take turns with requests."""

    def __init__(self, reader: PrefixReader, engine: Engine) -> None:
        layout = reader.prefix.layout
        self._threads = engine.config.io_threads
        self._pack_bytes = layout.pack_bytes
        self._reader = reader
        self._packs = _Packs(reader, job_packs(layout), scattered=engine.system.chunked)
        self._probes = None if layout.probe == "none" else _Probes(reader)
        self._found: dict[str, list[tuple[float, float]]] = {}
        self._work: list[float] = []

    def sample(self, cold: Engine) -> None:
        """One short loop of each kind, and the work of `cold`'s thread for each read."""
        self._note("alone", _read_loop(self._packs.read, 1))
        self._note("together", _read_loop(self._packs.read, self._threads))
        if self._probes is not None:
            self._note("probe", _read_loop(self._probes.read, 2))
        self._note("latency", (timed(lambda: _one_pack(self._reader)), 0.0))
        self._work.append(_work_for_reads(cold, self._reader))

    def hardware(self, engine: Engine, recording: Recording) -> Hardware:
        """Medians of the samples, and what calls and readers take of the cores: the process's CPU
        time while nothing but them is running."""
        speed = {
            name: statistics.median(x[0] for x in found) for name, found in self._found.items()
        }
        together = max(speed["alone"], speed["together"])
        return Hardware(
            name="here",
            read_latency=max(0.0, speed["latency"] - self._pack_bytes / speed["alone"]),
            pack_bandwidth=together,
            probe_bandwidth=speed.get("probe", together),
            thread_bandwidth=speed["alone"],
            threads=self._threads,
            link_bandwidth=_link(engine),
            job_overhead=statistics.median(self._work),
            call_overhead=0.0,  # part of the engine's own time, in `sync_overhead`
            sync_overhead=0.0,
            cores=len(os.sched_getaffinity(0)) if Target.here().in_host_memory else math.inf,
            call_cores=_cores(recording),
            read_cpu=statistics.median(x[1] for x in self._found["together"]),
        )

    def _note(self, name: str, found: tuple[float, float]) -> None:
        self._found.setdefault(name, []).append(found)


def with_engine(here: Hardware, unread: Script, ttft_s: float) -> Hardware:
    """`here` with what the engine adds to the bare calls of a request that reads no packs.

    `unread` is its script and `ttft_s` its time to first token, whose excess is charged where the
    engine waits for the device, at each selection, or to each layer's call where there is none.
    """
    low, high = 0.0, ttft_s
    for _ in range(30):
        tried = dataclasses.replace(here, sync_overhead=(low + high) / 2)
        if Simulation(unread, tried).run().ttft_s < ttft_s:
            low = tried.sync_overhead
        else:
            high = tried.sync_overhead
    return dataclasses.replace(here, sync_overhead=low)


def calls_of(engine: Engine, recording: Recording, total: float) -> Calls:
    """Times of the recorded calls, one by one, scaled to the `total` of all back to back."""
    each = np.median([recording.times() for _ in range(REPLAYS)], axis=0)
    each *= total / each.sum()
    select: list[float] = []
    compute: list[float] = []
    scoring: list[float] = []  # since the layers before
    guesses: list[float] = []
    before = 0.0
    for call, seconds in zip(recording.calls[1:-1], each[1:-1].tolist(), strict=True):
        if call.name in _BEFORE:
            before += seconds
        elif call.name in _SCORING:
            scoring.append(before + seconds)
            before = 0.0
        elif call.name in _LAYERS:
            if engine.system.chunked:  # first for itself, then perhaps for the period after
                guesses += scoring[1:]
                scoring = scoring[:1]
            select.append(sum(scoring))
            compute.append(seconds)
            scoring = []
        else:
            raise ValueError(f"got a call {call.name!r}, expected one that scores or runs layers")
    return Calls(
        total_s=total - sum(guesses),
        select_s=tuple(select),
        compute_s=tuple(compute),
        ends_s=(float(each[0]), float(each[-1])),
        lookahead_s=statistics.fmean(guesses) if guesses else 0.0,
    )


def script_of(engine: Engine, cold: Json, calls: Calls, *, guessing: float = 0.0) -> Script:
    """A request of the mean bytes of `cold` rows and the times of `calls`.

    `guessing` is the share of the periods before the last that were followed by a guess.
    """
    system, layout = engine.system, engine.layout
    useful, probe = cold["ssd_kv_bytes"], cold["ssd_probe_bytes"]
    unused = cold["unused"] * (cold["ssd_bytes"] - probe)
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
    later = max(1, sum(s.period > 0 for s in plan.steps))
    covered = covered_shares(plan, cold["coverage"] if system.prefetch == "inter" else 0.0)
    stages = tuple(
        Stage(
            select_s=select,
            compute_s=compute,
            probe_bytes=round(probe / plan.periods) if s.selects else 0,
            speculated_bytes=round(known * useful / len(plan.steps)),
            unused_bytes=round(unused / later) if s.period else 0,
            demanded_bytes=round((1 - known) * useful / len(plan.steps)),
        )
        for s, known, (select, compute) in zip(plan.steps, covered, times, strict=True)
    )
    return Script(
        kind="ours", stages=stages, pack_bytes=layout.pack_bytes, embed_s=embed, head_s=head,
        lookahead_s=guessing * calls.lookahead_s,
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


def _read_loop(read: Read, threads: int) -> tuple[float, float]:
    """Bytes a second, and seconds of a core a byte, of `threads` threads that call `read`."""
    stop = time.perf_counter() + LOOP_S

    def run(seed: int) -> int:
        rng, buffers, done = np.random.default_rng(seed), dict[str, np.ndarray](), 0
        while time.perf_counter() < stop:
            done += read(rng, buffers)
        return done

    start, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(run, range(threads)))
    return total / (time.perf_counter() - start), (time.process_time() - cpu) / total


def _cores(recording: Recording) -> float:
    """How many cores the recorded calls keep busy, on average."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(REPLAYS):
        recording.replay()
    return max(1.0, (time.process_time() - cpu) / (time.perf_counter() - start))


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


def _work_for_reads(engine: Engine, reader: PrefixReader) -> float:
    """The engine thread's seconds for each read: to ask for it, and to take it once it is there.

    Done here with pools and threads of the sizes that `engine` has, and nothing in them.
    """
    layout, config = reader.prefix.layout, engine.config
    memory = Memory(layout, config, engine.system, engine.layers.target)
    resident = Residents(engine.store, memory.tiers, digest_bytes=0).open(reader.prefix)
    landing = landing_for(
        memory, layout, host_bytes=config.prefetch_host_bytes, codec=engine.system.coder
    )
    chunks = np.arange(min(resident.num_chunks, 4 * job_packs(layout)))
    groups = range(min(4, layout.groups))
    trace, spent = Trace(), 0.0
    with (
        Prefetcher(config.io_threads) as prefetcher,
        Packs(
            [Source(resident, reader, _Nothing())],
            memory=memory, landing=landing, prefetcher=prefetcher, trace=trace,
        ) as packs,
    ):  # fmt: skip
        for group in groups:
            spent += timed(lambda group=group: packs.demand(0, group, chunks))
        while prefetcher.stats.queued or prefetcher.stats.running:
            time.sleep(1e-3)
        for group in groups:
            spent += timed(lambda group=group: packs.collect(0, group, chunks))
    return spent / sum(span.name == READ for span in trace.spans)


class _Nothing:
    """In place of recovery: everything has to be readable."""

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        raise RuntimeError(f"got unreadable packs {chunks} of group {group}")


def _one_pack(reader: PrefixReader) -> None:
    layout = reader.prefix.layout
    reader.read_packs(0, np.array([0]), np.empty((1, *layout.pack_shape), layout.numpy_dtype))


def _link(engine: Engine) -> float:
    """Bytes a second from a host buffer into the pool; as good as endless if they are one."""
    if Target.here().in_host_memory:
        return 1e15
    layout = engine.layout
    packs = job_packs(layout)
    pool = DevicePool(4 * packs, slot_shape(layout), layout.numpy_dtype, Target.here())
    rows = np.zeros((packs, *slot_shape(layout)), layout.numpy_dtype)
    slots = np.arange(packs, dtype=np.int32)
    pool.write(rows, slots).block_until_ready()
    times = [timed(lambda: pool.write(rows, slots).block_until_ready()) for _ in range(10)]
    return rows.nbytes / statistics.median(times)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
