"""The small checkpoint and the config of what runs on several devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from model.small import write_tokenizer

from ckv_jax import EngineConfig, SystemConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.weights import random_model, save_pretrained
from ckv_jax.systems import system_of

MODEL = ModelConfig(
    vocab_size=2048, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=8,
    num_kv_heads=4, head_dim=8, tie_word_embeddings=False,
)  # fmt: skip
LARGEST = 2048 * 64 * 4  # bytes of its embedding


def checkpoint(folder: Path) -> Path:
    """Four KV heads, biases, a head of its own, and a tokenizer."""
    model = random_model(MODEL, dtype="float32")
    rng = np.random.default_rng(0)
    for layer in model.layers:
        for name in ("query_bias", "kv_bias"):
            bias = getattr(layer.attention, name)  # Qwen2.5 has them
            bias.set_value(jnp.asarray(rng.normal(0, 0.1, bias.shape), jnp.float32))
    save_pretrained(model, folder)
    write_tokenizer(folder)
    return folder


def system(name: str) -> SystemConfig:
    """The preset with two periods of these four layers."""
    small = {"period": 2, "subperiod": 2, "pack_layers": 2}
    found = system_of(name)
    return dataclasses.replace(found, **small) if found.chunked else found


def config(name: str, size: int) -> EngineConfig:
    """Pools of a few packs, so that a budget of 1.0 goes through them in parts."""
    return EngineConfig(
        system=system(name), dtype="float32", tensor_parallel=size,
        prefill_block=64, prefill_window=128,
        device_cache_bytes=200_000, prefetch_device_bytes=400_000, host_cache_bytes=0,
        compilation_cache=False,
    )  # fmt: skip
