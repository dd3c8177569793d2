"""Models in and out of memory: HF folders, GGUF files, Orbax checkpoints, and random weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.checkpoint import INDEX, SINGLE, is_orbax
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.int8 import as_int8, is_int8, rounded, scale_path
from ckv_jax.model.orbax_store import restore_orbax, save_orbax
from ckv_jax.model.placing import check_whole_model, placed
from ckv_jax.model.safetensors_file import write_safetensors
from ckv_jax.model.shardings import ONE_DEVICE, Shardings
from ckv_jax.model.tensor_map import Slot, open_tensors, tensor_slots

__all__ = [
    "int8_model",
    "load_pretrained",
    "random_model",
    "restore_orbax",
    "save_orbax",
    "save_pretrained",
    "split_model",
]

_SHARD_BYTES = 4 * 2**30


def load_pretrained(
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    weights: str | None = None,
    target: Target | None = None,
    shardings: Shardings = ONE_DEVICE,
) -> Transformer:
    """The model of a checkpoint, its weights converted to `dtype` on the device, or with
    `weights="int8"` to that (`int8.py`; `dtype` is then of the rest, and not float32).

    A folder that `save_orbax` wrote is restored; any other is in HF's format, and a file is GGUF,
    whose tensors are dequantised. Of these, every tensor is checked before any is read: one that
    is missing, unknown, named twice or of the wrong shape raises a `CheckpointError` that names
    it. Tensors then go to the device one at a time, or each device's part to it, so host memory
    holds one tensor, or the two of one fused kernel. An Orbax folder is restored whole before it
    is split.
    `target`: what its calls will be compiled for; None: the default device.
    `shardings`: the devices it is split over, if it is.
    Raises `UnsupportedModel` for a config that this model cannot honour.
    """
    folder = Path(folder)
    if is_orbax(folder):
        whole = _ordered(restore_orbax(folder, dtype=dtype, target=target))
        return int8_model(whole) if weights == "int8" else split_model(whole, shardings)
    config, sources = open_tensors(folder)
    model = Transformer.abstract(
        config, dtype=dtype, out_first=_out_first(dtype), target=target, shardings=shardings
    )
    if weights == "int8":
        model = as_int8(model)
    return _filled(model, lambda name: sources[name].read(name))


def int8_model(model: Transformer) -> Transformer:
    """A model on one device with its weights of int8, from their values in its dtype."""
    slots = {name: slot for slot in tensor_slots(model.config) for name, _ in slot.tensors}
    parts = Transformer.abstract(
        model.config, dtype=model.dtype.name, out_first=True, target=model.target
    )
    return _filled(as_int8(parts), lambda name: _tensor(model, slots[name], name))


def split_model(model: Transformer, shardings: Shardings) -> Transformer:
    """A model on one device, split over several; the model itself for one device."""
    if shardings.size == 1:
        return model
    slots = {name: slot for slot in tensor_slots(model.config) for name, _ in slot.tensors}
    parts = Transformer.abstract(
        model.config, dtype=model.dtype.name, out_first=model.out_first, target=model.target,
        shardings=shardings,
    )  # fmt: skip
    return _filled(parts, lambda name: _tensor(model, slots[name], name))


def save_pretrained(
    model: Transformer, folder: str | Path, *, max_shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write an HF checkpoint (`config.json`, safetensors) that transformers loads.

    The weights keep their dtype and are written tensor by tensor; more than `max_shard_bytes`
    makes several files and an index. `config.json` comes last: without it the folder is not a
    checkpoint. Raises `ValueError` for a model that is split over devices.
    """
    check_whole_model(model)
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


def random_model(
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shardings: Shardings = ONE_DEVICE,
) -> Transformer:
    """A freshly initialised model; the same seed and config give the same weights."""
    whole = Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed), out_first=_out_first(dtype))
    return split_model(whole, shardings)


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


def _filled(model: Transformer, read: Callable[[str], np.ndarray]) -> Transformer:
    """An abstract model, its parameters made of the HF tensors that `read` gives by name."""
    values: dict[str | int, Any] = {}
    for slot in tensor_slots(model.config):
        parts = [read(name) for name, _ in slot.tensors]
        if model.int8 and is_int8(slot):
            codes, scale = rounded(placed(model, slot, parts, dtype="float32"))
            _put(values, slot.path, codes)
            _put(values, scale_path(slot), scale)
        else:
            _put(values, slot.path, placed(model, slot, parts))
    nnx.update(model, values)
    return model


def _put(tree: dict[str | int, Any], path: tuple[str | int, ...], value: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


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
