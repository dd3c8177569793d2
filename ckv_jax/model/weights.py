"""Models in and out of memory: random ones here; checkpoints follow."""

from __future__ import annotations

from flax import nnx

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.qwen2 import Qwen2

__all__ = ["random_model"]


def random_model(config: ModelConfig, *, dtype: str = "bfloat16", seed: int = 0) -> Qwen2:
    """A freshly initialised model; the same seed and config give the same weights."""
    return Qwen2(config, dtype=dtype, rngs=nnx.Rngs(seed))
