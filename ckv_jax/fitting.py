"""Whether a system suits a model and its devices, and how the model's KV then lies."""

from __future__ import annotations

from dataclasses import replace

from ckv_jax.config import EngineConfig, SystemConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.storage.layout import Layout
from ckv_jax.systems import system_of


def system_for(config: EngineConfig) -> SystemConfig:
    """The system of `config`; over several processes one that they can run in step."""
    system = system_of(config.system)
    if config.processes == 1:
        return system
    for wrong, why in (
        (not system.chunked, "chooses tokens or everything layer by layer"),
        (system.coder is not None, f"has a codec, {system.codec!r}"),
    ):
        if wrong:
            raise ValueError(
                f"got processes={config.processes} with system {system.name!r}, which {why}: "
                "expected one that chooses chunks, such as 'ckv', without a codec"
            )
    # Whether a guess at the next period pays is a matter of one machine's clock.
    return replace(system, prefetch="intra") if system.prefetch == "inter" else system


def layout_of(system: SystemConfig, model: ModelConfig, dtype: str) -> Layout:
    """How `system` stores KV of `model`; `ValueError` for one that does not suit the model."""
    return system.layout(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def check_split(system: SystemConfig, devices: int) -> None:
    """`ValueError` for a model over several `devices` under a system in which some heads choose
    for all."""
    for wrong, why in (
        (system.probe == "heads", "its first heads"), (bool(system.heads), f"heads={system.heads}")
    ):  # fmt: skip
        if devices > 1 and wrong:
            raise ValueError(
                f"got tensor_parallel={devices} with system {system.name!r}, expected 1:"
                f" {why} decide what is read, and they are on one device"
            )


def check_processes(config: EngineConfig, processes: int) -> None:
    """`ValueError` for an engine of more or fewer processes than do something, or can."""
    if config.processes != processes:
        raise ValueError(
            f"got processes={config.processes}, expected {processes} here: see "
            "`ckv_jax.processes.join`, and docs/models.md for what several processes cannot do"
        )
