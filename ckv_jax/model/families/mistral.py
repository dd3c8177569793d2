"""Mistral: Llama's shape; its first models have a sliding window in every layer.

Its GGUF files name Llama's architecture, which computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckv_jax.model.families.family import NAMES, Family


def _slides(config: Mapping[str, Any]) -> bool:
    """A window as long as the context hides nothing."""
    window = config["sliding_window"]
    return window is not None and bool(window < config["max_position_embeddings"])


MISTRAL = Family(
    model_type="mistral",
    title="Mistral",
    architecture="MistralForCausalLM",
    names=NAMES,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    slides=_slides,
    written={"sliding_window": None},
)
