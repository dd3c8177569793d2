"""The stages of `bench.gpu_qualify --first`: what ten minutes on an unknown GPU must answer.

Needs JAX, this package and nothing else: no fio, no network. Each stage answers one question:

- `device`: what it is, and the rates of a large copy and a large matrix product.
- `numerics`: whether each kernel agrees with its jnp reference there, and how long both take.
- `host`: microseconds of a call, of a wait for its result, of an upload, of a write to the pool.
- `copies`: host-to-device GB/s from pageable, pinned and registered memory.
- `first_token`: TTFT of one model by system and budget, from SSD and with everything on the
  device, beside the replay of the bare calls.
- `decode`: milliseconds a token.
- `profile`: what one request did on the device, by kernel.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import SHAPES, Json, Setting, seconds, stamped, write_text
from bench.decode_bench import covered
from bench.disk import FILE_BYTES, Disk
from bench.floor import record
from bench.kernels import KERNELS, calls, ceilings
from bench.lab import Lab
from bench.measure import Compilations, measured
from ckv_jax import Engine, SamplingParams
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.prefix.pools import DevicePool, PageLocked, aligned_bytes

SYSTEMS = ("ckv", "contiguous-kv")
STAGES = ("device", "host", "copies", "numerics", "first_token", "profile", "decode")
REPLAYS = 9
TOKENS = 32
LOOPS = 200


def device(setting: Setting) -> Json:
    """The device and its ceilings."""
    found = jax.devices()[0]
    best = ceilings(jnp.dtype(setting.dtype), 5)
    stats = found.memory_stats() or {}
    return {
        "kind": found.device_kind,
        "target": dataclasses.asdict(Target.here()),
        "memory_gib": stats.get("bytes_limit", 0) / 2**30,
        "memory_kinds": [memory.kind for memory in found.addressable_memories()],
        "jax": jax.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "copy_gb_per_s": best.bytes_per_s / 1e9,
        "matmul_tflop_per_s": best.flop_per_s / 1e12,
    }


def numerics(setting: Setting) -> Json:
    """Each kernel against its reference: relative difference, time of a call in a row of calls."""
    rows = []
    ours = KERNELS[jax.default_backend()]
    shape = SHAPES[setting.model]
    cases = list(calls(shape, setting))
    few = dataclasses.replace(setting, suffix_tokens=1, budgets=(0.05,))
    cases += [
        dataclasses.replace(call, kernel="attend, one token")
        for call in calls(shape, few)
        if call.kernel == "attend"
    ]
    for call in cases:
        expected: Any = None
        for name in (name for name in ("reference", ours) if name in call.has):
            row: Json = {"kernel": call.kernel, "budget": call.budget, "implementation": name}
            rows.append(row)
            start = time.perf_counter()
            try:
                run = jax.jit(lambda *a, n=name, c=call: c.run(n, *a))
                out = jax.block_until_ready(run(*call.operands))
                row["compile_s"] = time.perf_counter() - start
                row["us"] = 1e6 * _in_a_row(run, call.operands)
                row["gb_per_s"] = call.size / row["us"] / 1e3
            except Exception as error:  # the other kernels are asked all the same
                row["note"] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            if name == "reference":
                expected = out
            elif expected is None:
                row["note"] = "not compared: the reference failed"
            else:
                row["difference"] = max(
                    _difference(ours, theirs)
                    for ours, theirs in zip(
                        jax.tree.leaves(out), jax.tree.leaves(expected), strict=True
                    )
                )
    return {"rows": rows}


def host(setting: Setting) -> Json:
    """Microseconds, medians, of what the host does for a device."""
    small = jnp.zeros(64, jnp.int32)
    many = [jnp.zeros(64, jnp.int32) + i for i in range(40)]
    one = jax.jit(lambda x: x + 1)
    of_many = jax.jit(lambda x, *rest: x + rest[0][:1])
    ids = np.arange(64, dtype=np.int32)
    target = Target.here()
    shape = SHAPES[setting.model]
    slot = (2, 2, 8, shape.num_kv_heads * shape.head_dim)
    size = 2 * int(np.prod(slot))
    pool = DevicePool(max(64, (256 << 20) // size), slot, np.dtype(jnp.bfloat16), target)
    locked = PageLocked()
    found: Json = {
        "call": _chain(one, small),
        "call of 40 arrays": _chain(lambda x: of_many(x, *many), small),
        "call with an upload": _chain(lambda x: one(ids), small),
        "call and its result on the host": _each(lambda: np.asarray(one(small))),
    }
    for count in (16, 64):
        where = np.arange(count, dtype=np.int32)
        memory = aligned_bytes(count * size)
        memory[:] = 1
        for kind in ("pageable", "locked"):
            if kind == "locked" and not locked.lock(memory):
                continue
            rows = memory.view(jnp.bfloat16).reshape(count, *slot)
            for way, put in (("", lambda x: x), (", put first", jax.device_put)):

                def write(
                    _: Any = None, rows: Any = rows, where: Any = where, put: Any = put
                ) -> Any:
                    return pool.write(put(rows), where)

                name = f"pool write of {count} packs, {kind}{way}"
                found[f"{name}, dispatched"] = _chain(write, small)
                found[f"{name}, done"] = _each(lambda write=write: write().block_until_ready())
    locked.close()
    pool.close()
    return {"us": found, "pack_bytes": size}


def copies(size: int) -> Json:
    """Host-to-device GB/s of large copies."""
    place = jax.devices()[0]
    rows = np.ones(size, np.uint8)
    found = {"pageable": _rate(lambda: jax.device_put(rows, place), size)}
    kinds = {memory.kind for memory in place.addressable_memories()}
    if "pinned_host" in kinds and place.platform != "cpu":
        pinned = jax.sharding.SingleDeviceSharding(place, memory_kind="pinned_host")
        there = jax.sharding.SingleDeviceSharding(place)
        staged = jax.device_put(rows, pinned).block_until_ready()
        found["pinned"] = _rate(lambda: jax.device_put(staged, there), size)
        found["through pinned"] = _rate(
            lambda: jax.device_put(jax.device_put(rows, pinned), there), size
        )
    locked = PageLocked()
    if place.platform == "gpu" and locked.lock(rows):
        found["registered"] = _rate(lambda: jax.device_put(rows, place), size)
    locked.close()
    return {"gb_per_s": found, "bytes": size}


def first_token(lab: Lab, disk: Disk) -> Json:
    """TTFT by system and budget."""
    setting, rows, refused = lab.setting, [], set[str]()
    for name in setting.systems:
        start = time.perf_counter()
        with lab.engine(name) as engine:
            lab.warm(engine, 0, setting.budgets)
            warm_s = time.perf_counter() - start
            for budget in setting.budgets:
                row = _timed(lab, engine, budget) | {"from": "ssd", "warm_s": warm_s}
                floor = row["ssd_bytes"] / disk.bandwidth(engine.layout.pack_bytes)
                rows.append({"system": name} | row | {"io_floor_ms": 1e3 * floor})
        with lab.engine(name, device_bytes=2 * lab.kv_bytes + (64 << 20)) as engine:
            lab.warm(engine, 0, setting.budgets)
            for budget in setting.budgets:
                found = record(lab, engine, budget)
                replay = statistics.median(seconds(found.replay) for _ in range(REPLAYS))
                row = _timed(lab, engine, budget, question=0) | {"from": "device"}
                calls = {"replay_ms": 1e3 * replay, "calls": len(found.calls)}
                rows.append({"system": name} | row | calls)
            dispatched = engine.layers.programs.dispatched
            refused |= {why for _, made in dispatched for one in made for why in one.refused}
    return {
        "rows": rows,
        "refused": sorted(refused),
        "disk_gb_per_s": disk.found,
        "disk_tool": disk.tool,
        "prefill_s": lab.prefill_s,
        "setting": setting.to_json(),
    }


def decode(lab: Lab, budgets: tuple[float, ...]) -> Json:
    """Milliseconds a token of one sequence over a prefix on the device, the third time."""
    rows = []
    for budget in budgets:
        with lab.engine("ckv", device_bytes=2 * lab.kv_bytes + (64 << 20)) as engine:
            lab.ask(engine, 0, 0, 1.0)  # all of it is on the device, whatever tokens select
            request = lab.request(engine, 0, 0, budget)
            words = tuple(range(100, 101 + TOKENS))  # whatever the model makes of its random KV
            params = SamplingParams(max_tokens=len(words), forced_ids=words)
            for _ in range(3):  # beside the second, calls that find all packs are compiled
                with Compilations() as compiled, engine.generate([request], [params]) as stream:
                    times = [time.perf_counter() for event in stream if event.token_id is not None]
                    [generation] = stream.results()
                engine.settle()
            generation.raise_for_error()
            steps = np.diff(times) * 1e3
            rows.append(
                {
                    "budget": budget,
                    "ms_per_token": float(np.median(steps)),
                    "p95_ms": float(np.quantile(steps, 0.95)),
                    "compiled": compiled.count,
                    "tokens": len(steps),
                }
            )
    return {"rows": rows}


def profile(lab: Lab, budget: float) -> Json:
    """Device time by kernel of one request whose KV is on the device."""
    with lab.engine("ckv", device_bytes=2 * lab.kv_bytes + (64 << 20)) as engine:
        lab.warm(engine, 0, (budget,))
        for _ in range(2):
            lab.ask(engine, 0, 0, budget)
        engine.settle()
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            with jax.profiler.trace(folder):
                lab.ask(engine, 0, 0, budget)
            wall_ms = 1e3 * (time.perf_counter() - start)
            [path] = Path(folder).rglob("*.xplane.pb")
            data = jax.profiler.ProfileData.from_file(str(path))
            by_kernel: dict[str, list[float]] = defaultdict(list)
            spans = []
            for plane in data.planes:
                if "GPU" not in plane.name and "TPU" not in plane.name:
                    continue
                for line in plane.lines:
                    if "Stream" not in line.name and "Ops" not in line.name:
                        continue
                    for event in line.events:
                        by_kernel[event.name.split("(")[0][:80]].append(event.duration_ns / 1e6)
                        spans.append((event.start_ns, event.start_ns + event.duration_ns))
    top = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))
    return {
        "wall_ms_with_profiler": wall_ms,
        "busy_ms": sum(end - start for start, end in covered(spans)) / 1e6,
        "between_first_and_last_ms": (
            (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e6 if spans else 0
        ),
        "kernels": [
            {"name": name, "ms": sum(times), "times": len(times)} for name, times in top[:40]
        ],
        "launched": sum(map(len, by_kernel.values())),
    }


def stages(setting: Setting, *, small: int = 1) -> Iterator[tuple[str, Callable[[], Json]]]:
    """Every stage by name, in order. The later ones share one lab, which goes with the iterator."""
    yield "device", lambda: device(setting)
    yield "host", lambda: host(setting)
    yield "copies", lambda: copies((256 << 20) // small)
    yield "numerics", lambda: numerics(setting)
    with Lab(setting) as lab, Disk(lab.folder, seconds=1.0, file_bytes=FILE_BYTES // small) as disk:
        yield "first_token", lambda: first_token(lab, disk)
        yield "profile", lambda: profile(lab, 0.05)
        yield "decode", lambda: decode(lab, (0.05, 1.0, 0.01))


def run(path: Path, setting: Setting, *, limit_s: float, only: Sequence[str], small: int) -> Json:
    """Runs the stages and rewrites the file after each; what one raises is its result.

    A stage that is still running at `limit_s` ends the process with the stacks of its threads, as a
    kernel that hangs cannot be stopped otherwise.
    """
    if unknown := sorted({*only} - {*STAGES}):
        raise SystemExit(f"got stages {', '.join(unknown)}, expected some of {', '.join(STAGES)}")
    faulthandler.dump_traceback_later(limit_s, exit=True)
    began, results = time.perf_counter(), stamped({"setting": setting.to_json()})
    for name, stage in stages(setting, small=small):
        if only and name not in only:
            continue
        start = time.perf_counter()
        try:
            found = stage()
        except Exception:  # the stages after it answer questions of their own
            found = {"error": traceback.format_exc()}
        found["stage_s"] = round(time.perf_counter() - start, 1)
        results[name] = found
        write_text(path, json.dumps(results, indent=1) + "\n")
        print(f"{name}, {found['stage_s']} s: {json.dumps(found)[:3000]}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{time.perf_counter() - began:.0f} s in all")
    return results


def _timed(lab: Lab, engine: Engine, budget: float, question: int | None = None) -> Json:
    """Requests of a question each, or of one question over and over."""
    numbers = range(lab.setting.repeats)
    with Compilations() as compiled:
        found = [
            measured(lab, engine, 0, 100 + n if question is None else question, budget)
            for n in numbers
        ]
    times = [sample.ttft_ms for sample in found]
    return {
        "budget": budget,
        "p50_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "ssd_bytes": statistics.fmean(s.pack_bytes + s.probe_bytes for s in found),
        "breakdown_ms": {
            name: statistics.fmean(sample.breakdown_ms[name] for sample in found)
            for name in found[0].breakdown_ms
        },
        "compiled": compiled.count,
    }


def _difference(ours: Any, theirs: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return float("inf")
    return float(np.linalg.norm(a[finite] - b[finite]) / max(np.linalg.norm(b[finite]), 1e-30))


def _in_a_row(run: Callable[..., Any], operands: tuple[Any, ...]) -> float:
    """Seconds a call, of 20 that follow each other, the median of 5 such rows."""

    def row() -> None:
        for _ in range(20):
            out = run(*operands)
        jax.block_until_ready(out)

    return statistics.median(seconds(row) for _ in range(5)) / 20


def _chain(step: Callable[[Any], Any], x: Any) -> float:
    """Microseconds to dispatch one of `LOOPS` calls, without a wait for any result."""
    jax.block_until_ready(step(x))
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(LOOPS):
            x = step(x)
        spent.append((time.perf_counter() - start) / LOOPS)
        jax.block_until_ready(x)
    return 1e6 * statistics.median(spent)


def _each(step: Callable[[], Any]) -> float:
    step()
    return 1e6 * statistics.median(seconds(step) for _ in range(LOOPS))


def _rate(copy: Callable[[], jax.Array], size: int) -> float:
    copy().block_until_ready()
    return size / min(seconds(lambda: copy().block_until_ready()) for _ in range(5)) / 1e9
