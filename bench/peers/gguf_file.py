"""A checkpoint as one GGUF file, which llama.cpp reads.

Matrices are bfloat16 or Q8_0, what has one dimension float32, and there is no tokenizer in it: ids
go in and come out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
    quantize,
)
from gguf.quants import quant_shape_to_byte_shape

from ckv_jax.model.checkpoint import check_fit, locate
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.tensor_map import tensor_shapes

Kind = Literal["BF16", "Q8_0"]


def write_gguf(folder: Path, path: Path, kind: Kind = "BF16") -> None:
    """Writes the checkpoint in `folder` to `path`, its matrices as `kind`, tensor by tensor.

    Raises `ValueError` for a family other than Qwen2, or one whose RoPE is scaled, and
    `CheckpointError` for a folder that is not a checkpoint.
    """
    config = ModelConfig.from_hf(folder)
    if config.model_type != "qwen2" or config.rope_scaling is not None:
        raise ValueError(f"got {config.model_type}, expected qwen2 without scaled RoPE")
    files, shapes = locate(folder), tensor_shapes(config)
    check_fit(folder, shapes, {name: file.shapes[name] for name, file in files.items()})
    out = GGUFWriter(path, "qwen2")
    out.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    out.add_quantization_version(GGML_QUANT_VERSION)
    _add_sizes(out, config)
    names = get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_layers)
    kinds = {
        name: GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        for name, shape in shapes.items()
    }
    for name, shape in shapes.items():
        stored = quant_shape_to_byte_shape(shape, kinds[name])
        theirs = names.get_name(name, (".weight", ".bias"))
        out.add_tensor_info(theirs, stored, np.dtype(np.uint8), math.prod(stored), kinds[name])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for name, of_type in kinds.items():
        out.write_tensor_data(quantize(files[name].read(name).astype(np.float32), of_type))
    out.close()


def _add_sizes(out: GGUFWriter, config: ModelConfig) -> None:
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_heads)
    out.add_head_count_kv(config.num_kv_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_theta)
    out.add_rope_dimension_count(config.head_dim)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("none")
