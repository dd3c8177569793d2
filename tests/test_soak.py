"""Hundreds of requests of every kind, given up and late ones too: nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from pathlib import Path

import jax
import psutil
import pytest
from compilations import compilations
from engine_support import tokens
from engine_tiny import tiny_engine

from ckv_jax import Engine, Request, SamplingParams, Sequence
from ckv_jax.storage.prefix import Prefix

REQUESTS = 1_200
WARM = 600
"""Requests until every shape is compiled and every cache is full."""
GROWTH = 1.2 * 2**20
"""Bytes that may be allocated and not freed after those: 2 KiB a request."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    rng = random.Random(0)
    with tiny_engine(
        tmp_path,
        nothing_compiled=True,
        max_batch=2,
        device_cache_bytes=2**14,
        host_cache_bytes=2**14,
    ) as engine:
        prefixes = [engine.ingest(tokens(n, n)) for n in (140, 130)]
        engine.warmup(prefixes[0], max_batch=2, max_suffix=16, budgets=[0.2, 0.6], max_tokens=6)
        before, memory, programs = {}, 0, 0
        for served in range(0, REQUESTS, 20):
            if served == WARM:
                before, memory, programs = held(), allocated(), compilations()
            one_round(engine, prefixes, rng)
        assert left_behind(before) == {}
        assert_idle(engine)
        assert compilations() == programs
        assert allocated() - memory < GROWTH


def held() -> dict[str, int]:
    """How many there are of what a request could leave behind, while none is being served."""
    gc.collect()
    return {
        "threads": threading.active_count(),
        "descriptors": psutil.Process().num_fds(),
        "arrays": len(jax.live_arrays()),
        "objects": sum(str(type(x).__module__).startswith("ckv_jax") for x in gc.get_objects()),
    }


def left_behind(before: dict[str, int]) -> dict[str, int]:
    """What there is more of than before. The engine's thread lets go of a request a moment after it
    has handed the answer over: what goes within seconds was not left behind."""
    more = {"": 0}
    until = time.monotonic() + 10
    while more and time.monotonic() < until:
        time.sleep(0.05)
        more = {name: n - before[name] for name, n in held().items() if n > before[name]}
    return more


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


def allocated() -> int:
    """Bytes that are in use of what the C library has given out: without its own spare room, which
    comes and goes by more than what leaks."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def one_round(engine: Engine, prefixes: list[Prefix], rng: random.Random) -> None:
    """Twenty requests, waited for."""
    handles: list[Sequence] = []
    for number in range(20):
        kind = rng.random()
        request = Request(
            prefix=rng.choice(prefixes) if kind < 0.95 else "nowhere",
            suffix=[rng.randrange(128) for _ in range(rng.randint(1, 16))],
            budget=rng.choice([0.2, 0.6]),
            deadline_s=rng.choice([None, None, 60.0, 1e-6, 0.01]),
            id=str(number),
        )
        sampling = SamplingParams(max_tokens=rng.randint(1, 6)) if kind < 0.1 else None
        handles.append(engine.submit(request, sampling))
        if rng.random() < 0.1:
            rng.choice(handles).cancel()
    for handle in handles:
        handle.settled_result()


def assert_idle(engine: Engine) -> None:
    tiers, stats = engine._worker.memory.tiers, engine.stats()
    assert tiers.device.free == tiers.slots - tiers.device_pages
    assert stats.pinned_packs == 0 and not tiers._table.pins.any()
    assert stats.queue == stats.running == stats.jobs == 0
