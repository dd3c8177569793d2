"""Stage times and bytes of the published models on a GPU that is not here: FLOPs and bandwidths."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

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
    """Tokens demanded from SSD over tokens of the prefix (0.05 means amplification 1 at 5%)."""
    coverage: float
    waste: float
    """Of pack bytes."""

    @classmethod
    def of(cls, row: Json) -> Profile:
        """From a row of requests without a cache."""
        return cls(
            loaded_share=row["tokens_loaded"] / row["tokens_in_prefix"],
            coverage=row["coverage"],
            waste=row["waste"],
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
        share = min(1.0, 3 / model.num_kv_heads)
    probe_row = share * row
    queries = min(suffix, system.score_window or suffix)
    one = _time(accelerator, *_select(model, queries, probe_tokens, probe_row))
    select = one * system.score_layers
    embed, head = 5e-6, 2.0 * model.vocab_size * model.hidden_size / accelerator.memory_bandwidth
    if not system.chunked:
        keys, loaded = 0.0, profile.loaded_share * kv
        if system.selector == "h2o":
            keys = row * prefix
        elif system.selector == "all":
            keys = kv
        stage = Stage(
            select_s=0.0 if system.selector == "all" else select,
            compute_s=step,
            probe_bytes=round(probe_row * prefix) if system.probe == "heads" else 0,
            ahead_bytes=round(keys),
            demanded_bytes=round(max(0.0, loaded - keys)),
        )
        return Script(
            kind="all" if system.selector == "all" else "tokens",
            stages=(stage,) * model.num_layers,
            pack_bytes=system.chunk_tokens * row,
            embed_s=embed,
            head_s=head,
        )
    plan = Plan.of(model.num_layers, system)
    ahead = profile.coverage if system.prefetch == "inter" else 0.0
    wasted = profile.waste / max(1e-9, 1 - profile.waste) * profile.loaded_share * kv
    stages = tuple(
        Stage(
            select_s=select if s.selects else 0.0,
            compute_s=step * len(s.layers),
            probe_bytes=row * prefix if s.selects and system.probe == "keys" else 0,
            speculated_bytes=round(ahead * profile.loaded_share * kv * len(s.layers)),
            wasted_bytes=round(wasted * len(s.layers)),
            demanded_bytes=round((1 - ahead) * profile.loaded_share * kv * len(s.layers)),
        )
        for s in plan.steps
    )
    return Script(
        kind="ours",
        stages=stages,
        pack_bytes=2 * row * system.chunk_tokens * system.pack_layers,
        embed_s=embed,
        head_s=head,
        # Nothing covered: reading ahead did not pay, and was left out.
        lookahead_s=one if system.speculate == "lookahead" and ahead else 0.0,
    )


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
