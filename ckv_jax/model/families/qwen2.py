"""Qwen2 and Qwen2.5: biased queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckv_jax.model.families.family import NAMES, Family


def has_window_layers(config: Mapping[str, Any]) -> bool:
    """Qwen's switch: layers from `max_window_layers` on see `sliding_window` tokens."""
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return False
    if config.get("layer_types") is not None:
        return False  # these say it for each layer and are looked at for every family
    layers: int = config.get("num_hidden_layers", 0)
    return bool(config.get("max_window_layers", 28) < layers)


QWEN2 = Family(
    model_type="qwen2",
    title="Qwen2.5",
    architecture="Qwen2ForCausalLM",
    names=NAMES,
    gguf="qwen2",
    always_biased=True,
    slides=has_window_layers,
    written={"use_sliding_window": False},
)
