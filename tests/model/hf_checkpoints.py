"""Tiny random checkpoints of every family, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}

CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-odd": {
        "model_type": "qwen3",
        "hidden_size": 42,
        "intermediate_size": 37,
        "vocab_size": 157,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 18,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama-odd": {
        "model_type": "llama",
        "hidden_size": 45,
        "intermediate_size": 31,
        "vocab_size": 131,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 22,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3 | {"factor": 3.0, "high_freq_factor": 2.5},
    },
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-odd": {
        "model_type": "mistral",
        "sliding_window": 4096,
        "hidden_size": 51,
        "intermediate_size": 29,
        "vocab_size": 101,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 14,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def write_checkpoint(folder: Path, name: str, **changes: Any) -> Any:
    """Save a case to `folder` in float32; returns transformers' model of it.

    Kernels are five times HF's scale, so that attention is far from uniform; biases and norms are
    random: at their initial values they would hide mistakes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = SIZES | CASES[name] | changes
    config = AutoConfig.for_model(**values)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 5
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    return model


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """transformers' float32 logits of every position of `tokens` [B, S]."""
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(tokens).long()).logits.float().numpy()
    return logits
