"""Stage times and bytes of the published models on a GPU that is not here: FLOPs and bandwidths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from bench.common import Json
from bench.simulation import Hardware, Script, Stage
from ckv_jax.config import SystemConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.pipeline.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device by its data sheet, and the share of it that such calls reach."""

    flops: float
    """bf16, dense, a second."""
    memory_bandwidth: float
    efficiency: float
    hardware: Hardware


PRESETS = MappingProxyType(
    {
        "a800-990pro": Accelerator(
            flops=312e12,
            memory_bandwidth=2.0e12,
            efficiency=0.5,
            hardware=Hardware(
                name="a800-990pro",
                read_latency=80e-6,
                pack_bandwidth=6.5e9,  # the paper measured 7.45 GB/s at its peak
                probe_bandwidth=7.45e9,
                threads=16,
                link_bandwidth=25e9,
                job_overhead=60e-6,
                call_overhead=120e-6,
                sync_overhead=150e-6,
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a system loads and speculates, as measured on the structured model."""

    loaded_share: float
    """Tokens of needed packs over tokens of the prefix (0.05 means amplification 1 at 5%)."""
    coverage: float
    unused: float
    """Of pack bytes."""
    device_hits: float = 0.0
    """Share of the needed packs' bytes that the device's cache has."""
    host_hits: float = 0.0
    """Share of them that host memory has."""

    @property
    def missed(self) -> float:
        """Share of them that come from the SSD."""
        return 1 - self.device_hits - self.host_hits

    @classmethod
    def of(cls, row: Json) -> Profile:
        """From a row of requests without a cache."""
        return cls(
            loaded_share=row["tokens_loaded"] / row["tokens_in_prefix"],
            coverage=row["coverage"],
            unused=row["unused"],
        )


def script(
    model: ModelConfig,
    system: SystemConfig,
    profile: Profile,
    accelerator: Accelerator,
    *,
    prefix: int,
    suffix: int,
    budget: float,
) -> Script:
    """One request of `system` on `model`, bf16."""
    row = 2 * model.num_kv_heads * model.head_dim  # bytes of a token's keys (or values), one layer
    kv = 2 * row * prefix
    attended = prefix if system.selector == "all" else budget * prefix
    step = _time(accelerator, *_layer(model, suffix, attended, row))
    probe_tokens = prefix if system.selector != "all" else 0
    share = {"int8": 1 / 2, "int4": 1 / 4, "pq": 1 / 16}.get(system.digest, 1.0)
    if system.probe == "heads":
        width = system.probe_width(model.num_heads, model.num_kv_heads)
        share = width / model.num_kv_heads
    probe_row = share * row
    queries = min(suffix, system.choose.queries or suffix)
    one = _time(accelerator, *_select(model, queries, probe_tokens, probe_row))
    select = one * system.choose.score_layers
    coarse, chunks = system.choose.coarse, -(-prefix // system.chunk_tokens)
    left = coarse.left(np.int32(math.ceil(budget * chunks)), chunks) if coarse else 0
    if coarse and left:
        first = _select(model, min(queries, coarse.queries), probe_tokens, probe_row)
        then = _select(model, queries, int(left) * system.chunk_tokens, probe_row)
        asking = len(coarse.layers(system.choose.score_layers))
        select = asking * _time(accelerator, *first)
        select += system.choose.score_layers * _time(accelerator, *then)
    embed, head = 5e-6, 2.0 * model.vocab_size * model.hidden_size / accelerator.memory_bandwidth
    loaded = profile.loaded_share * kv
    host = round(profile.host_hits * loaded)
    if not system.chunked:
        keys = {"h2o": row * prefix, "all": kv}.get(system.selector, 0)
        stage = Stage(
            select_s=0.0 if system.selector == "all" else select,
            compute_s=step,
            probe_bytes=round(probe_row * prefix) if system.probe == "heads" else 0,
            ahead_bytes=round(profile.missed * keys),
            demanded_bytes=round(profile.missed * max(0.0, loaded - keys)),
            host_bytes=host,
        )
        return Script(
            kind="all" if system.selector == "all" else "tokens",
            stages=(stage,) * model.num_layers,
            pack_bytes=system.chunk_tokens * row,
            embed_s=embed,
            head_s=head,
        )
    plan = Plan.of(model.num_layers, system)
    read = profile.missed * loaded
    unused = profile.unused / max(1e-9, 1 - profile.unused) * read
    covered = covered_shares(plan, profile.coverage if system.prefetch == "inter" else 0.0)
    unused *= len(plan.steps) / max(1, sum(s.period > 0 for s in plan.steps))
    stages = tuple(
        Stage(
            select_s=select if s.selects else 0.0,
            compute_s=step * len(s.layers),
            probe_bytes=row * prefix if s.selects and system.probe == "keys" else 0,
            speculated_bytes=round(known * read * len(s.layers)),
            unused_bytes=round(unused * len(s.layers)) if s.period else 0,
            demanded_bytes=round((1 - known) * read * len(s.layers)),
            host_bytes=host * len(s.layers),
        )
        for s, known in zip(plan.steps, covered, strict=True)
    )
    return Script(
        kind="ours",
        stages=stages,
        pack_bytes=2 * row * system.chunk_tokens * system.pack_layers,
        embed_s=embed,
        head_s=head,
        # Nothing covered: reading ahead did not pay, and was left out.
        lookahead_s=one if system.speculate == "lookahead" and any(covered) else 0.0,
    )


def covered_shares(plan: Plan, coverage: float) -> list[float]:
    """Share of each step's packs that speculation had asked for, `coverage` of all of them.

    Nothing is read ahead for the first period: questions one after the other are not alike.
    """
    later = sum(step.period > 0 for step in plan.steps)
    share = min(1.0, coverage * len(plan.steps) / max(1, later))
    return [share if step.period else 0.0 for step in plan.steps]


def layer_s(model: ModelConfig, accelerator: Accelerator, suffix: int, attended: float) -> float:
    """One layer over `suffix` new tokens that attend to so many others, bf16."""
    row = 2 * model.num_kv_heads * model.head_dim
    return _time(accelerator, *_layer(model, suffix, attended, row))


def recompute_s(model: ModelConfig, accelerator: Accelerator, tokens: int) -> float:
    """A dense prefill of `tokens`: compute-bound."""
    row = 2 * model.num_kv_heads * model.head_dim
    flops, size = _layer(model, tokens, tokens / 2, row)
    return model.num_layers * _time(accelerator, flops, size)


def _layer(model: ModelConfig, suffix: int, attended: float, row: int) -> tuple[float, float]:
    """FLOPs and bytes of one layer over `suffix` new tokens."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim
    kernels = hidden * (2 * width + row) + 3 * hidden * model.intermediate_size
    attention = 4.0 * suffix * (attended + suffix / 2) * width
    return 2.0 * suffix * kernels + attention, 2.0 * kernels + 4.0 * row * attended


def _select(model: ModelConfig, suffix: int, tokens: int, row: float) -> tuple[float, float]:
    """FLOPs and bytes of scoring `tokens` against a probe of `row` bytes each."""
    width = model.num_heads * model.head_dim
    return 2.0 * suffix * tokens * width, row * tokens + 8.0 * suffix * model.num_heads * tokens


def _time(accelerator: Accelerator, flops: float, size: float) -> float:
    reach = accelerator.efficiency
    return max(flops / (reach * accelerator.flops), size / (reach * accelerator.memory_bandwidth))
