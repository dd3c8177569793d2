"""Map of a model's parameters to the HF tensors of a checkpoint, and the sizes of both."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckv_jax.model.checkpoint import TensorSource, check_fit, is_orbax, locate, stored_dtype
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.gguf import GgufModel, is_gguf

_log = logging.getLogger(__name__)
_GIB = 2**30
MEMORIES: dict[str, int] = {
    "16 GiB (TPU v5e, T4)": 16 * _GIB,
    "24 GiB (L4, A10)": 24 * _GIB,
    "32 GiB (TPU v6e)": 32 * _GIB,
    "48 GiB (L40S)": 48 * _GIB,
    "80 GiB (A100, H100)": 80 * _GIB,
    "95 GiB (TPU v5p)": 95 * _GIB,
    "141 GB (H200)": 141 * 10**9,
    "192 GB (B200, TPU v7x)": 192 * 10**9,
}
"""Device memories, in bytes, that a model may be asked to fit."""

_WORK = 0.1  # share of a device that activations, programs and the runtime may take
_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter: where it is in the module tree and what it is made of.

    A kernel is HF's `[out, in]` weights end to end, transposed unless the model is `out_first`;
    a bias is HF's biases end to end; anything else is one tensor as it is.
    """

    path: tuple[str | int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # HF name and shape
    kernel: bool = False


def parameters_of(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the model, in the order of the forward pass."""
    names = config.family.names
    hidden, vocab = config.hidden_size, config.vocab_size
    parameters = [_whole(("embedding",), names["embedding"], (vocab, hidden))]
    for layer in range(config.num_layers):
        parameters += _layer(config, layer)
    parameters.append(_whole(("final_norm", "weight"), names["final_norm"], (hidden,)))
    if not config.tie_word_embeddings:
        parameters.append(_whole(("head",), names["head"], (vocab, hidden)))
    return parameters


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every HF tensor of the model, by its name."""
    return dict(tensor for parameter in parameters_of(config) for tensor in parameter.tensors)


def count_parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def open_tensors(folder: Path) -> tuple[ModelConfig, dict[str, TensorSource]]:
    """A checkpoint's config, and what holds each of the model's tensors, by HF name.

    A head that a tied model's files hold all the same is ignored where it equals the embedding;
    one that differs is used, with a warning, as transformers does. Raises `CheckpointError` for
    tensors that do not fit the config and `UnsupportedModel` for a config that is not supported.
    """
    config = ModelConfig.from_hf(folder)
    sources = locate(folder)
    names = config.family.names
    embedding, head = f"{names['embedding']}.weight", f"{names['head']}.weight"
    if config.tie_word_embeddings and head in sources and embedding in sources:
        values, others = (sources[name].read(name) for name in (embedding, head))
        if np.array_equal(values, others):
            del sources[head]
        else:
            _log.warning(
                "%s: the config ties the head to the embedding, but the files hold another head "
                "(%s), which is used",
                folder, head,
            )  # fmt: skip
            config = replace(config, tie_word_embeddings=False)
    found = {name: source.shapes[name] for name, source in sources.items()}
    check_fit(folder, tensor_shapes(config), found)
    return config, sources


def _layer(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    names, at = config.family.names, config.family.names["layer"].format(layer)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, kv = config.num_heads * dim, config.num_kv_heads * dim

    def norm(part: str, size: int, *path: str) -> Parameter:
        return _whole(("layers", layer, *path, "weight"), f"{at}.{names[part]}", (size,))

    def linear(
        module: str, ours: str, parts: tuple[str, ...], rows: int, columns: int, biased: bool
    ) -> Iterator[Parameter]:
        """A kernel made of the weights `[rows, columns]` of HF's `parts`, and its bias."""
        path = ("layers", layer, module)
        theirs = [f"{at}.{names[part]}" for part in parts]
        weights = tuple((f"{name}.weight", (rows, columns)) for name in theirs)
        yield Parameter(path=(*path, f"{ours}_kernel"), tensors=weights, kernel=True)
        if biased:
            biases = tuple((f"{name}.bias", (rows,)) for name in theirs)
            yield Parameter(path=(*path, f"{ours}_bias"), tensors=biases)

    yield norm("input_norm", hidden, "input_norm")
    yield from linear("attention", "query", ("query",), queries, hidden, config.qkv_bias)
    yield from linear("attention", "kv", ("key", "value"), kv, hidden, config.qkv_bias)
    if config.family.query_key_norm:
        yield norm("query_norm", dim, "attention", "query_norm")
        yield norm("key_norm", dim, "attention", "key_norm")
    yield from linear("attention", "output", ("output",), hidden, queries, config.attention_bias)
    yield norm("post_norm", hidden, "post_norm")
    yield from linear("mlp", "gate_up", ("gate", "up"), inner, hidden, config.mlp_bias)
    yield from linear("mlp", "down", ("down",), hidden, inner, config.mlp_bias)


def _whole(path: tuple[str | int, ...], name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(path=path, tensors=((f"{name}.weight", shape),))


# -- sizes of a checkpoint -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One device: what is left of it beside the weights and a tenth for computing."""

    memory: str
    bytes: int
    room: int
    """Bytes for KV; negative: so many are missing for the weights alone."""
    tokens: int
    """Tokens whose KV fits into the room at once, of any number of texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One checkpoint."""

    config: ModelConfig
    format: str
    """`hf`, `orbax` or `gguf`."""
    stored_dtype: str
    """The element type of the weights; of a GGUF file all of them, the most frequent first."""
    parameters: int

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights in an element type."""
        return self.parameters * _WIDTH[dtype]

    def kv_bytes(self, dtype: str) -> int:
        """Keys and values of one token over all layers, in memory and on disk alike."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * _WIDTH[dtype]

    def fits(self, dtype: str) -> list[Fit]:
        """Returns how much KV fits into each of `MEMORIES`."""
        found = []
        for memory, size in MEMORIES.items():
            room = int(size * (1 - _WORK)) - self.weight_bytes(dtype)
            tokens = max(0, room) // self.kv_bytes(dtype)
            found.append(Fit(memory=memory, bytes=size, room=room, tokens=tokens))
        return found

    def to_json(self, dtype: str) -> dict[str, Any]:
        """Everything, with the sizes in an element type."""
        c = self.config
        return {
            "family": c.family.title,
            "format": self.format,
            "stored_dtype": self.stored_dtype,
            "parameters": self.parameters,
            "config": asdict(c),
            "rope_type": "default" if c.rope_scaling is None else c.rope_scaling.rope_type,
            "dtype": dtype,
            "weight_bytes": self.weight_bytes(dtype),
            "kv_bytes_per_token": self.kv_bytes(dtype),
            "kv_bytes_of_full_context": self.kv_bytes(dtype) * c.max_position_embeddings,
            "fits": [asdict(fit) for fit in self.fits(dtype)],
        }


def inspect_model(folder: Path) -> ModelInfo:
    """A checkpoint, by its config and the headers of its weight files.

    Raises `CheckpointError` for what is no checkpoint or whose tensors do not fit its config, and
    `UnsupportedModel` with the reason.
    """
    if is_orbax(folder):  # what it holds is checked when it is restored
        config, form, stored = ModelConfig.from_hf(folder), "orbax", stored_dtype(folder)
    elif is_gguf(folder):
        kinds = Counter(GgufModel(folder).types.values()).most_common()
        config, form = open_tensors(folder)[0], "gguf"
        stored = ", ".join(kind for kind, _ in kinds)
    else:
        config, form, stored = open_tensors(folder)[0], "hf", stored_dtype(folder)
    return ModelInfo(
        config=config, format=form, stored_dtype=stored, parameters=count_parameters(config)
    )
