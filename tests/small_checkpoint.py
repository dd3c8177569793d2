"""A checkpoint in HF format, small enough to be loaded in every test of commands and servers."""

from __future__ import annotations

from pathlib import Path

from ckv_jax.data.reference import random_checkpoint, save_tokenizer


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


def transformers_checkpoint(folder: Path) -> None:
    """One of Qwen2.5's kind as transformers writes it, with random weights."""
    import torch
    import transformers

    folder.mkdir()
    config = transformers.Qwen2Config(
        vocab_size=save_tokenizer(folder, 512),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
