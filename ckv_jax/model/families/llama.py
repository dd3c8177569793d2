"""Llama, 1 to 3.3, and the many models that took its shape."""

from __future__ import annotations

from ckv_jax.model.families.family import NAMES, Family

LLAMA = Family(
    model_type="llama",
    title="Llama",
    architecture="LlamaForCausalLM",
    names=NAMES,
    gguf="llama",
    gguf_pairs=True,
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    bias_switches=("attention_bias", "mlp_bias"),
)
