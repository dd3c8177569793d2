"""Models in and out of memory: HF safetensors folders, Orbax checkpoints, and random weights."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.checkpoint import INDEX, SINGLE, check_fit, is_orbax, locate
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.orbax_store import restore_orbax, save_orbax
from ckv_jax.model.safetensors_file import write_safetensors
from ckv_jax.model.tensor_map import Slot, tensor_shapes, tensor_slots

__all__ = [
    "load_pretrained",
    "random_model",
    "restore_orbax",
    "save_orbax",
    "save_pretrained",
]

_SHARD_BYTES = 4 * 2**30


def load_pretrained(
    folder: str | Path, *, dtype: str = "bfloat16", target: Target | None = None
) -> Transformer:
    """The model of a checkpoint folder, its weights converted to `dtype` on the device.

    A folder that `save_orbax` wrote is restored; any other is in HF's format. There, every tensor
    is checked before any is read: one that is missing, unknown, named twice or of the wrong shape
    raises a `CheckpointError` that names it. Tensors then go to the default device one at a time,
    so host memory holds one tensor, or the two of one fused kernel.
    `target`: what its calls will be compiled for; None: the default device.
    Raises `UnsupportedModel` for a config that this model cannot honour.
    """
    folder = Path(folder)
    if is_orbax(folder):
        return _ordered(restore_orbax(folder, dtype=dtype, target=target))
    config = ModelConfig.from_hf(folder)
    slots = tensor_slots(config)
    files = locate(folder)
    check_fit(
        folder, tensor_shapes(config), {name: file.shapes[name] for name, file in files.items()}
    )
    model = Transformer.abstract(config, dtype=dtype, out_first=_out_first(dtype), target=target)
    values: dict[str | int, Any] = {}
    for slot in slots:
        parts = [jax.device_put(files[name].read(name)) for name, _ in slot.tensors]
        _put(values, slot.path, _join(parts, slot.kernel and not model.out_first, dtype))
    nnx.update(model, values)
    return model


def save_pretrained(
    model: Transformer, folder: str | Path, *, max_shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write an HF checkpoint (`config.json`, safetensors) that transformers loads.

    The weights keep their dtype and are written tensor by tensor; more than `max_shard_bytes`
    makes several files and an index. `config.json` comes last: without it the folder is not a
    checkpoint.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(model.dtype)
    slots = {name: slot for slot in tensor_slots(model.config) for name, _ in slot.tensors}
    shapes = {name: shape for slot in slots.values() for name, shape in slot.tensors}
    shards = list(_shards(shapes, dtype.itemsize, max_shard_bytes))
    names = [
        SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for file, shard in zip(names, shards, strict=True):
        tensors = [(name, shapes[name]) for name in shard]
        write_safetensors(
            folder / file, tensors, dtype, lambda name: _tensor(model, slots[name], name)
        )
    for stale in {*folder.glob("model-*.safetensors"), folder / SINGLE, folder / INDEX}:
        if stale.name not in names:
            stale.unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    _write_json(folder / "config.json", model.config.to_hf(dtype=dtype.name))


def random_model(config: ModelConfig, *, dtype: str = "bfloat16", seed: int = 0) -> Transformer:
    """A freshly initialised model; the same seed and config give the same weights."""
    return Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed), out_first=_out_first(dtype))


def _out_first(dtype: str) -> bool:
    """Which kernels the fastest matmuls want: see `decoder.py`."""
    return dtype != "float32"


def _ordered(model: Transformer) -> Transformer:
    """The model with its kernels as the fastest matmuls of its dtype want them."""
    if model.out_first == _out_first(model.dtype.name):
        return model
    turned = Transformer.abstract(
        model.config, dtype=model.dtype.name, out_first=not model.out_first, target=model.target
    )
    values: dict[str | int, Any] = {}
    for slot in tensor_slots(model.config):
        leaf = _parameter(model, slot)
        _put(values, slot.path, leaf.T if slot.kernel else leaf)
    nnx.update(turned, values)
    return turned


def _put(tree: dict[str | int, Any], path: tuple[str | int, ...], value: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(parts: list[jax.Array], transpose: bool, dtype: str) -> jax.Array:
    """One parameter from its HF tensors (see `Slot`)."""
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
    return (whole.T if transpose else whole).astype(dtype)


def _tensor(model: Transformer, slot: Slot, name: str) -> np.ndarray:
    """One HF tensor, cut out of its parameter."""
    start = 0
    for part, shape in slot.tensors:
        if part == name:
            break
        start += shape[0]
    value = np.asarray(_parameter(model, slot))
    if slot.kernel and not model.out_first:
        value = value.T
    return value[start : start + shape[0]]


def _parameter(model: Transformer, slot: Slot) -> jax.Array:
    node: Any = model
    for key in slot.path:
        node = node[key] if isinstance(key, int) else getattr(node, key)
    value: jax.Array = node[...]
    return value


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int, limit: int) -> Iterator[list[str]]:
    """Names, in order, in groups of at most `limit` bytes (or one tensor)."""
    shard: list[str] = []
    size = 0
    for name, shape in shapes.items():
        tensor = math.prod(shape) * itemsize
        if shard and size + tensor > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor
    yield shard


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
