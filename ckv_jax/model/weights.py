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

from ckv_jax.errors import CheckpointError
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.orbax_store import (
    is_orbax,
    orbax_dtype,
    orbax_files,
    restore_orbax,
    save_orbax,
)
from ckv_jax.model.qwen2 import Qwen2
from ckv_jax.model.safetensors_file import SafetensorsFile, write_safetensors
from ckv_jax.model.tensor_map import Slot, tensor_slots

__all__ = [
    "load_pretrained",
    "random_model",
    "restore_orbax",
    "save_orbax",
    "save_pretrained",
    "stored_dtype",
    "weight_files",
]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 4 * 2**30


def load_pretrained(
    folder: str | Path, *, dtype: str = "bfloat16", target: Target | None = None
) -> Qwen2:
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
    files = _locate(folder)
    _check_fit(folder, slots, {name: file.shapes[name] for name, file in files.items()})
    model = Qwen2.abstract(config, dtype=dtype, out_first=_out_first(dtype), target=target)
    values: dict[str | int, Any] = {}
    for slot in slots:
        parts = [jax.device_put(files[name].read(name)) for name, _ in slot.tensors]
        _put(values, slot.path, _join(parts, slot.kernel and not model.out_first, dtype))
    nnx.update(model, values)
    return model


def save_pretrained(
    model: Qwen2, folder: str | Path, *, max_shard_bytes: int = _SHARD_BYTES
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
        _SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for file, shard in zip(names, shards, strict=True):
        tensors = [(name, shapes[name]) for name in shard]
        write_safetensors(
            folder / file, tensors, dtype, lambda name: _tensor(model, slots[name], name)
        )
    for stale in {*folder.glob("model-*.safetensors"), folder / _SINGLE, folder / _INDEX}:
        if stale.name not in names:
            stale.unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    _write_json(folder / "config.json", model.config.to_hf(dtype=dtype.name))


def random_model(config: ModelConfig, *, dtype: str = "bfloat16", seed: int = 0) -> Qwen2:
    """A freshly initialised model; the same seed and config give the same weights."""
    return Qwen2(config, dtype=dtype, rngs=nnx.Rngs(seed), out_first=_out_first(dtype))


def _out_first(dtype: str) -> bool:
    """Which kernels the fastest matmuls want: see `qwen2.py`."""
    return dtype != "float32"


def _ordered(model: Qwen2) -> Qwen2:
    """The model with its kernels as the fastest matmuls of its dtype want them."""
    if model.out_first == _out_first(model.dtype.name):
        return model
    turned = Qwen2.abstract(
        model.config,
        dtype=model.dtype.name,
        out_first=not model.out_first,
        target=model.target,
    )
    values: dict[str | int, Any] = {}
    for slot in tensor_slots(model.config):
        leaf = _parameter(model, slot)
        _put(values, slot.path, leaf.T if slot.kernel else leaf)
    nnx.update(turned, values)
    return turned


def weight_files(folder: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights, sorted; `CheckpointError` if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if is_orbax(folder):
        return orbax_files(folder)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        return sorted({folder / file for file in _weight_map(folder).values()})
    raise CheckpointError(
        f"not a checkpoint: {folder} has neither {_SINGLE} nor {_INDEX}"
        + ("; convert pytorch_model*.bin first" if list(folder.glob("pytorch_model*.bin")) else "")
    )


def stored_dtype(folder: str | Path) -> str:
    """The element type of a checkpoint's weights; float32 where it mixes several."""
    if is_orbax(folder):
        return orbax_dtype(folder)
    dtypes = {dtype.name for path in weight_files(folder) for dtype in SafetensorsFile(path).dtypes}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _locate(folder: Path) -> dict[str, SafetensorsFile]:
    """Which file holds each tensor, checked against the index where there is one."""
    files = [SafetensorsFile(path) for path in weight_files(folder)]
    places: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.shapes:
            if name in places:
                raise CheckpointError(
                    f"duplicate tensor {name!r}: in {places[name].path.name} and {file.path.name}"
                )
            places[name] = file
    if files[0].path.name == _SINGLE:
        return places
    index = _weight_map(folder)
    for name, file_name in index.items():
        if name not in places or places[name].path.name != file_name:
            raise CheckpointError(f"missing tensor {name!r}: {_INDEX} places it in {file_name}")
    for name, file in places.items():
        if name not in index:
            raise CheckpointError(f"unknown tensor {name!r} in {file.path.name}, not in {_INDEX}")
    return places


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / _INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = all(Path(file).name == file for file in places.values())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {error!r}") from error
    if not plain or not places:
        raise CheckpointError(f"{path} is empty or points outside its folder")
    return dict(places)


def _check_fit(folder: Path, slots: list[Slot], found: dict[str, tuple[int, ...]]) -> None:
    expected = dict(tensor for slot in slots for tensor in slot.tensors)
    faults = [f"missing tensor {name!r} {shape}" for name, shape in expected.items()
              if name not in found]  # fmt: skip
    faults += [f"unknown tensor {name!r} {found[name]}" for name in found if name not in expected]
    faults += [
        f"tensor {name!r} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit its config: {'; '.join(faults[:5])}{more}"
        )


def _put(tree: dict[str | int, Any], path: tuple[str | int, ...], value: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(parts: list[jax.Array], transpose: bool, dtype: str) -> jax.Array:
    """One parameter from its HF tensors (see `Slot`)."""
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
    return (whole.T if transpose else whole).astype(dtype)


def _tensor(model: Qwen2, slot: Slot, name: str) -> np.ndarray:
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


def _parameter(model: Qwen2, slot: Slot) -> jax.Array:
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
