"""A checkpoint as one GGUF file, which llama.cpp reads.

Version 3 of the format (docs/gguf.md of ggml): magic, version, how many tensors and pairs; pairs of
name and value; for every tensor its name, its shape innermost first, its type and where its data
begin; then the data, each at a multiple of 32 bytes. Everything is little-endian. Matrices are
bfloat16, what has one dimension float32, and there is no tokenizer in it: ids go in and come out.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from ckv_jax.model.checkpoint import check_fit, locate
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.tensor_map import tensor_shapes

ALIGNMENT = 32
FLOAT32, BFLOAT16 = 0, 30
"""Of ggml's tensor types."""
MOSTLY_BFLOAT16 = 32
"""Of llama.cpp's file types."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Writes the checkpoint in `folder` to `path`.

    Raises `ValueError` for a family other than Qwen2, or one whose RoPE is scaled, and
    `CheckpointError` for a folder that is not a checkpoint.
    """
    config = ModelConfig.from_hf(folder)
    if config.model_type != "qwen2" or config.rope_scaling is not None:
        raise ValueError(f"got {config.model_type}, expected qwen2 without scaled RoPE")
    files, shapes = locate(folder), tensor_shapes(config)
    check_fit(folder, shapes, {name: file.shapes[name] for name, file in files.items()})
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(_pairs(config))))
    for key, value in _pairs(config).items():
        head += _string(key) + _value(value)
    offset = 0
    for name, shape in shapes.items():
        kind, size = _stored(shape)
        head += _string(gguf_name(name)) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        offset += _padded(size)
    with path.open("wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for name, shape in shapes.items():
            kind, size = _stored(shape)
            dtype = np.float32 if kind == FLOAT32 else ml_dtypes.bfloat16
            data = np.ascontiguousarray(files[name].read(name), dtype)
            file.write(data.tobytes().ljust(_padded(size), b"\0"))


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of HF's."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def _pairs(config: ModelConfig) -> dict[str, str | int | float]:
    sizes: dict[str, str | int | float] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": "qwen2",
        "general.alignment": ALIGNMENT,
        "general.file_type": MOSTLY_BFLOAT16,
        **{f"qwen2.{name}": value for name, value in sizes.items()},
        "tokenizer.ggml.model": "none",
    }


def _value(value: str | int | float) -> bytes:
    """The type's number (8 string, 4 uint32, 6 float32) and the value."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _stored(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's type, and its bytes."""
    kind = FLOAT32 if len(shape) == 1 else BFLOAT16
    return kind, math.prod(shape) * (4 if kind == FLOAT32 else 2)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
