"""GGUF files of small checkpoints, written by the gguf package as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from safetensors import safe_open
from safetensors.numpy import save_file

PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, *, kind: str = "F32", **writer: Any) -> Path:
    """The checkpoint in `folder` as GGUF, its matrices of the type `kind`; Q4_K has random
    blocks, since nothing in Python quantises to it. The folder's weights become what the file
    holds, so that transformers computes with the same ones."""
    config = json.loads((folder / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    out = GGUFWriter(path, arch, **writer)
    write_metadata(out, config)
    if (folder / "tokenizer.json").is_file():
        write_tokenizer_metadata(out, folder)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kept: dict[str, np.ndarray] = {}
    with safe_open(str(folder / "model.safetensors"), "np") as file:
        for name in file.keys():  # noqa: SIM118
            values = file.get_tensor(name)
            part = name.split(".")[-2]
            rows = np.arange(len(values))
            if arch == "llama" and part in heads:
                rows = reordered(rows, heads[part])
            stored = values[rows]
            if values.ndim == 1 or kind == "F32":
                out.add_tensor(gguf_name(name), stored)
            else:
                dtype = GGMLQuantizationType[kind]
                data = k_blocks(stored.shape) if kind == "Q4_K" else quantize(stored, dtype)
                out.add_tensor(gguf_name(name), data, raw_dtype=dtype)
                stored = dequantize(data, dtype)
            kept[name] = np.empty_like(values)
            kept[name][rows] = stored
    save_file(kept, str(folder / "model.safetensors"), {"format": "pt"})
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        out.add_tensor("rope_freqs.weight", rope_factors(rope, config["head_dim"]))
    finish(out)
    return path


def finish(out: GGUFWriter) -> None:
    """Write all of it to disk."""
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_metadata(out: GGUFWriter, config: Mapping[str, Any]) -> None:
    """The sizes, and how RoPE is stretched."""
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_rope_dimension_count(dim)
    rope = config["rope_parameters"]
    out.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        from gguf import RopeScalingType

        out.add_rope_scaling_type(RopeScalingType.YARN)
        out.add_rope_scaling_factor(rope["factor"])
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write_tokenizer_metadata(out: GGUFWriter, folder: Path, *, pre: str = "gpt-2") -> None:
    """A byte-level BPE, and the chat template beside it."""
    body = json.loads((folder / "tokenizer.json").read_text())
    added = {entry["id"]: entry["content"] for entry in body["added_tokens"]}
    tokens = {i: token for token, i in body["model"]["vocab"].items()} | added
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in body["model"]["merges"]]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list([tokens[i] for i in range(len(tokens))])
    kinds = [TokenType.CONTROL if i in added else TokenType.NORMAL for i in range(len(tokens))]
    out.add_token_types(kinds)
    out.add_token_merges(merges)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {token: i for i, token in tokens.items()}
    if (end := settings.get("eos_token")) is not None:
        out.add_eos_token_id(ids[end])
    if (begin := settings.get("bos_token")) is not None:
        out.add_bos_token_id(ids[begin])
        out.add_add_bos_token(True)
    if (folder / "chat_template.jinja").is_file():
        out.add_chat_template((folder / "chat_template.jinja").read_text())


def reordered(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries or keys: pairs of a head side by side."""
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def gguf_name(name: str) -> str:
    """llama.cpp's name of Hugging Face's tensor."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{PARTS[stem]}.{kind}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{PARTS[module]}.{kind}"


def k_blocks(shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks of Q4_K, 144 bytes of 256 values: the first are its two scales, small ones."""
    rng = np.random.default_rng(math.prod(shape))
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), np.uint8)
    blocks[..., :4] = np.full(2, 0.0005, np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def rope_factors(rope: Mapping[str, Any], dim: int) -> np.ndarray:
    """The divisors of each pair's speed, as llama.cpp's converter computes them."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    trained, factors = rope["original_max_position_embeddings"], []
    for at in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (at / dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(rope["factor"])
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
