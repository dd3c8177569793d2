"""The small models on which parity with transformers is shown, and their seeded weights."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.rope import YarnScaling
from ckv_jax.model.weights import random_model

GREEDY_PROMPT, GREEDY_TOKENS = 12, 32
TOKENS = GREEDY_PROMPT + GREEDY_TOKENS  # longer than the scaled cases' original context: YaRN works


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One configuration and the dtype in which both sides compute it."""

    name: str
    config: ModelConfig
    dtype: str = "float32"


def _config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


_YARN = YarnScaling(factor=4.0, original_max_position_embeddings=16)
_YARN_FULL = YarnScaling(
    factor=8.0,
    original_max_position_embeddings=32,
    beta_fast=16.0,
    beta_slow=2.0,
    mscale=0.8,
    mscale_all_dim=0.6,
    truncate=False,
)

CASES = {
    case.name: case
    for case in (
        ParityCase(name="gqa", config=_config()),
        ParityCase(name="tied", config=_config(tie_word_embeddings=True, rope_theta=1e4)),
        ParityCase(name="multihead", config=_config(num_kv_heads=4)),
        ParityCase(name="one_kv_head", config=_config(num_heads=7, num_kv_heads=1)),
        ParityCase(name="yarn", config=_config(rope_scaling=_YARN, max_position_embeddings=64)),
        ParityCase(name="yarn_full", config=_config(rope_scaling=_YARN_FULL, rms_norm_eps=1e-5)),
        ParityCase(name="wide_heads", config=_config(head_dim=32, intermediate_size=48)),
        ParityCase(name="deep", config=_config(num_layers=5, hidden_size=48)),
        ParityCase(name="bf16", config=_config(), dtype="bfloat16"),
        ParityCase(
            name="bf16_yarn_tied",
            config=_config(
                rope_scaling=_YARN,
                max_position_embeddings=64,
                tie_word_embeddings=True,
                num_layers=3,
            ),
            dtype="bfloat16",
        ),
    )
}


def parity_model(case: ParityCase) -> Transformer:
    """Random weights, four times HF's scale, so that attention is far from uniform.

    Biases and norms are random too: at their initial values they would hide mistakes.
    """
    model = random_model(case.config, dtype=case.dtype, seed=7)
    rng = np.random.default_rng(3)

    def stir(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 2:
            return leaf * jnp.asarray(4, leaf.dtype)
        noise = rng.normal(0.0, 0.3, leaf.shape).astype(np.float32)
        return (leaf.astype(jnp.float32) + noise).astype(leaf.dtype)

    nnx.update(model, jax.tree.map(stir, nnx.state(model)))
    return model


def prompt(case: ParityCase) -> np.ndarray:
    """Seeded token ids, int32 `[2, TOKENS]`."""
    rng = np.random.default_rng(11)
    return rng.integers(0, case.config.vocab_size, (2, TOKENS)).astype(np.int32)
