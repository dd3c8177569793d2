"""A discrete-event model of the re-prefill pipeline, on SimPy: same schedule, times as parameters.

One engine process, reader threads that share a disk, one device. Requests are the traces of real
ones: how many packs each layer group demanded, how many speculation had asked for, and how many of
those were of use. The schedules are those of `pipeline.executor` and `pipeline.layerwise`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

Process = Generator[Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a machine can do. Times in seconds, sizes in bytes."""

    name: str
    read_latency: float
    """From asking for a read to its first byte."""
    pack_bandwidth: float
    """Bytes a second of all reader threads together, at the pack's size."""
    probe_bandwidth: float
    """The same for sequential reads."""
    thread_bandwidth: float = math.inf
    """Bytes a second of one reader thread by itself, at the pack's size."""
    threads: int
    link_bandwidth: float
    """Host to device; copies run beside the device's computing."""
    job_overhead: float
    """Engine thread, for each job that arrives: bookkeeping, and starting its copy."""
    call_overhead: float
    """Engine thread, for each jitted call: dispatch, tables, bookkeeping."""
    sync_overhead: float
    """For each selection brought to the host; where there is none, for each layer."""
    cores: float = math.inf
    """CPU cores that calls and readers share; with an accelerator they share nothing."""
    call_cores: float = 1.0
    """How many of them a call keeps busy, on average."""
    read_cpu: float = 0.0
    """Seconds of a core to read a byte."""
    io_overhead: float = 0.0
    """The software's seconds for each object that it reads (a pack, or a layer's probe), one after
    the other: what a storage layer in Python costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one stage of a request computes, and what it reads. A stage is a step of our plan (a
    subperiod), or one layer of a rival."""

    select_s: float = 0.0
    """Scoring and selecting before it; 0 where a selection is shared."""
    compute_s: float
    probe_bytes: int = 0
    """Read before it can select, ahead of time."""
    ahead_bytes: int = 0
    """Demanded whatever is selected (all keys, or everything)."""
    speculated_bytes: int = 0
    """Of needed packs that speculation asks for while the period before runs its layers."""
    unused_bytes: int = 0
    """Of packs that it asks for then and nobody needs."""
    demanded_bytes: int = 0
    """Of packs that only its own selection asks for."""
    host_bytes: int = 0
    """Of packs that host memory has, to be copied once they are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One request of one system."""

    kind: Literal["ours", "all", "tokens"]
    stages: tuple[Stage, ...]
    pack_bytes: int
    embed_s: float
    head_s: float
    lookahead_s: float = 0.0
    """A second scoring at each selection, for speculation."""
    read_ahead: int = 2
    """Stages whose unconditional reads are under way (rivals)."""
    packs_per_job: int = 16

    def __post_init__(self) -> None:
        if self.kind != "ours":
            return
        begin = [i for i, stage in enumerate(self.stages) if stage.select_s]
        for index in range(begin[1] if len(begin) > 1 else len(self.stages)):
            if self.stages[index].speculated_bytes or self.stages[index].unused_bytes:
                raise ValueError(
                    f"got speculated bytes in stage {index}, expected none in the first period: "
                    "there is no period before it that could ask for them"
                )

    def jobs(self, size: int) -> int:
        """Into how many reads so many bytes are cut."""
        return -(-size // (self.pack_bytes * self.packs_per_job))


@dataclass(slots=True)
class Outcome:
    """When the first token was there, and how the engine thread spent that time."""

    ttft_s: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("probe", "pack"), 0.0))
    asked_bytes: int = 0
    """Of all reads that were asked for."""


class Machine:
    """Shared resources: reader threads, the disk they share, and the device."""

    def __init__(self, env: simpy.Environment, hardware: Hardware) -> None:
        self.env = env
        self.hardware = hardware
        self.threads = simpy.PriorityResource(env, hardware.threads)
        self._disk = simpy.PriorityResource(env, 1)
        self._link = simpy.Resource(env, 1)
        self._last: simpy.Process | None = None  # call on the device
        self._reading = 0
        self._computing = 0
        self._changed = env.event()

    def read(self, size: int, *, objects: int, probe: bool, priority: int) -> Process:
        """One job of a reader thread: what the thread does by itself, and its turn at the disk."""
        hardware = self.hardware
        disk_s = size / (hardware.probe_bandwidth if probe else hardware.pack_bandwidth)
        alone_s = 0.0 if probe else max(0.0, size / hardware.thread_bandwidth - disk_s)
        with self.threads.request(priority=priority) as thread:
            yield thread
            yield self.env.timeout(hardware.read_latency)
            self._change("_reading", 1)
            yield from self._slowed(alone_s)
            with self._disk.request(priority=priority) as turn:
                yield turn
                busy_s = min(disk_s, size * hardware.read_cpu)  # of a core, beside the waiting
                yield from self._slowed(busy_s)
                yield self.env.timeout(disk_s - busy_s + objects * hardware.io_overhead)
            self._change("_reading", -1)

    def work(self, seconds: float) -> Process:
        """The engine thread's own work, which shares the cores like a call."""
        yield from self._slowed(seconds)

    def copy(self, size: int) -> Process:
        """One copy to the device."""
        with self._link.request() as turn:
            yield turn
            yield self.env.timeout(size / self.hardware.link_bandwidth)

    def call(self, seconds: float, after: simpy.Process | None) -> simpy.Process:
        """One call on the device: after those before it, and after the copies it reads."""
        self._last = self.env.process(self._compute(seconds, self._last, after))
        return self._last

    def _compute(self, seconds: float, *before: simpy.Process | None) -> Process:
        for process in before:
            if process is not None and process.is_alive:
                yield process
        self._change("_computing", 1)
        yield from self._slowed(seconds)
        self._change("_computing", -1)

    def _slow(self) -> float:
        """How much longer CPU work takes than alone, right now.

        Calls keep all cores busy for part of their time and one for the rest. Whenever more is
        asked of the cores than there are, all get their share of them.
        """
        hardware = self.hardware
        if math.isinf(hardware.cores):
            return 1.0
        rate = min(self._reading * hardware.thread_bandwidth, hardware.pack_bandwidth)
        reading = hardware.read_cpu * rate if self._reading else 0.0
        wide = (hardware.call_cores - 1) / max(1.0, hardware.cores - 1) if self._computing else 0.0
        wide = min(1.0, wide)
        return wide * (1 + reading / hardware.cores) + (1 - wide) * max(
            1.0, (1 + reading) / hardware.cores
        )

    def _slowed(self, seconds: float) -> Process:
        """Works for `seconds` of undisturbed time, which take longer while others work."""
        left = seconds
        while left > 1e-9:
            start, by = self.env.now, self._slow()
            yield self.env.timeout(left * by) | self._changed
            left -= (self.env.now - start) / by

    def _change(self, name: str, by: int) -> None:
        setattr(self, name, getattr(self, name) + by)
        self._changed.succeed()
        self._changed = self.env.event()


_BYTES = {
    "probe": "probe_bytes",
    "ahead": "ahead_bytes",
    "demand": "demanded_bytes",
    "speculate": "speculated_bytes",
    "unused": "unused_bytes",
}


class Simulation:
    """One request on a machine of its own."""

    def __init__(self, script: Script, hardware: Hardware) -> None:
        self._env = simpy.Environment()
        self._machine = Machine(self._env, hardware)
        self._script = script
        self._hardware = hardware
        self._reads: dict[tuple[str, int], list[simpy.Process]] = {}
        self._outcome = Outcome()
        self._copied: simpy.Process | None = None

    def run(self) -> Outcome:
        """Simulates until the first token."""
        schedule = {"ours": self._ours, "all": self._all, "tokens": self._tokens}
        self._env.run(self._env.process(schedule[self._script.kind]()))
        self._outcome.ttft_s = self._env.now
        return self._outcome

    def _ours(self) -> Process:
        """`pipeline.executor`: select, demand the period, speculate the next, run its steps."""
        stages = self._script.stages
        firsts = [i for i, stage in enumerate(stages) if stage.select_s] + [len(stages)]
        self._start("probe", firsts[0])
        self._call(self._script.embed_s)
        for first, after in itertools.pairwise(firsts):
            yield from self._wait("probe", first)
            self._call(stages[first].select_s)
            self._start("probe", after)
            yield self._call(0.0)  # the device is through with everything before
            yield from self._machine.work(self._hardware.sync_overhead)
            last = after == len(stages)
            guess = None if last else self._call(self._script.lookahead_s)
            for index in range(first, after):
                self._start("demand", index)
            if not self._script.lookahead_s:
                self._speculate(after, firsts)
            for index in range(first, after):
                yield from self._wait("speculate", index)
                yield from self._wait("demand", index)
                stage = stages[index]
                arrived = stage.speculated_bytes + stage.demanded_bytes
                yield from self._stage(arrived + stage.host_bytes)
                self._call(stages[index].compute_s)
                yield self._env.timeout(self._hardware.call_overhead)
                if guess is not None and guess.is_alive:
                    yield guess
                self._speculate(after, firsts)
        yield self._call(self._script.head_s)

    def _speculate(self, first: int, firsts: list[int]) -> None:
        """Asks, once, for what the period that begins at stage `first` will probably need."""
        if first < len(self._script.stages):
            for index in range(first, firsts[firsts.index(first) + 1]):
                self._start("speculate", index)
                self._start("unused", index)

    def _all(self) -> Process:
        """AttentionStore: everything a few layers ahead, no selection."""
        stages, ahead = self._script.stages, self._script.read_ahead
        for index in range(ahead):
            self._start("ahead", index)
        self._call(self._script.embed_s)
        for index, stage in enumerate(stages):
            self._start("ahead", index + ahead)
            yield from self._wait("ahead", index)
            yield from self._stage(stage.ahead_bytes + stage.host_bytes)
            # There is nothing to wait for before the end: the engine's work beside slows the call.
            self._call(stage.compute_s + self._hardware.sync_overhead)
            yield self._env.timeout(self._hardware.call_overhead)
        yield self._call(self._script.head_s)

    def _tokens(self) -> Process:
        """H2O and IMPRESS: keys or probe ahead, select, then what holds important tokens."""
        stages, ahead = self._script.stages, self._script.read_ahead
        for index in range(ahead):
            self._start("ahead", index)
            self._start("probe", index)
        self._call(self._script.embed_s)
        for index, stage in enumerate(stages):
            self._start("ahead", index + ahead)
            self._start("probe", index + ahead)
            yield from self._wait("probe", index)
            yield from self._wait("ahead", index)
            yield from self._stage(stage.ahead_bytes)
            yield self._call(stage.select_s)
            yield from self._machine.work(self._hardware.sync_overhead)
            self._start("demand", index)
            yield from self._wait("demand", index)
            yield from self._stage(stage.demanded_bytes + stage.host_bytes)
            self._call(stage.compute_s)
            yield self._env.timeout(self._hardware.call_overhead)
        yield self._call(self._script.head_s)

    def _call(self, seconds: float) -> simpy.Process:
        return self._machine.call(seconds, self._copied)

    def _start(self, kind: str, index: int) -> None:
        """Submits a stage's reads of one kind, cut into jobs, once."""
        if index >= len(self._script.stages) or (kind, index) in self._reads:
            return
        stage = self._script.stages[index]
        total: int = getattr(stage, _BYTES[kind])
        pack = self._script.pack_bytes
        job = max(total, 1) if kind == "probe" else pack * self._script.packs_per_job
        self._outcome.asked_bytes += total
        urgent = kind in ("probe", "demand") or self._script.kind == "all"
        self._reads[kind, index] = [
            self._env.process(
                self._machine.read(
                    size,
                    objects=1 if kind == "probe" else -(-size // pack),
                    probe=kind == "probe",
                    priority=0 if urgent else 1,
                )
            )
            for size in (min(job, total - done) for done in range(0, total, job))
        ]

    def _wait(self, kind: str, index: int) -> Process:
        reads = self._reads.get((kind, index), [])
        start = self._env.now
        for read in reads:
            if read.is_alive:
                yield read
        self._outcome.waits["probe" if kind == "probe" else "pack"] += self._env.now - start

    def _stage(self, size: int) -> Process:
        """What arrived goes to the device before the next call."""
        jobs = self._script.jobs(size)
        if jobs:
            yield from self._machine.work(jobs * self._hardware.job_overhead)
            self._copied = self._env.process(self._machine.copy(size))
