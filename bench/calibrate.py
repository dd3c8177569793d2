"""Parameters of `bench.simulation`: this machine's disk, link and contention, recorded runs."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import Json
from bench.lab import Lab
from bench.simulation import Hardware, Script, Stage
from ckv_jax import Engine
from ckv_jax.pipeline.device_pool import DevicePool
from ckv_jax.pipeline.plan import Plan
from ckv_jax.storage.reader import PrefixReader

JOB_PACKS = 16
SECONDS = 1.0


def hardware(lab: Lab, engine: Engine, cold: Json) -> Hardware:
    """This machine as `engine`'s reads and writes see it; `cold` is a row of its requests."""
    threads = engine.config.io_threads
    prefix = lab.prefix(0, engine)
    with lab.store.reader(prefix) as reader:
        packs = _read_loop(lambda rng: _read_packs(reader, rng), threads)
        probe = packs
        if prefix.layout.probe != "none":
            probe = _read_loop(lambda rng: _read_probe(reader, rng), 2)
        latency = statistics.median(_timed(lambda: _one_pack(reader)) for _ in range(20))
        contention = _contention(reader, threads)
    return Hardware(
        name="here",
        read_latency=latency / 2,  # the other half is the transfer
        pack_bandwidth=packs,
        probe_bandwidth=probe,
        threads=threads,
        link_bandwidth=_link(engine),
        job_overhead=cold["stage_ms"] / 1e3 / max(1.0, cold["copies"]),
        call_overhead=0.0,  # part of the recorded compute times
        sync_overhead=0.0,
        contention=contention,
    )


def script(engine: Engine, cold: Json, resident: Json) -> Script:
    """A request of the mean bytes of `cold` rows and the mean times of resident ones."""
    system, layout = engine.system, engine.layout
    spent = resident["breakdown_ms"]
    waits = spent["probe_io"] + spent["critical_io_wait"]
    total = (resident["ttft_ms"]["p50"] - waits) / 1e3
    useful, probe = cold["ssd_kv_bytes"], cold["ssd_probe_bytes"]
    waste = cold["waste"] * (cold["ssd_bytes"] - probe)
    pack = layout.pack_bytes
    if not system.chunked:
        layers = layout.num_layers
        everything = system.selector == "all"
        share = 0.0 if everything else _select_share(cold)
        keys = useful if everything else _keys_ahead(cold, engine)
        stage = Stage(
            select_s=share * total / layers,
            compute_s=(1 - share) * total / layers,
            probe_bytes=round(probe / layers),
            ahead_bytes=round(keys / layers),
            demanded_bytes=round((useful - keys) / layers),
        )
        kind = "all" if everything else "tokens"
        return Script(
            kind="all" if kind == "all" else "tokens",
            stages=(stage,) * layers, pack_bytes=pack, embed_s=0.0, head_s=0.0,
        )  # fmt: skip
    plan = Plan.of(layout.num_layers, system)
    select = spent["select"] / 1e3 / plan.periods
    step = (total - select * plan.periods) / layout.num_layers
    later = max(1, sum(not s.selects or s.period for s in plan.steps))
    ahead = cold["coverage"] if system.prefetch == "inter" else 0.0
    stages = tuple(
        Stage(
            select_s=select if s.selects else 0.0,
            compute_s=step * len(s.layers),
            probe_bytes=round(probe / plan.periods) if s.selects else 0,
            speculated_bytes=round(ahead * useful / len(plan.steps)),
            wasted_bytes=round(waste / later) if s.period else 0,
            demanded_bytes=round((1 - ahead) * useful / len(plan.steps)),
        )
        for s in plan.steps
    )
    return Script(kind="ours", stages=stages, pack_bytes=pack, embed_s=0.0, head_s=0.0)


def _select_share(row: Json) -> float:
    """Of a token system's compute, what goes into scoring: all tokens against the chosen ones."""
    return 0.75 if row["budget"] <= 0.1 else 0.55


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


def _read_loop(read: Callable[[np.random.Generator], int], threads: int) -> float:
    """Bytes a second of `threads` threads that call `read`."""
    stop = time.perf_counter() + SECONDS

    def run(seed: int) -> int:
        rng, done = np.random.default_rng(seed), 0
        while time.perf_counter() < stop:
            done += read(rng)
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(run, range(threads)))
    return total / (time.perf_counter() - start)


def _read_packs(reader: PrefixReader, rng: np.random.Generator) -> int:
    layout, chunks = reader.prefix.layout, reader.prefix.num_chunks
    ids = np.sort(rng.choice(chunks, min(JOB_PACKS, chunks), replace=False))
    out = np.empty((len(ids), *layout.pack_shape), layout.numpy_dtype)
    reader.read_packs(int(rng.integers(layout.groups)), ids, out)
    return out.nbytes


def _one_pack(reader: PrefixReader) -> None:
    layout = reader.prefix.layout
    reader.read_packs(0, np.array([0]), np.empty((1, *layout.pack_shape), layout.numpy_dtype))


def _read_probe(reader: PrefixReader, rng: np.random.Generator) -> int:
    layout = reader.prefix.layout
    shape = (reader.prefix.num_tokens, layout.probe_heads, layout.head_dim)
    out = np.empty(shape, layout.numpy_dtype)
    reader.read_probe(int(rng.choice(layout.probe_layers)), out)
    return out.nbytes


def _link(engine: Engine) -> float:
    """Bytes a second from a host buffer into the pool."""
    layout = engine.layout
    pool = DevicePool(4 * JOB_PACKS, layout.pack_shape, layout.numpy_dtype)
    rows = np.zeros((JOB_PACKS, *layout.pack_shape), layout.numpy_dtype)
    slots = np.arange(JOB_PACKS, dtype=np.int32)
    pool.write(rows, slots).block_until_ready()
    times = [_timed(lambda: pool.write(rows, slots).block_until_ready()) for _ in range(10)]
    return rows.nbytes / statistics.median(times)


def _contention(reader: PrefixReader, threads: int) -> float:
    """How much slower a computation gets while the reader threads are busy."""
    x = jnp.ones((512, 1024), jnp.bfloat16)
    w = jnp.ones((1024, 1024), jnp.bfloat16)

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
        return x

    call = jax.jit(chain)
    call(x, w).block_until_ready()
    alone = statistics.median(_timed(lambda: call(x, w).block_until_ready()) for _ in range(30))
    stop = threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            _read_packs(reader, rng)

    workers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    busy = statistics.median(_timed(lambda: call(x, w).block_until_ready()) for _ in range(30))
    stop.set()
    for worker in workers:
        worker.join()
    return max(0.0, busy / alone - 1)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
