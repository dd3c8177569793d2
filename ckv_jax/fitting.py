"""Whether a system suits a model and its devices, and how the model's KV then lies."""

from __future__ import annotations

from ckv_jax.config import SystemConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.storage.layout import Layout


def layout_of(system: SystemConfig, model: ModelConfig, dtype: str) -> Layout:
    """How `system` stores KV of `model`; `ValueError` for one that does not suit the model."""
    return system.layout(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def check_split(system: SystemConfig, layout: Layout, devices: int) -> None:
    """`ValueError` for a model over several `devices` under a system whose packs, or what selects
    them, are of some heads alone."""
    if devices > 1 and (layout.pack_heads < layout.num_kv_heads or layout.probe == "heads"):
        raise ValueError(
            f"got tensor_parallel={devices} with system {system.name!r}, expected 1: some of its "
            "heads decide by themselves what is read, and each is on one device"
        )
