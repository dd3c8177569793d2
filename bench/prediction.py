"""One request on a device that is not here: the pipeline's model with published rates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bench import costs
from bench.aot.chips import CHIPS, GIB, Chip
from bench.aot.shapes import BLOCK, BUDGET, CALL_LAYERS, MODELS, PREFIX, SUFFIX
from bench.common import Json
from bench.simulation import Hardware, Script, Simulation
from ckv_jax.model.config import ModelConfig
from ckv_jax.systems import SYSTEMS, system_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A disk and a bus, bytes per second."""

    read_latency: float = 80e-6
    packs: float = 6.5e9
    """Random reads of 128 KiB. A published 7.45 GB/s is of long sequential ones."""
    probes: float = 7.45e9
    link: float
    """Half of what its standard allows: pinned copies reach about that."""

    @classmethod
    def of(cls, chip: Chip) -> Rates:
        """One NVMe disk on PCI Express 4.0, and this device's bus."""
        return cls(link=chip.link_bandwidth / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What is assumed of the host, in seconds; `bench.costs` has the same for its A800."""

    call: float = 120e-6
    """To dispatch a jitted call."""
    sync: float = 150e-6
    """To bring a selection's ids back."""
    job: float = 60e-6
    """To take a read's packs and start their copy."""

    def times(self, factor: float) -> Host:
        """All of them larger or smaller."""
        return Host(call=self.call * factor, sync=self.sync * factor, job=self.job * factor)


ASSUMED_REACH = 0.6
"""Of a GPU's peaks."""
MOST_JOBS = 32
"""Reads of one stage that are simulated one by one; of more, several are taken for one."""
FREE = 1e6
"""How much faster a part is that costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device with its disk and host."""

    chip: Chip
    reach: float
    rates: Rates
    host: Host = Host()

    def accelerator(self, *, memory: float = 1.0, flops: float = 1.0) -> costs.Accelerator:
        """For `bench.costs`, some of it faster by a factor."""
        rates, host = self.rates, self.host
        return costs.Accelerator(
            flops=self.chip.flops * flops,
            memory_bandwidth=self.chip.memory_bandwidth * memory,
            efficiency=self.reach,
            hardware=Hardware(
                name=self.chip.name,
                read_latency=rates.read_latency,
                pack_bandwidth=rates.packs,
                probe_bandwidth=rates.probes,
                threads=16,
                link_bandwidth=rates.link,
                job_overhead=host.job,
                call_overhead=host.call,
                sync_overhead=host.sync,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request."""

    model: ModelConfig
    system: str
    profiles: tuple[costs.Profile, ...]
    """What it may load and guess: the engine takes the faster."""
    prefix: int
    budget: float
    suffix: int = SUFFIX

    def seconds(self, accelerator: costs.Accelerator) -> float:
        """Until the first token."""
        if self.system == "recompute":
            return costs.recompute_s(self.model, accelerator, self.prefix + self.suffix)
        return min(self._simulated(accelerator, profile) for profile in self.profiles)

    def _simulated(self, accelerator: costs.Accelerator, profile: costs.Profile) -> float:
        script = costs.script(
            self.model, system_named(self.system), profile, accelerator,
            prefix=self.prefix, suffix=self.suffix, budget=self.budget,
        )  # fmt: skip
        return seconds_of(script, accelerator.hardware)


def seconds_of(script: Script, hardware: Hardware) -> float:
    """Until the first token; several of a stage's many reads are taken for one."""
    most = max(
        script.jobs(stage.ahead_bytes + stage.demanded_bytes + stage.speculated_bytes)
        for stage in script.stages
    )
    merged = max(1, most // MOST_JOBS)
    script = dataclasses.replace(script, packs_per_job=script.packs_per_job * merged)
    each = hardware.job_overhead * merged
    return _simulated(script, dataclasses.replace(hardware, job_overhead=each))


@functools.lru_cache(maxsize=4096)
def _simulated(script: Script, hardware: Hardware) -> float:
    return Simulation(script, hardware).run().ttft_s


def reach_of(chip: Chip, model: str, compiled: Sequence[Json], *, dense: bool) -> tuple[float, str]:
    """The share of the device's peak that a call of four layers reaches, over a suffix or over a
    block of a dense prefill, and who says so."""
    name, tokens, attended = ("prefill", BLOCK, 0.0) if dense else ("run", SUFFIX, BUDGET * PREFIX)
    for row in compiled:
        same = (row["target"], row["model"], row["program"]) == (chip.name, model, name)
        if same and row.get("optimal_ms"):
            peak = Machine(chip=chip, reach=1.0, rates=Rates.of(chip)).accelerator()
            best = costs.layer_s(MODELS[model], peak, tokens, attended)
            return min(1.0, CALL_LAYERS * best / (row["optimal_ms"] * 1e-3)), "compiler"
    return ASSUMED_REACH, "assumed"


def profiles_of(rows: Sequence[Json], system: str, budget: float) -> tuple[costs.Profile, ...]:
    """What `system` was seen to load at the nearest budget; all of it at 100%."""
    mine = [
        row for row in rows if row["system"] == system and row["variant"] in ("default", "always")
    ]
    if not mine:
        return ()
    nearest = min((abs(row["budget"] - budget), row["budget"]) for row in mine)[1]
    found = []
    for row in (row for row in mine if row["budget"] == nearest):
        profile = costs.Profile.of(row)
        if profile.loaded_share < budget:
            profile = dataclasses.replace(profile, loaded_share=budget)
        if budget == 1.0 and SYSTEMS[system].chunked:  # nothing is left to guess wrongly
            profile = costs.Profile(loaded_share=1.0, coverage=profile.coverage, unused=0.0)
        found.append(profile)
    return tuple(dict.fromkeys(found))


def bound_of(machine: Machine, question: Question, seconds: float) -> str:
    """What helps most if it costs nothing."""
    fast = dataclasses.replace
    free: Mapping[str, costs.Accelerator] = {
        "weights": machine.accelerator(memory=FREE),
        "arithmetic": machine.accelerator(flops=FREE),
        "disk": fast(
            machine,
            rates=fast(machine.rates, read_latency=0.0, packs=FREE * 1e9, probes=FREE * 1e9),
        ).accelerator(),
        "bus": fast(machine, rates=fast(machine.rates, link=FREE * 1e9)).accelerator(),
        "host": fast(machine, host=machine.host.times(0.0)).accelerator(),
    }
    saved = {name: seconds - question.seconds(part) for name, part in free.items()}
    return max(saved, key=lambda name: saved[name])


def predicted(machine: Machine, question: Question) -> Json:
    """One row."""
    seconds = question.seconds(machine.accelerator())
    low, high = (
        dataclasses.replace(machine, host=machine.host.times(factor)).accelerator()
        for factor in (0.5, 2.0)
    )
    return {
        "ms": seconds * 1e3,
        "low_ms": question.seconds(low) * 1e3,
        "high_ms": question.seconds(high) * 1e3,
        "bound": bound_of(machine, question, seconds),
    }


def fits(chip: Chip, model: str) -> bool:
    """Whether weights in bf16 and a GiB for packs and buffers fit."""
    return 2 * parameters(MODELS[model]) + GIB <= chip.memory_bytes


def parameters(model: ModelConfig) -> int:
    """Numbers in all matrices."""
    width, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * width + 2 * kv + 3 * model.intermediate_size)
    ends = 1 if model.tie_word_embeddings else 2
    return model.num_layers * layer + ends * model.vocab_size * model.hidden_size


DEVICES: Mapping[str, Chip] = MappingProxyType({chip.device: chip for chip in CHIPS.values()})
"""By what JAX calls them."""


def beside(
    rows: Sequence[Json], device: str, model: str, prefix: int, rates: Mapping[str, float]
) -> list[float | None]:
    """Predictions in ms for measured rows of `bench.ttft`, with the disk and bus that were measured
    there: `packs`, `probes` and `link` in bytes per second. None on a device not known here."""
    chip = DEVICES.get(device)
    if chip is None or model not in MODELS:
        return [None] * len(rows)
    machine = Machine(chip=chip, reach=ASSUMED_REACH, rates=Rates(**rates))
    found: list[float | None] = []
    for row in rows:
        loaded = costs.Profile.of(row | {"tokens_in_prefix": prefix})
        question = Question(
            model=MODELS[model], system=row["system"], profiles=(loaded,), prefix=prefix,
            budget=row["budget"],
        )  # fmt: skip
        found.append(question.seconds(machine.accelerator()) * 1e3)
    return found
