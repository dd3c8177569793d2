"""Qwen3, its dense models: a norm on each head's queries and keys."""

from __future__ import annotations

from ckv_jax.model.families.family import NAMES, Family
from ckv_jax.model.families.qwen2 import has_window_layers

QWEN3 = Family(
    model_type="qwen3",
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    names={**NAMES, "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"},
    gguf="qwen3",
    defaults={"head_dim": 128},
    bias_switches=("attention_bias",),
    slides=has_window_layers,
    written={"use_sliding_window": False},
)
