"""The compute floor: the jitted calls of one request alone, with everything on the device.

A request whose KV is all resident is asked once while its calls are recorded: which program, with
which arguments, and which of them another call had made. The same chain is then run again back to
back, without the engine around it: no reads, no host sync, no tables, one wait at the end.

The hardware floor knows nothing of our calls: see `hardware_floor_ms`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from bench.common import seconds
from bench.kernels import Ceiling, ceilings
from bench.lab import Lab
from bench.measure import measured
from ckv_jax import Engine
from ckv_jax.config import SystemConfig

REPLAYS = 9


@dataclass(frozen=True, slots=True)
class Made:
    """An argument whose leaves are, in part, what earlier calls returned."""

    tree: PyTreeDef
    leaves: tuple[Any, ...]
    """Arrays, or (call, leaf of its result)."""

    def build(self, results: Sequence[Sequence[Any]]) -> Any:
        """The argument, given the results so far."""
        return jax.tree.unflatten(
            self.tree, [results[x[0]][x[1]] if isinstance(x, tuple) else x for x in self.leaves]
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a jitted program."""

    name: str
    program: Callable[..., Any]
    args: tuple[Any, ...]
    """Values on the device, or `Made`."""
    static: dict[str, Any]


class Recording:
    """The jitted calls of one request, in order.

    Args:
        lasting: arrays that stay as they are; others are copied, as the engine reuses the host
            memory that some of them lie in.
    """

    def __init__(self, lasting: Any = ()) -> None:
        self._lasting = {id(leaf) for leaf in jax.tree.leaves(lasting)}
        self.calls: list[Call] = []
        self.results: list[list[Any]] = []
        """The leaves of every result as recorded; kept, so that ids stay unique."""
        self._made: dict[int, tuple[int, int]] = {}  # id of an array -> (call, leaf)

    def call(
        self, name: str, program: Callable[..., Any], args: tuple[Any, ...], static: dict[str, Any]
    ) -> Any:
        """Makes a call and writes it down; see `pipeline.programs.Watcher`."""
        call = Call(name, program, tuple(map(self._argument, args)), static)
        out = program(*args, **static)
        leaves = jax.tree.leaves(out)
        for index, leaf in enumerate(leaves):
            self._made[id(leaf)] = (len(self.calls), index)
        self.calls.append(call)
        self.results.append(leaves)
        return out

    def replay(self) -> list[list[Any]]:
        """Runs all calls again; the leaves of every result, computed."""
        results: list[list[Any]] = []
        for call in self.calls:
            args = [x.build(results) if isinstance(x, Made) else x for x in call.args]
            results.append(jax.tree.leaves(call.program(*args, **call.static)))
        jax.block_until_ready(results)
        return results

    def _argument(self, value: Any) -> Any:
        leaves, tree = jax.tree.flatten(value)
        known = [self._made.get(id(leaf)) for leaf in leaves]
        if any(known):
            return Made(tree, tuple(k or self._keep(x) for k, x in zip(known, leaves, strict=True)))
        return jax.tree.unflatten(tree, [self._keep(leaf) for leaf in leaves])

    def _keep(self, leaf: Any) -> Any:
        arrays = (np.ndarray, np.generic, jax.Array)
        if id(leaf) in self._lasting or not isinstance(leaf, arrays):
            return leaf
        return jnp.array(leaf, copy=True)


def record(lab: Lab, engine: Engine, budget: float) -> Recording:
    """A request over prefix 0, asked until all it needs is on the device, and then recorded."""
    for _ in range(2):
        lab.ask(engine, 0, 0, budget)
    engine.settle()
    lab.ask(engine, 0, 0, budget)
    found = Recording((engine.layers.weights, engine.worker.memory.pool.pages))
    with engine.layers.programs.watch(found.call):
        sample = measured(lab, engine, 0, 0, budget)
    if sample.demanded_bytes:
        raise RuntimeError(f"got {sample.demanded_bytes} bytes demanded, expected all resident")
    return found


def compute_floor_ms(lab: Lab, system: str | SystemConfig, budgets: Sequence[float]) -> list[float]:
    """For each budget the median ms of `REPLAYS` replays."""
    floors = []
    with lab.engine(system, device_bytes=2 * lab.kv_bytes + (64 << 20)) as engine:
        for budget in budgets:
            found = record(lab, engine, budget)
            found.replay()
            floors.append(1e3 * statistics.median(seconds(found.replay) for _ in range(REPLAYS)))
    return floors


@cache
def best_rates(dtype: str) -> Ceiling:
    """What the processor reads from memory, by all cores, and what a large product makes of it.

    Of an accelerator, what it copies in its own memory.
    """
    best = ceilings(jnp.dtype(dtype), REPLAYS)
    if jax.default_backend() != "cpu":
        return best
    words, cores = np.ones(1 << 27, np.uint64), os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        parts = np.array_split(words, cores)
        read = min(seconds(lambda: list(pool.map(np.max, parts))) for _ in range(REPLAYS))
    return Ceiling(
        bytes_per_s=max(words.nbytes / read, best.bytes_per_s), flop_per_s=best.flop_per_s
    )


def hardware_floor_ms(
    lab: Lab, system: SystemConfig, budget: float, io_ms: float, read_ms: float
) -> float:
    """The least milliseconds of a request on this machine: its reads (`io_ms`), or its layers and
    the reads that they wait for, if that is longer.

    Layers wait for one read (`read_ms`) after the first selection, or after each if nothing is read
    ahead: other reads may land while layers compute. Layers take every weight, the digests and the
    selected keys and values from memory once, or the operations with all of them. Nothing else is
    counted.
    """
    config, layout, tokens = lab.config, lab.layout(system), lab.work.prefix_tokens
    rows = lab.setting.suffix_tokens + (tokens if system.computes_all else 0)
    kept = 0 if system.computes_all else budget * tokens
    coarse = system.reprefill.coarse is not None  # may score one layer by one query
    scored = 0 if budget >= 1 else 1 if coarse else len(layout.digest_layers)
    queries = 1 if coarse else min(rows, system.reprefill.queries or rows)
    weights = sum(leaf.size for leaf in jax.tree.leaves(lab.base.layers.weights[0]))
    head = config.vocab_size * config.hidden_size
    attended = kept * config.num_layers * rows + tokens * scored * queries / 2  # K and V, or K
    flop = 2 * (weights * rows + head) + 4 * attended * config.num_heads * config.head_dim
    pair = 2 * config.num_kv_heads * config.head_dim
    size = (weights + head + kept * config.num_layers * pair) * layout.numpy_dtype.itemsize
    size += scored * sum(layout.digest_record(tokens))
    rates = best_rates(lab.setting.dtype)
    ahead = system.prefetch == "previous" or system.own.executor is not None
    waits = 0.0 if budget >= 1 or not io_ms else 1 if ahead else config.num_layers / system.period
    return max(io_ms, 1e3 * rates.seconds(size, flop) + waits * read_ms)
