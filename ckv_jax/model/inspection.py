"""What a checkpoint is and what it takes, told without loading a weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckv_jax.model.checkpoint import is_orbax, stored_dtype
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.gguf import GgufModel, is_gguf
from ckv_jax.model.tensor_map import count_parameters, open_tensors

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
        """What fits into each of `MEMORIES`."""
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
        config, form, stored = open_tensors(folder)[0], "gguf", _gguf_types(folder)
    else:
        config, form, stored = open_tensors(folder)[0], "hf", stored_dtype(folder)
    return ModelInfo(
        config=config,
        format=form,
        stored_dtype=stored,
        parameters=count_parameters(config),
    )


def _gguf_types(path: Path) -> str:
    """The element types of a GGUF model by ggml's names, most frequent first."""
    return ", ".join(kind for kind, _ in Counter(GgufModel(path).types.values()).most_common())
