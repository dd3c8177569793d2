"""Engines over random weights, and prefixes whose KV is random too: for benches of the machinery.

What is measured with them does not depend on what the numbers say, so no prefill is waited for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax import Engine, EngineConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.weights import random_model
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

SMALL = ModelConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=512, num_layers=16, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
)  # fmt: skip
"""A shape whose prefill of 16,000 tokens takes seconds, not minutes."""


def random_engine(model: ModelConfig, store: Path, *, seed: int = 0, **config: Any) -> Engine:
    """An engine whose texts never end by themselves. Equal arguments make equal models."""
    model = dataclasses.replace(model, eos_token_ids=())
    settings = EngineConfig(**{"warm_batch": 0} | config)
    # Not a hash of the weights, which follow from these and may be gigabytes.
    made = {"weights": f"random, seed {seed}", "config": str(model), "dtype": settings.dtype}
    return Engine(
        random_model(model, dtype=settings.dtype, seed=seed), None, ChunkStore.open(store),
        Fingerprint(made | {"tokenizer": "", "rope": ""}), settings,
    )  # fmt: skip


def random_prefix(engine: Engine, tokens: np.ndarray, *, seed: int = 0) -> Prefix:
    """Stores `tokens` int32 [T] with KV of the normal distribution."""
    layout = engine.layout
    rng = np.random.default_rng(seed)
    shape = (layout.num_layers, 2, len(tokens), layout.num_kv_heads, layout.head_dim)
    with engine.store.writer(
        fingerprint=engine.fingerprint, layout=layout, tokens=tokens, codec=engine.system.coder
    ) as writer:
        writer.write(0, rng.standard_normal(shape, np.float32).astype(layout.numpy_dtype))
        return writer.commit()


def random_tokens(engine: Engine, n: int, *, seed: int) -> np.ndarray:
    """Token ids int32 [n]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, engine.model_config.vocab_size, n).astype(np.int32)
