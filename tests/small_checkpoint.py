"""A checkpoint in HF format, small enough to be loaded in every test of commands and servers."""

from __future__ import annotations

from pathlib import Path

from ckv_jax.data.reference import random_checkpoint


def small_checkpoint(folder: Path, *, dtype: str = "bfloat16") -> Path:
    """Two layers with random weights; a tokenizer that reads any text."""
    return random_checkpoint(
        folder,
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=512,
        dtype=dtype,
    )
