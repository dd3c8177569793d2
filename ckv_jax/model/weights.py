"""Loading and saving of models: HF folders, GGUF files, Orbax checkpoints, and random weights.

Also conversion between formats, weights of int8, and the fingerprints that the store knows models
by.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int8

from ckv_jax.errors import CheckpointError
from ckv_jax.model.checkpoint import (
    CONFIG,
    INDEX,
    ORBAX_WEIGHTS,
    SINGLE,
    Shapes,
    check_fit,
    is_orbax,
    stored_dtype,
    weight_files,
    write_safetensors,
)
from ckv_jax.model.config import ModelConfig, check_weights
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.gguf import is_gguf
from ckv_jax.model.shardings import ONE_DEVICE, Shardings
from ckv_jax.model.tensor_map import Parameter, open_tensors, parameters_of
from ckv_jax.model.tokenizer import load_tokenizer, tokenizer_files
from ckv_jax.storage.chain import Fingerprint, hash_files
from ckv_jax.user_cache import cache_folder, partial_of

_SHARD_BYTES = 4 * 2**30
_ORDER = "kernels_out_first"
Format = Literal["orbax", "hf"]

_GENERATION = "generation_config.json"
KV_ARITHMETIC = 1
"""Version of what this package does between tokens and KV, beside what the checkpoint says.

Raised with any change that makes KV of one version and of the next unfit to stand in one prefix.
The first one goes without saying, so that what it stored stays readable.
"""
_LEVELS = 127
_TABLES = ("embedding", "head")


def load_pretrained(
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    weights: str | None = None,
    shardings: Shardings = ONE_DEVICE,
) -> Transformer:
    """The model of a checkpoint, its weights converted to `dtype` on the device, or with
    `weights="int8"` to that (see `rounded`; `dtype`, bfloat16, is then of the rest).

    A folder that `save_orbax` wrote is restored; any other is in HF's format, and a file is GGUF,
    whose tensors are dequantised. Of these, every tensor is checked before any is read: one that
    is missing, unknown, named twice or of the wrong shape raises a `CheckpointError` that names
    it. Tensors then go to the device one at a time, or each device's part to it, so host memory
    holds one tensor, or the two of one fused kernel. An Orbax folder is restored whole before it
    is split.
    `shardings`: the devices it is split over, if it is.
    Raises `UnsupportedModel` for a config that this model cannot honour, and `ValueError` for
    `weights` that do not exist, or not in `dtype` over these devices.
    """
    check_weights(weights, dtype, shardings.size)
    folder = Path(folder)
    if is_orbax(folder):
        whole = restore_orbax(folder, dtype=dtype)
        if weights is None and shardings.size == 1 and whole.out_first == _out_first(dtype):
            return whole
        model = _abstract(whole.config, dtype, weights, shardings)
        parameters = _by_tensor(whole.config)
        return _filled(model, lambda name: _tensor(whole, parameters[name], name))
    config, sources = open_tensors(folder)
    model = _abstract(config, dtype, weights, shardings)
    return _filled(model, lambda name: sources[name].read(name))


def _abstract(
    config: ModelConfig, dtype: str, weights: str | None, shardings: Shardings
) -> Transformer:
    """The model without its arrays, with its kernels as the fastest matmuls want them."""
    model = Transformer.abstract(
        config, dtype=dtype, out_first=_out_first(dtype), shardings=shardings
    )
    return as_int8(model) if weights == "int8" else model


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
    parameters = _by_tensor(model.config)
    shapes = {name: shape for parameter in parameters.values() for name, shape in parameter.tensors}
    shards = list(_shards(shapes, dtype.itemsize, max_shard_bytes))
    names = [
        SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for file, shard in zip(names, shards, strict=True):
        tensors = [(name, shapes[name]) for name in shard]
        write_safetensors(
            folder / file, tensors, dtype, lambda name: _tensor(model, parameters[name], name)
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


def _by_tensor(config: ModelConfig) -> dict[str, Parameter]:
    """The parameter that each HF tensor is part of, by the tensor's name."""
    return {name: one for one in parameters_of(config) for name, _ in one.tensors}


def _out_first(dtype: str) -> bool:
    """Which kernels the fastest matmuls want: see `decoder.py`."""
    return dtype != "float32"


def _filled(model: Transformer, read: Callable[[str], np.ndarray]) -> Transformer:
    """An abstract model, its parameters made of the HF tensors that `read` gives by name."""
    values: dict[str | int, Any] = {}
    for parameter in parameters_of(model.config):
        parts = [read(name) for name, _ in parameter.tensors]
        if model.int8 and is_int8(parameter):
            codes, scale = rounded(placed(model, parameter, parts, dtype="float32"))
            _put(values, parameter.path, codes)
            _put(values, scale_path(parameter), scale)
        else:
            _put(values, parameter.path, placed(model, parameter, parts))
    nnx.update(model, values)
    return model


def _put(tree: dict[str | int, Any], path: tuple[str | int, ...], value: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _tensor(model: Transformer, parameter: Parameter, name: str) -> np.ndarray:
    """One HF tensor, cut out of its parameter."""
    start = 0
    for part, shape in parameter.tensors:
        if part == name:
            break
        start += shape[0]
    value = np.asarray(_at(model, parameter.path)[...])
    if parameter.kernel and not model.out_first:
        value = value.T
    return value[start : start + shape[0]]


def _at(model: Transformer, path: tuple[str | int, ...]) -> Any:
    """What is at a path of the module tree."""
    node: Any = model
    for key in path:
        node = node[key] if isinstance(key, int) else getattr(node, key)
    return node


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
    partial = partial_of(path)
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def placed(
    model: Transformer, parameter: Parameter, parts: Sequence[np.ndarray], dtype: str | None = None
) -> jax.Array:
    """A parameter of the HF tensors `parts` (see `Parameter`), in `dtype` or the model's.

    Where the model is split, a device gets its rows or columns of every part end to end: of a
    kernel for keys and values its own keys, then its own values.
    """
    dtype, shardings = dtype or model.dtype.name, model.shardings
    transpose = parameter.kernel and not model.out_first
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1:]
    shape = (*columns, rows) if transpose else (rows, *columns)
    spec = shardings.of_name(str(parameter.path[-1]), shape, model.out_first)
    place = shardings.place(spec)
    axes = [axis for axis, name in enumerate(spec) if name is not None]
    if place is None or not axes:
        whole: jax.Array = _join([jax.device_put(part) for part in parts], transpose, dtype)
        return whole if place is None else jax.device_put(whole, place)
    axis = 1 - axes[0] if transpose else axes[0]  # of the HF tensors
    return _shares(parts, axis, transpose, dtype, shape, place)


def check_whole_model(model: Transformer) -> None:
    """Raises `ValueError` for a model that is split, whose fused kernels are in another order, or
    of int8, which no format here has."""
    if model.int8:
        raise ValueError("got a model of int8 weights, expected one that was loaded without them")
    if model.shardings.size > 1:
        raise ValueError(
            f"got a model split over {model.shardings.size} devices, expected one on one device: "
            "load it without tensor_parallel to save it"
        )


def _shares(
    parts: Sequence[np.ndarray], axis: int, transpose: bool, dtype: str, shape: tuple[int, ...],
    place: NamedSharding,
) -> jax.Array:  # fmt: skip
    """An array of each device's share of every part, along `axis` of the parts."""
    size = place.mesh.size
    shares = []
    for index, device in enumerate(place.mesh.devices.flat):
        mine = [np.split(part, size, axis=axis)[index] for part in parts]
        shares.append(_join([jax.device_put(part, device) for part in mine], transpose, dtype))
    return jax.make_array_from_single_device_arrays(shape, place, shares)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(parts: list[jax.Array], transpose: bool, dtype: str) -> jax.Array:
    """The tensors end to end, transposed if need be; their element types may differ."""
    parts = [part.astype(dtype) for part in parts]
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
    return whole.T if transpose else whole


# -- Orbax -----------------------------------------------------------------------------------------


def save_orbax(model: Transformer, folder: str | Path) -> None:
    """Write the weights in their dtype, with the config beside them; replaces what was there.

    Raises `ValueError` for a model that is split over devices.
    """
    check_whole_model(model)
    import orbax.checkpoint as ocp  # slow to import, and only needed here

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ORBAX_WEIGHTS, nnx.to_pure_dict(nnx.state(model)), force=True)
    config = model.config.to_hf(dtype=model.dtype.name) | {_ORDER: model.out_first}
    _write_json(folder / CONFIG, config)


def restore_orbax(folder: str | Path, *, dtype: str | None = None) -> Transformer:
    """The model that `save_orbax` wrote, on this process's first device.

    In its own dtype or `dtype`; the whole model, whatever it is split over later.

    Raises `CheckpointError` if the folder is not such a checkpoint or does not fit its config.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    config = ModelConfig.from_hf(folder)
    if not is_orbax(folder):
        raise CheckpointError(f"not an Orbax checkpoint: {folder} has no {ORBAX_WEIGHTS} folder")
    saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model = Transformer.abstract(
        config, dtype=dtype or stored_dtype(folder), out_first=saved.get(_ORDER, False)
    )
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = jax.tree.map(
        lambda leaf: leaf.update(sharding=place), nnx.to_pure_dict(nnx.state(model))
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            written = checkpointer.metadata(folder / ORBAX_WEIGHTS).item_metadata.tree
            check_fit(folder, _shapes(wanted), _shapes(written))
            values = checkpointer.restore(folder / ORBAX_WEIGHTS, wanted)
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot restore {folder}: {error}") from error
    nnx.update(model, values)
    return model


def _shapes(tree: Any) -> Shapes:
    """The shape of each array of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }


# -- conversion ------------------------------------------------------------------------------------


def convert(source: str | Path, target: str | Path, *, to: Format) -> None:
    """Writes the checkpoint `source`, of any format, as a new folder `target`.

    Weights keep their element type and every bit; those of a checkpoint that mixes several, or
    has quantised ones, become float32. The tokenizer and `generation_config.json` come along.
    `target` appears when all of it is written.

    Raises `ValueError` for a target that is not new or a format that does not exist,
    `CheckpointError` for the source.
    """
    source, target = Path(source), Path(target).absolute()
    if to not in get_args(Format):
        raise ValueError(f"got format {to!r}, expected one of {', '.join(get_args(Format))}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"got {target}, which is there already, expected a new or empty folder")
    beside = tokenizer_files(source)
    if (source / _GENERATION).is_file():
        beside.append(source / _GENERATION)
    model = load_pretrained(source, dtype=stored_dtype(source))
    partial = partial_of(target)
    partial.mkdir(parents=True)
    try:
        for file in beside:
            shutil.copyfile(file, partial / file.name)
        if is_gguf(source):
            load_tokenizer(source).save(partial)
        (save_orbax if to == "orbax" else save_pretrained)(model, partial)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


# -- fingerprints ----------------------------------------------------------------------------------


def model_fingerprint(
    folder: Path, config: ModelConfig, *, dtype: str, weights: str | None = None
) -> Fingerprint:
    """Computes the fingerprint of a checkpoint: content of weights and tokenizer, config, dtype."""
    cache = cache_folder() / "fingerprints.json"
    return fingerprint_of(
        config,
        dtype=dtype if weights is None else f"{dtype}, weights {weights}",
        weights=hash_files(weight_files(folder), cache),
        tokenizer=hash_files(tokenizer_files(folder)),
    )


def fingerprint_of(config: ModelConfig, *, dtype: str, weights: str, tokenizer: str) -> Fingerprint:
    """Makes a fingerprint of a config and of hashes of weights and tokenizer."""
    values = asdict(config)
    for name in ("eos_token_ids", "max_position_embeddings"):
        del values[name]  # these say when a text ends, not what its keys and values are
    for name in ("attention_bias", "mlp_bias"):
        if not values[name]:
            del values[name]  # it went without saying when there was nothing to say
    rope = {key: values.pop(key) for key in ("rope_theta", "rope_scaling")}
    return Fingerprint(
        {
            "weights": weights,
            "config": json.dumps(values, sort_keys=True),
            "tokenizer": tokenizer,
            "rope": json.dumps(rope, sort_keys=True),
            "dtype": dtype,
            **({"arithmetic": str(KV_ARITHMETIC)} if KV_ARITHMETIC > 1 else {}),
        }
    )


# -- weights of int8 -------------------------------------------------------------------------------


def is_int8(parameter: Parameter) -> bool:
    """Whether a parameter is rounded: kernels, embedding and head are; norms and biases stay."""
    return parameter.kernel or parameter.path[-1] in _TABLES


def scale_path(parameter: Parameter) -> tuple[str | int, ...]:
    """Where the scales of a parameter's rows are in the module tree."""
    return (*parameter.path[:-1], f"{parameter.path[-1]}_scale")


def as_int8(model: Transformer) -> Transformer:
    """The same abstract model (`Transformer.abstract`, `out_first`), with weights of int8."""
    for parameter in parameters_of(model.config):
        if not is_int8(parameter):
            continue
        node = _at(model, parameter.path[:-1])
        shape = getattr(node, str(parameter.path[-1])).get_value().shape
        codes, scale = jax.eval_shape(rounded, jax.ShapeDtypeStruct(shape, jnp.float32))  # type: ignore[no-untyped-call]
        setattr(node, str(parameter.path[-1]), nnx.Param(codes))
        setattr(node, str(scale_path(parameter)[-1]), nnx.Param(scale))
    return model


@jax.jit
def rounded(weight: Float[Array, "O I"]) -> tuple[Int8[Array, "O I"], Float32[Array, " O"]]:
    """A weight's numbers, and what one of them is worth in each row: its largest over 127."""
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / _LEVELS
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.rint(wide * inverse[:, None]).astype(jnp.int8), scale
